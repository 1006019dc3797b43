"""Where one sequence's scored rows gather, step by step."""

import numpy as np

from vllm.logprobs import FlatLogprobs
from vllm.logprobs_rows import ArrayRows, TokenTexts, make_views


class LogprobsBuffer:
    """Gathers one sequence's rows as they come, copied out of each step's block.

    `num_none` positions without scores stand in front (a prompt's first one has none). The positions that it hands out
    read their text from `texts`, as rows counted from the first one that was ever in the buffer.
    """

    __slots__ = ("_chosen_at", "_first_row", "_num_entries", "_num_rows", "_ranks", "_row_starts", "_token_ids",
                 "_values", "_views", "texts")  # fmt: skip

    def __init__(self, num_none: int = 0, texts: TokenTexts | None = None) -> None:
        self.texts = texts
        self._first_row = 0
        self._restart(num_none)

    def _restart(self, num_none: int = 0) -> None:
        """Begin with arrays of our own: those so far may be in somebody's hands."""
        self._num_rows = num_none
        self._num_entries = 0
        self._row_starts = np.zeros(num_none + 9, np.int64)  # [capacity + 1]
        self._token_ids: np.ndarray | None = np.empty(8, np.int32)  # [capacity of entries], like the next two
        self._values = np.empty(8, np.float32)
        self._ranks = np.empty(8, np.int32)
        self._chosen_at: np.ndarray | None = None  # [capacity] int64, with rows in id order
        self._views = make_views(self._token_ids, self._values, self._ranks)

    def __len__(self) -> int:
        """How many positions it holds (those taken are gone)."""
        return self._num_rows

    @property
    def num_taken(self) -> int:
        """How many positions `take` has handed out."""
        return self._first_row

    def append_rows(self, block: FlatLogprobs, first: int = 0, end: int | None = None) -> None:
        """Copy rows first … end − 1 of `block` to the end."""
        rows = block._rows if isinstance(block._rows, ArrayRows) else block._get_arrays()
        starts = rows.starts
        if end is None:
            end = len(starts) - 1
        if (rows.chosen_at is None) is not (self._chosen_at is None) or (
            (rows.token_ids is None) is not (self._token_ids is None)
        ):
            if end == first:
                return
            rows = self._settle_order(rows.select(slice(first, end)))
            first, end, starts = 0, end - first, rows.starts
        start, stop = starts[first], starts[end]
        old_rows, old_entries = self._num_rows, self._num_entries
        new_rows, new_entries = old_rows + end - first, old_entries + stop - start
        if new_rows >= len(self._row_starts) or new_entries > len(self._values):
            self._grow(new_rows, new_entries)
        for target, source in zip(self._views, rows.views, strict=True):
            if target is not None and source is not None:
                target[old_entries:new_entries] = source[start:stop]
        if new_rows == old_rows + 1:
            self._row_starts[new_rows] = new_entries
        else:
            self._row_starts[old_rows + 1 : new_rows + 1] = rows.row_starts[first + 1 : end + 1] + (old_entries - start)
        if self._chosen_at is not None and rows.chosen_at is not None:
            self._chosen_at[old_rows:new_rows] = rows.chosen_at[first:end] + (old_entries - start)
        self._num_rows, self._num_entries = new_rows, new_entries

    def snapshot(self, first: int = 0) -> FlatLogprobs:
        """Return the positions from `first` on, frozen: it shares the arrays and is never seen to grow."""
        return FlatLogprobs._of(self._get_rows(first))

    def take(self) -> FlatLogprobs:
        """Return the positions it holds and forget them; the next ones keep their row numbers for the texts."""
        taken = FlatLogprobs._of(self._get_rows(0))
        self._first_row += self._num_rows
        self._restart()
        return taken

    def _get_rows(self, first: int) -> ArrayRows:
        end = self._num_rows
        return ArrayRows(
            self._row_starts[first : end + 1],
            self._token_ids,
            self._values,
            self._ranks,
            None if self._chosen_at is None else self._chosen_at[first:end],
            self.texts,
            range(self._first_row + first, self._first_row + end),
        )

    def _settle_order(self, rows: ArrayRows) -> ArrayRows:
        """Agree on one order: an empty buffer takes the rows' own, else both go into reading order."""
        if self._num_entries == 0:
            num_none = self._num_rows
            self._restart(num_none)
            self._token_ids = None if rows.token_ids is None else self._token_ids
            self._views = make_views(self._token_ids, self._values, self._ranks)
            self._chosen_at = None if rows.chosen_at is None else np.zeros(len(self._row_starts) - 1, np.int64)
            return rows
        mine = self._get_rows(0).in_reading_order()
        self._row_starts, self._token_ids, self._values, self._ranks = (
            mine.row_starts,
            mine.token_ids,
            mine.values,
            mine.ranks,
        )
        self._chosen_at = None
        self._views = make_views(mine.token_ids, mine.values, mine.ranks)
        return rows.in_reading_order()

    def _grow(self, num_rows: int, num_entries: int) -> None:
        """Move to larger arrays, half as large again; untouched pages of them cost nothing."""
        row_capacity = max(num_rows, self._num_rows * 3 // 2) + 1
        entry_capacity = max(num_entries, self._num_entries * 3 // 2)
        self._row_starts = _move(self._row_starts, self._num_rows + 1, row_capacity)
        self._values = _move(self._values, self._num_entries, entry_capacity)
        self._ranks = _move(self._ranks, self._num_entries, entry_capacity)
        if self._token_ids is not None:
            self._token_ids = _move(self._token_ids, self._num_entries, entry_capacity)
        if self._chosen_at is not None:
            self._chosen_at = _move(self._chosen_at, self._num_rows, row_capacity - 1)
        self._views = make_views(self._token_ids, self._values, self._ranks)


def _move(old: np.ndarray, used: int, capacity: int) -> np.ndarray:
    if capacity <= len(old):
        return old
    new = np.empty(capacity, old.dtype)
    new[:used] = old[:used]
    return new
