"""The scorer: for rows of logits, the chosen token's value and rank, and those of its alternatives.

A sampled position and a prompt position are scored by the same `score`; only the rows differ. What a row asks for
decides its kind. Adjacent rows of one kind go through one call of the compiled op.
"""

import enum
from typing import NamedTuple

import numpy as np
import torch

from vllm.ops import api as ops
from vllm.v1.outputs import LogprobsTensors, Scores, WideRows

# Rows with more alternatives leave as blocks of their own: one such row must not widen the rectangle for all others.
MAX_RECTANGLE_TOP = 128


class RowKind(enum.IntEnum):
    """What a row asks of the scorer; the numbers order the rows of a step."""

    NONE = 0
    TOP = 1  # the k most likely, k up to 128
    GIVEN = 2  # ids that the request names
    WIDE = 3  # the k most likely, k beyond 128
    FULL = 4  # the whole vocabulary

    @property
    def is_rectangular(self) -> bool:
        return self in (RowKind.TOP, RowKind.GIVEN)


def choose_kind(num_top: int | None, has_given_ids: bool, vocab_size: int) -> RowKind:
    """Return the kind of a row that asks for `num_top` alternatives (None: none asked) or for given ids."""
    if has_given_ids:
        return RowKind.GIVEN
    if num_top is None:
        return RowKind.NONE
    if num_top <= MAX_RECTANGLE_TOP:
        return RowKind.TOP
    return RowKind.FULL if num_top >= vocab_size else RowKind.WIDE


class ScoreTable(NamedTuple):
    """What each row of a call asks for (host arrays)."""

    kinds: np.ndarray  # [num_rows] int8, RowKind
    num_top: np.ndarray  # [num_rows] int32
    as_logits: np.ndarray  # [num_rows] bool: values are logits, else log-probabilities
    given_ids: np.ndarray | None = None  # [num_rows, max_given] int32, padded with -1

    def take_rows(self, index: np.ndarray | slice) -> "ScoreTable":
        given = None if self.given_ids is None else self.given_ids[index]
        return ScoreTable(self.kinds[index], self.num_top[index], self.as_logits[index], given)

    def find_runs(self) -> list[tuple[int, int]]:
        """Return (first, end) of each stretch of rows that one call of an op can serve."""
        key = self.kinds.astype(np.int16) * 2 + self.as_logits
        return find_runs(key)


def find_runs(key: np.ndarray) -> list[tuple[int, int]]:  # [num_rows]
    """Return (first, end) of each stretch of equal values in `key`."""
    if not len(key):
        return []
    bounds = [0, *(np.flatnonzero(key[1:] != key[:-1]) + 1).tolist(), len(key)]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def score(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
    chosen: torch.Tensor,  # [num_rows] int32 or int64
    table: ScoreTable,  # of the same rows, none of kind NONE
) -> Scores:
    """Score each row as `table` asks.

    Log-probabilities are logit − log(sum(exp(logits))) of the row. Ties are ordered by token id, lowest first.
    """
    rectangle: list[LogprobsTensors] = []
    wide: list[WideRows] = []
    is_finite: list[torch.Tensor] = []
    for first, end in table.find_runs():
        kind = RowKind(int(table.kinds[first]))
        as_logits = bool(table.as_logits[first])
        run_logits, run_chosen = logits[first:end], chosen[first:end]
        if kind is RowKind.FULL:
            values, ranks, run_is_finite = ops.score_full_rows(run_logits, as_logits)
            wide.append(WideRows(first, run_chosen.int(), None, values, ranks))
        else:
            *columns, run_is_finite = _score_some(
                run_logits, run_chosen, kind, table.take_rows(slice(first, end)), as_logits
            )
            if kind is RowKind.WIDE:
                wide.append(WideRows(first, run_chosen.int(), *columns))
            else:
                rectangle.append(LogprobsTensors(*columns))
        is_finite.append(run_is_finite)
    return Scores(LogprobsTensors.concatenate(rectangle) if rectangle else None, wide, torch.cat(is_finite))


def _score_some(
    logits: torch.Tensor, chosen: torch.Tensor, kind: RowKind, table: ScoreTable, as_logits: bool
) -> tuple[torch.Tensor, ...]:
    """Score rows of one kind; returns token_ids, values, ranks, is_finite."""
    if kind is RowKind.GIVEN:
        assert table.given_ids is not None, "rows with given ids need the ids"
        width = max(1, int((table.given_ids >= 0).sum(axis=1).max()))  # other rows of the step may have more
        given = torch.from_numpy(np.ascontiguousarray(table.given_ids[:, :width])).to(logits.device)
        scored = ops.score_given_ids(logits, chosen, given, as_logits)
        return scored.token_ids, scored.values, scored.ranks, scored.is_finite
    num_top = torch.from_numpy(np.ascontiguousarray(table.num_top)).to(logits.device)
    max_top = min(int(table.num_top.max()), logits.shape[1])
    scored = ops.score_rows(logits, chosen, num_top, max_top, as_logits)
    return scored.token_ids, scored.values, scored.ranks, scored.is_finite
