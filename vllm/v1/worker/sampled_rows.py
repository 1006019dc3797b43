"""Which rows a step samples from, in chunks of a bounded number of rows."""

from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.sample.ops.logprobs import RowKind
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampling_inputs import order_sampled_rows
from vllm.v1.worker.scored_rows import OwnedRows
from vllm.v1.worker.step_inputs import StepInputs


class SampledChunk(NamedTuple):
    """Requests that are sampled from together."""

    request_ids: list[str]
    rows: np.ndarray  # [num_rows] int64, rows of the batch
    hidden_rows: slice | torch.Tensor  # the last one of each: neighbours in rising order, or [num_rows] int64, device
    num_draws: list[int]
    owners: list[OwnedRows]  # of those that are scored


class SampledRows:
    """Finds the chunks of one batch, step after step."""

    def __init__(self, batch: InputBatch, max_rows: int, device: torch.device) -> None:
        self._batch = batch
        self._max_rows = max_rows  # of a chunk
        self._device = device
        self._request_ids: list[str] | None = None
        self._chunks: list[SampledChunk] = []

    def find(self, inputs: StepInputs) -> list[SampledChunk]:
        """Return the step's chunks."""
        # The same list stands for the same sequences in the same places, a token each (see `InputsOfSteps`).
        if inputs.request_ids is not self._request_ids:
            self._request_ids, self._chunks = inputs.request_ids, self._find(inputs)
        return self._chunks

    def _find(self, inputs: StepInputs) -> list[SampledChunk]:
        sampled = np.flatnonzero(inputs.is_sampled)
        if not len(sampled):
            return []
        sampled = sampled[order_sampled_rows(self._batch, inputs.rows[sampled])]
        return [
            self._make_chunk(inputs, sampled[first : first + self._max_rows])
            for first in range(0, len(sampled), self._max_rows)
        ]

    def _make_chunk(self, inputs: StepInputs, sampled: np.ndarray) -> SampledChunk:
        batch, rows = self._batch, inputs.rows[sampled]
        request_ids = [inputs.request_ids[i] for i in sampled.tolist()]
        num_draws, kinds = batch.num_draws[rows].tolist(), batch.score_kind[rows].tolist()
        owners = [
            OwnedRows(request_id, count, RowKind(kind))
            for request_id, count, kind in zip(request_ids, num_draws, kinds, strict=True)
            if kind != RowKind.NONE
        ]
        hidden_rows = make_row_index(inputs.query_starts[sampled + 1] - 1, self._device)
        return SampledChunk(request_ids, rows, hidden_rows, num_draws, owners)


def make_row_index(rows: np.ndarray, device: torch.device) -> slice | torch.Tensor:  # [num_rows] int64
    """Return what takes these rows: a slice, which copies nothing, where they are neighbours in rising order.

    Those of a step of decodes are.
    """
    first, num_rows = int(rows[0]), len(rows)
    is_slice = int(rows[-1]) - first + 1 == num_rows and bool((np.diff(rows) == 1).all())
    return slice(first, first + num_rows) if is_slice else torch.from_numpy(rows).to(device)
