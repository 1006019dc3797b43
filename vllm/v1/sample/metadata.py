"""What the sampler must know about the rows of one call, and nothing that no row asks for."""

from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.sample.logits_processor import LogitsEdits
from vllm.v1.sample.ops.logprobs import RowKind, ScoreTable, find_runs
from vllm.v1.sample.ops.penalties import Penalties


class Filters(NamedTuple):
    """The rows that ask for top-k, top-p or min-p."""

    rows: np.ndarray  # [num_filtered] int64
    temperature: np.ndarray  # [num_filtered] float32
    top_k: np.ndarray  # [num_filtered] int64, the vocabulary's size: off
    top_p: np.ndarray  # [num_filtered] float32, 1: off
    min_p: np.ndarray  # [num_filtered] float32, 0: off

    def settings_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return all but the rows as tensors."""
        return [torch.from_numpy(array).to(device) for array in self[1:]]


class Draws(NamedTuple):
    """One entry a draw, in the order of the rows; a row may be drawn from several times."""

    row_of_draw: np.ndarray  # [num_draws] int32, rising
    seeds: np.ndarray  # [num_draws] int64, bits of the 64-bit seed
    positions: np.ndarray  # [num_draws] int64, the place of the drawn token in its sequence

    def take(self, index: np.ndarray) -> "Draws":
        return Draws(self.row_of_draw[index], self.seeds[index], self.positions[index])


class ScoredSpan(NamedTuple):
    """Adjacent rows that are scored alike: a draw each, or one row with several draws."""

    first: int
    end: int
    first_draw: int
    num_draws: int
    kept_first: int | None  # where its rows start among the kept raw rows; None: read the logits in place


class SamplingMetadata(NamedTuple):
    """How to sample from the rows of one call."""

    num_rows: int
    is_greedy: np.ndarray  # [num_rows] bool
    draws: Draws
    temperature: np.ndarray | None = None  # [num_rows] float32, 1 for greedy rows; None: no row is divided
    filters: Filters | None = None
    edits: LogitsEdits | None = None
    penalties: Penalties | None = None
    score_table: ScoreTable | None = None  # of all rows; None: no row asks
    kept_rows: np.ndarray | None = None  # [num_kept] int64: rows whose raw logits are scored but changed before that
    spans: tuple[ScoredSpan, ...] = ()

    @property
    def all_greedy(self) -> bool:
        return bool(self.is_greedy.all())

    @property
    def all_random(self) -> bool:
        return not self.is_greedy.any()


def find_changed_rows(
    num_rows: int,
    temperature: np.ndarray | None,
    filters: Filters | None,
    edits: LogitsEdits | None,
    penalty_rows: list[int],
) -> np.ndarray:  # [num_rows] bool
    """Say which rows of logits are changed between the model and the draw."""
    is_changed = np.zeros(num_rows, dtype=bool) if temperature is None else temperature != 1
    if filters is not None:
        is_changed[filters.rows] = True
    if edits is not None:
        is_changed[edits.changed_rows] = True
    is_changed[penalty_rows] = True
    return is_changed


def group_scored_rows(
    table: ScoreTable,
    wants_processed: np.ndarray,  # [num_rows] bool
    is_changed: np.ndarray,  # [num_rows] bool
    num_draws: np.ndarray,  # [num_rows] int64
) -> tuple[np.ndarray | None, tuple[ScoredSpan, ...]]:
    """Return the rows whose raw logits must be kept, and the spans to score.

    Rows that sort by kind make few spans; any order is right.
    """
    wants_scores = table.kinds != RowKind.NONE
    is_kept = wants_scores & ~wants_processed & is_changed
    kept_before = np.cumsum(is_kept) - is_kept
    draws_before = np.cumsum(num_draws) - num_draws
    # A row with several draws is a span of its own: the key parts it from its neighbours.
    family = np.where(num_draws == 1, 0, np.arange(1, len(num_draws) + 1))
    key = family * 4 + wants_scores * 2 + is_kept
    spans = []
    for first, end in find_runs(key):
        if wants_scores[first]:
            kept_first = int(kept_before[first]) if is_kept[first] else None
            span_draws = int(num_draws[first:end].sum())
            spans.append(ScoredSpan(first, end, int(draws_before[first]), span_draws, kept_first))
    kept_rows = np.flatnonzero(is_kept)
    return (kept_rows if len(kept_rows) else None), tuple(spans)
