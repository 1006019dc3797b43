"""Which rows of the hidden states pass the LM head: the sampled ones, and the prompt rows that were asked for.

Prompt rows go through in chunks of a bounded number of rows, each into the same workspace, whatever the prompt's
length; nothing else ever becomes logits.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vllm.v1.messages import PromptRange
from vllm.v1.sample.ops.logprobs import RowKind, ScoreTable
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.step_inputs import StepInputs

WORKSPACE_BYTES = 48 << 20
MIN_WORKSPACE_ROWS = 16


def choose_workspace_rows(vocab_size: int) -> int:
    """Return how many rows of logits the workspace holds."""
    return max(MIN_WORKSPACE_ROWS, WORKSPACE_BYTES // (4 * vocab_size))


class OwnedRows(NamedTuple):
    """Adjacent scored rows of one request."""

    request_id: str
    num_rows: int
    kind: RowKind
    num_step_rows: int  # of this request in the whole step


class PromptChunk(NamedTuple):
    """Prompt rows that are scored together."""

    hidden_rows: np.ndarray  # [num_rows] int64, rows of the step's hidden states
    chosen: np.ndarray  # [num_rows] int32, the prompt token that each row predicts
    table: ScoreTable
    owners: list[OwnedRows]


def iter_prompt_chunks(
    batch: InputBatch, inputs: StepInputs, ranges: dict[str, PromptRange], max_rows: int
) -> Iterator[PromptChunk]:
    """Yield the prompt rows of a step in chunks of at most `max_rows`, a request's in order.

    The token at position i is predicted by the row of position i − 1. It comes from the request's own tokens: at
    the end of a step it lies in the next one.
    """
    for kind, as_logits, request_ids in _group_by_kind(batch, ranges):
        # Wide rows leave as large as they came, with their ranks: smaller chunks keep the same bound.
        chunk_rows = max_rows if kind.is_rectangular else max(1, max_rows // 4)
        counts = np.array([ranges[request_id].end - ranges[request_id].first for request_id in request_ids])
        hidden_rows = np.concatenate([_find_hidden_rows(inputs, name, ranges[name]) for name in request_ids])
        chosen = np.concatenate(
            [batch.token_ids[batch.row_of[name], ranges[name].first : ranges[name].end] for name in request_ids]
        )
        num_top = np.repeat(batch.prompt_num_top[[batch.row_of[name] for name in request_ids]], counts)
        ends = np.cumsum(counts)
        for first in range(0, len(hidden_rows), chunk_rows):
            end = min(first + chunk_rows, len(hidden_rows))
            num_rows = end - first
            yield PromptChunk(
                hidden_rows=hidden_rows[first:end],
                chosen=chosen[first:end],
                table=ScoreTable(
                    np.full(num_rows, kind, np.int8), num_top[first:end], np.full(num_rows, as_logits, np.bool_)
                ),
                owners=[
                    OwnedRows(name, min(int(last), end) - max(int(last - count), first), kind, int(count))
                    for name, last, count in zip(request_ids, ends, counts, strict=True)
                    if last > first and last - count < end
                ],
            )


def _group_by_kind(batch: InputBatch, ranges: dict[str, PromptRange]) -> Iterator[tuple[RowKind, bool, list[str]]]:
    """Yield (kind, as_logits, request ids) for what can be scored in common calls."""
    groups: dict[tuple[RowKind, bool], list[str]] = {}
    for request_id, positions in ranges.items():
        row = batch.row_of[request_id]
        kind = RowKind(int(batch.prompt_kind[row]))
        assert kind is not RowKind.NONE, f"{request_id} did not ask for prompt logprobs"
        if positions.end > positions.first:
            groups.setdefault((kind, bool(batch.as_logits[row])), []).append(request_id)
    for (kind, as_logits), request_ids in sorted(groups.items()):
        yield kind, as_logits, request_ids


def _find_hidden_rows(inputs: StepInputs, request_id: str, positions: PromptRange) -> np.ndarray:
    """Return the rows of the hidden states that predict the tokens at `positions`."""
    index = inputs.index_of[request_id]
    start = int(inputs.query_starts[index])
    num_tokens = int(inputs.query_starts[index + 1]) - start
    offset = positions.first - 1 - int(inputs.first_positions[index])
    count = positions.end - positions.first
    assert offset >= 0 and offset + count <= num_tokens, f"{request_id}: {positions} is not in this step"
    return np.arange(start + offset, start + offset + count)
