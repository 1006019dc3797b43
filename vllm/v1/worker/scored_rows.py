"""Which rows of the hidden states pass the LM head: the sampled ones, and the prompt rows that were asked for.

Prompt rows go through in chunks of a bounded number of rows, each into the same workspace, whatever the prompt's
length; nothing else ever becomes logits. A prompt token whose score its block keeps passes no head: it is read.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vllm.v1.messages import PromptRange
from vllm.v1.sample.ops.logprobs import RowKind, ScoreTable
from vllm.v1.worker.gpu_input_batch import InputBatch

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


class PromptChunk(NamedTuple):
    """Prompt tokens that are scored together."""

    rows: np.ndarray  # [num_rows] int64, rows of the batch
    positions: np.ndarray  # [num_rows] int64, of the tokens; the row of position − 1 predicts each
    chosen: np.ndarray  # [num_rows] int32, the tokens
    table: ScoreTable
    owners: list[OwnedRows]
    is_kept: bool  # what is kept of a score is all that these ask for


class KeptAnswer(NamedTuple):
    """Prompt tokens whose answers are read from what their blocks keep, once all that was missing is there."""

    rows: np.ndarray  # [num_rows] int64, rows of the batch
    positions: np.ndarray  # [num_rows] int64, of the tokens
    num_top: np.ndarray  # [num_rows] int32
    as_logits: bool
    owners: list[OwnedRows]


class _Group(NamedTuple):
    """Requests that can be scored in common calls; the order of its fields is the order of the groups."""

    kind: RowKind
    as_logits: bool
    is_kept: bool


def iter_prompt_chunks(
    batch: InputBatch,
    ranges: dict[str, PromptRange],
    known: dict[str, list[PromptRange]],
    max_rows: int,
    num_kept: int,  # alternatives of a kept score; −1: none is kept
) -> Iterator[PromptChunk]:
    """Yield the prompt tokens of a step that must pass the head, in chunks of at most `max_rows`, a request's in order.

    A token comes from the request's own tokens: at the end of a step it lies in the next one.
    """
    for group, request_ids in _group_by_kind(batch, ranges, num_kept).items():
        # Wide rows leave as large as they came, with their ranks: smaller chunks keep the same bound.
        chunk_rows = max_rows if group.kind.is_rectangular else max(1, max_rows // 4)
        tokens = [_list_unknown(ranges[name], known.get(name, [])) for name in request_ids]
        counts = np.array([len(positions) for positions in tokens])
        positions = np.concatenate(tokens)
        rows = np.repeat(np.array([batch.row_of[name] for name in request_ids], dtype=np.int64), counts)
        ends = np.cumsum(counts)
        for first in range(0, len(positions), chunk_rows):
            end = min(first + chunk_rows, len(positions))
            some, num_rows = rows[first:end], end - first
            yield PromptChunk(
                rows=some,
                positions=positions[first:end],
                chosen=batch.token_ids[some, positions[first:end]],
                table=ScoreTable(
                    np.full(num_rows, group.kind, np.int8),
                    batch.prompt_num_top[some],
                    np.full(num_rows, group.as_logits, np.bool_),
                ),
                owners=[
                    OwnedRows(name, min(int(last), end) - max(int(last - count), first), group.kind)
                    for name, last, count in zip(request_ids, ends, counts, strict=True)
                    if last > first and last - count < end
                ],
                is_kept=group.is_kept,
            )


def iter_kept_answers(batch: InputBatch, ranges: dict[str, PromptRange], num_kept: int) -> Iterator[KeptAnswer]:
    """Yield all prompt tokens of a step whose answers are read: one piece for logits, one for log-probabilities."""
    by_form: dict[bool, list[str]] = {False: [], True: []}
    for name in ranges:
        if _find_group(batch, name, num_kept).is_kept:
            by_form[bool(batch.as_logits[batch.row_of[name]])].append(name)
    for as_logits, request_ids in by_form.items():
        if not request_ids:
            continue
        counts = [ranges[name].end - ranges[name].first for name in request_ids]
        rows = np.repeat(np.array([batch.row_of[name] for name in request_ids], dtype=np.int64), counts)
        yield KeptAnswer(
            rows=rows,
            positions=np.concatenate([np.arange(*ranges[name], dtype=np.int64) for name in request_ids]),
            num_top=batch.prompt_num_top[rows],
            as_logits=as_logits,
            owners=[OwnedRows(name, count, RowKind.TOP) for name, count in zip(request_ids, counts, strict=True)],
        )


def _group_by_kind(batch: InputBatch, ranges: dict[str, PromptRange], num_kept: int) -> dict[_Group, list[str]]:
    groups: dict[_Group, list[str]] = {}
    for request_id, positions in ranges.items():
        if positions.end > positions.first:
            groups.setdefault(_find_group(batch, request_id, num_kept), []).append(request_id)
    return dict(sorted(groups.items()))


def _find_group(batch: InputBatch, request_id: str, num_kept: int) -> _Group:
    row = batch.row_of[request_id]
    kind = RowKind(int(batch.prompt_kind[row]))
    assert kind is not RowKind.NONE, f"{request_id} did not ask for prompt logprobs"
    is_kept = kind is RowKind.TOP and int(batch.prompt_num_top[row]) <= num_kept
    return _Group(kind, bool(batch.as_logits[row]) and not is_kept, is_kept)


def _list_unknown(positions: PromptRange, known: list[PromptRange]) -> np.ndarray:  # [num] int64
    """Return the positions that none of the `known` stretches holds."""
    listed = np.arange(positions.first, positions.end, dtype=np.int64)
    if not known:
        return listed
    is_known = np.zeros(len(listed), dtype=np.bool_)
    for first, end in known:
        is_known[first - positions.first : end - positions.first] = True
    return listed[~is_known]
