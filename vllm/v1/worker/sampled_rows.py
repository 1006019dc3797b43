"""Which rows a step samples from, in chunks of a bounded number of rows."""

from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.logprobs import RowKind
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampling_inputs import advance_sampling_metadata, make_sampling_metadata
from vllm.v1.worker.scored_rows import OwnedRows


class SampledChunk(NamedTuple):
    """Requests that are sampled from together."""

    request_ids: list[str]
    rows: np.ndarray  # [num_rows] int64, rows of the batch
    hidden_rows: slice | torch.Tensor  # the last one of each: neighbours in rising order, or [num_rows] int64, device
    num_draws: list[int]
    owners: list[OwnedRows]  # of those that are scored
    metadata: SamplingMetadata


def make_sampled_chunks(
    batch: InputBatch,
    rows: np.ndarray,  # [num_sampled] int64, rows of the batch
    hidden_rows: np.ndarray,  # [num_sampled] int64, the last one of each
    max_rows: int,
    device: torch.device,
) -> list[SampledChunk]:
    """Return chunks of at most `max_rows`."""
    order = order_sampled_rows(batch, rows)
    chunks = []
    for first in range(0, len(rows), max_rows):
        index = order[first : first + max_rows]
        some = rows[index]
        request_ids = [batch.requests[row].request_id for row in some.tolist()]
        num_draws, kinds = batch.num_draws[some].tolist(), batch.score_kind[some].tolist()
        owners = [
            OwnedRows(request_id, count, RowKind(kind))
            for request_id, count, kind in zip(request_ids, num_draws, kinds, strict=True)
            if kind != RowKind.NONE
        ]
        metadata = make_sampling_metadata(batch, some, device)
        index_of_rows = make_row_index(hidden_rows[index], device)
        chunks.append(SampledChunk(request_ids, some, index_of_rows, num_draws, owners, metadata))
    return chunks


def advance_sampled_chunk(batch: InputBatch, chunk: SampledChunk, device: torch.device) -> SampledChunk:
    """Return the chunk of the next step, in which the same rows have got one token each."""
    return chunk._replace(metadata=advance_sampling_metadata(batch, chunk.rows, chunk.metadata, device))


def order_sampled_rows(batch: InputBatch, rows: np.ndarray) -> np.ndarray:  # [num_rows] → [num_rows] int64
    """Return an order of `rows` in which those that are scored alike are adjacent, so that a slice serves them."""
    if len(rows) == 1 or not batch.score_kind[rows].any():
        return np.arange(len(rows))
    is_changed = batch.has_filters | batch.has_rules | batch.has_penalties | (batch.temperature != 1)
    keys = (
        batch.as_logits[rows],
        batch.score_kind[rows],
        (is_changed & ~batch.wants_processed)[rows],
        batch.num_draws[rows] > 1,  # the first key of the order stands last
    )
    return np.lexsort(keys)


def make_row_index(rows: np.ndarray, device: torch.device) -> slice | torch.Tensor:  # [num_rows] int64
    """Return what takes these rows: a slice, which copies nothing, where they are neighbours in rising order.

    Those of a step of decodes are.
    """
    first, num_rows = int(rows[0]), len(rows)
    is_slice = int(rows[-1]) - first + 1 == num_rows and bool((np.diff(rows) == 1).all())
    return slice(first, first + num_rows) if is_slice else torch.from_numpy(rows).to(device)
