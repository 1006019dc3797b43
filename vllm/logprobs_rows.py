"""What lies under a `FlatLogprobs`: scored rows as flat arrays (frozen) or as flat lists (they grow)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np


class TokenTexts(Protocol):
    """Gives text to the tokens of one sequence's scored rows.

    Row numbers count from the sequence's first row (of a prompt: positions; of what was generated: tokens), so a slice
    still knows the bytes of a character that began before it.
    """

    def decode_row(self, row_index: int, token_ids: Sequence[int]) -> Sequence[str | None]:
        """Return the text that each of `token_ids` has when it stands in row `row_index`."""
        ...


class StoredTexts:
    """Texts that were worked out before: what is left of another `TokenTexts` after a pickle."""

    __slots__ = ("rows",)

    def __init__(self, rows: list[dict[int, str | None]]) -> None:
        self.rows = rows  # token id → text, a dict a row

    def decode_row(self, row_index: int, token_ids: Sequence[int]) -> Sequence[str | None]:
        row = self.rows[row_index]
        return [row[token_id] for token_id in token_ids]


class Row(NamedTuple):
    """One scored row in reading order: the chosen token, then its alternatives."""

    token_ids: np.ndarray  # [num_entries] int32
    values: np.ndarray  # [num_entries] float32
    ranks: np.ndarray  # [num_entries] int32


Views = tuple[memoryview | None, memoryview, memoryview]  # of token ids, values, ranks


def make_views(token_ids: np.ndarray | None, values: np.ndarray, ranks: np.ndarray) -> Views:
    return None if token_ids is None else token_ids.data, values.data, ranks.data


class ListRows(NamedTuple):
    """Six parallel lists, as vLLM's constructor takes them; an empty range is a position without scores."""

    start_indices: list[int]  # [num_rows]
    end_indices: list[int]  # [num_rows]
    token_ids: list[int]  # [num_entries], like all that follow
    logprobs: list[float]
    ranks: list[int | None]
    decoded_tokens: list[str | None]

    def append(
        self, token_ids: list[int], logprobs: list[float], ranks: Sequence[int | None], texts: Sequence[str | None]
    ) -> None:
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(texts)
        self.end_indices.append(len(self.token_ids))

    def get(self, i: int) -> tuple[list[int], list[float], list[int | None], list[str | None]]:
        span = slice(self.start_indices[i], self.end_indices[i])
        return self.token_ids[span], self.logprobs[span], self.ranks[span], self.decoded_tokens[span]

    def select(self, rows: slice) -> "ListRows":
        selected = ListRows([], [], [], [], [], [])
        for i in range(len(self.start_indices))[rows]:
            selected.append(*self.get(i))
        return selected

    def to_arrays(self) -> "ArrayRows":
        """Return the same rows as arrays: values rounded to float32, a missing rank as 0."""
        entries = [self.get(i) for i in range(len(self.start_indices))]
        counts = [len(token_ids) for token_ids, _, _, _ in entries]
        flat = [[item for entry in entries for item in entry[column]] for column in range(4)]
        has_texts = any(text is not None for text in flat[3])
        texts = StoredTexts([dict(zip(entry[0], entry[3], strict=True)) for entry in entries]) if has_texts else None
        return ArrayRows(
            np.cumsum([0, *counts], dtype=np.int64),
            np.array(flat[0], np.int32),
            np.array(flat[1], np.float32),
            np.array([rank or 0 for rank in flat[2]], np.int32),
            texts=texts,
        )


class ArrayRows:
    """Scored rows over flat arrays, ragged; an empty row is a position without scores.

    Rows come in one of two orders. In reading order the chosen token stands first, and `chosen_at` is None. In id order
    `chosen_at` says where the chosen one stands, and the reader sorts by rank; there `token_ids` may be None: then each
    row holds the whole vocabulary. The arrays may hold entries outside of `row_starts[0]` … `row_starts[-1]`.
    """

    __slots__ = ("_starts", "_views", "chosen_at", "places", "ranks", "row_starts", "texts", "token_ids", "values")

    def __init__(
        self,
        row_starts: np.ndarray,  # [num_rows + 1] int64
        token_ids: np.ndarray | None,  # [num_entries] int32
        values: np.ndarray,  # [num_entries] float32
        ranks: np.ndarray,  # [num_entries] int32
        chosen_at: np.ndarray | None = None,  # [num_rows] int64, index into the entries
        texts: TokenTexts | None = None,
        places: range | None = None,  # the row numbers that `texts` knows
    ) -> None:
        self.row_starts = row_starts
        self.token_ids = token_ids
        self.values = values
        self.ranks = ranks
        self.chosen_at = chosen_at
        self.texts = texts
        self.places = range(len(row_starts) - 1) if places is None else places
        self._starts: list[int] | None = None
        self._views: Views | None = None

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    @property
    def starts(self) -> list[int]:
        """`row_starts` as a list, made once: a step's block is asked for every request's rows."""
        if self._starts is None:
            self._starts = self.row_starts.tolist()
        return self._starts

    @property
    def views(self) -> "Views":
        """The entries as memory views, made once: copying a few of them is four times as fast as by numpy."""
        if self._views is None:
            self._views = make_views(self.token_ids, self.values, self.ranks)
        return self._views

    @property
    def num_entries(self) -> int:
        return int(self.row_starts[-1] - self.row_starts[0])

    def get(self, i: int) -> Row:
        start, end = int(self.row_starts[i]), int(self.row_starts[i + 1])
        ids = np.arange(end - start, dtype=np.int32) if self.token_ids is None else self.token_ids[start:end]
        row = Row(ids, self.values[start:end], self.ranks[start:end])
        if self.chosen_at is None or start == end:
            return row
        if self.token_ids is None:  # of the whole vocabulary each rank is there once: its place in the falling order
            falling = np.empty(end - start, np.int64)
            falling[row.ranks - 1] = ids
        else:
            falling = np.argsort(row.ranks, kind="stable")
        chosen = int(self.chosen_at[i]) - start
        order = np.concatenate(([chosen], falling[falling != chosen]))
        return Row(*(column[order] for column in row))

    def iterate(self, chunk_size: int = 64) -> Iterator[tuple[list[int], list[float], list[int]]]:
        """Yield the rows in reading order as lists, converted many at a time."""
        if self.chosen_at is not None or self.token_ids is None:
            for i in range(len(self)):
                row = self.get(i)
                yield row.token_ids.tolist(), row.values.tolist(), row.ranks.tolist()
            return
        for first in range(0, len(self), chunk_size):
            starts = self.row_starts[first : first + chunk_size + 1].tolist()
            base, stop = starts[0], starts[-1]
            token_ids, values = self.token_ids[base:stop].tolist(), self.values[base:stop].tolist()
            ranks = self.ranks[base:stop].tolist()
            for start, end in pairwise(starts):
                span = slice(start - base, end - base)
                yield token_ids[span], values[span], ranks[span]

    def get_texts(self, i: int, token_ids: list[int]) -> Sequence[str | None]:
        if self.texts is None or not token_ids:
            return [None] * len(token_ids)
        return self.texts.decode_row(self.places[i], token_ids)

    def select(self, rows: slice) -> "ArrayRows":
        """Return the rows of a slice; a contiguous one shares the arrays."""
        numbers = range(len(self))[rows]
        if numbers.step == 1:
            first, end = numbers.start, max(numbers.start, numbers.stop)
            return ArrayRows(
                self.row_starts[first : end + 1],
                self.token_ids,
                self.values,
                self.ranks,
                None if self.chosen_at is None else self.chosen_at[first:end],
                self.texts,
                self.places[rows],
            )
        old = self.row_starts[:-1][rows]
        counts = self.row_starts[1:][rows] - old
        row_starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        moved = row_starts[:-1] - old
        entries = np.arange(row_starts[-1]) - np.repeat(moved, counts)
        return ArrayRows(
            row_starts,
            None if self.token_ids is None else self.token_ids[entries],
            self.values[entries],
            self.ranks[entries],
            None if self.chosen_at is None else self.chosen_at[rows] + moved,
            self.texts,
            self.places[rows],
        )

    def copy_rows(self, first: int, end: int) -> "ArrayRows":
        """Return rows first … end − 1 in arrays of their own."""
        start, stop = self.starts[first], self.starts[end]
        return ArrayRows(
            self.row_starts[first : end + 1] - start,
            None if self.token_ids is None else self.token_ids[start:stop].copy(),
            self.values[start:stop].copy(),
            self.ranks[start:stop].copy(),
            None if self.chosen_at is None else self.chosen_at[first:end] - start,
            self.texts,
            self.places[first:end],
        )

    def with_none_positions(self, count: int) -> "ArrayRows":
        """Return the rows after `count` positions without scores."""
        start = np.full(count, self.row_starts[0], np.int64)
        step = self.places.step
        return ArrayRows(
            np.concatenate((start, self.row_starts)),
            self.token_ids,
            self.values,
            self.ranks,
            None if self.chosen_at is None else np.concatenate((start, self.chosen_at)),
            self.texts,
            range(self.places.start - count * step, self.places.stop, step),
        )

    def with_texts(self, texts: TokenTexts | None, places: range) -> "ArrayRows":
        return ArrayRows(self.row_starts, self.token_ids, self.values, self.ranks, self.chosen_at, texts, places)

    def with_stored_texts(self) -> "ArrayRows":
        """Return the rows with their texts worked out, so that they can travel without the tokenizer."""
        if self.texts is None:
            return self
        rows = [
            dict(zip(token_ids, self.get_texts(i, token_ids), strict=True))
            for i, (token_ids, _, _) in enumerate(self.iterate())
        ]
        return self.with_texts(StoredTexts(rows), range(len(rows)))

    def in_reading_order(self) -> "ArrayRows":
        """Return the rows with the chosen token first and the others falling, in compact arrays."""
        start, stop = int(self.row_starts[0]), int(self.row_starts[-1])
        row_starts = self.row_starts - start
        if self.chosen_at is None:
            assert self.token_ids is not None, "rows without ids are in id order"
            columns: Any = (self.token_ids[start:stop], self.values[start:stop], self.ranks[start:stop])
        elif len(self):
            columns = map(np.concatenate, zip(*map(self.get, range(len(self))), strict=True))
        else:
            columns = (np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
        token_ids, values, ranks = columns
        return ArrayRows(row_starts, token_ids, values, ranks, None, self.texts, self.places)

    def get_chosen_values(self) -> np.ndarray:
        """Return the chosen tokens' values; NaN where a position has no scores."""  # [num_rows] float32
        at = self.row_starts[:-1] if self.chosen_at is None else self.chosen_at
        is_scored = self.row_starts[1:] > self.row_starts[:-1]
        chosen = np.full(len(self), np.nan, np.float32)
        chosen[is_scored] = self.values[at[is_scored]]
        return chosen


def concatenate_rows(parts: Sequence[ArrayRows]) -> ArrayRows:
    """Return the rows of all parts, one part after the other."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    if len({(part.token_ids is None, part.chosen_at is None) for part in parts if part.num_entries}) > 1:
        parts = [part.in_reading_order() for part in parts]
    filled = [part for part in parts if part.num_entries]
    if not filled:
        empty = ArrayRows(np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
        return empty.with_none_positions(sum(map(len, parts)))
    ends = np.cumsum([0, *(part.num_entries for part in parts)])
    moves = [int(end - part.row_starts[0]) for part, end in zip(parts, ends, strict=False)]
    spans = [slice(int(part.row_starts[0]), int(part.row_starts[-1])) for part in filled]
    token_ids = [part.token_ids[span] for part, span in zip(filled, spans, strict=True) if part.token_ids is not None]
    chosen_at = [
        (part.row_starts[:-1] if part.chosen_at is None else part.chosen_at) + move
        for part, move in zip(parts, moves, strict=True)
    ]
    texts, places = _join_texts(parts)
    return ArrayRows(
        np.concatenate([[0], *(part.row_starts[1:] + move for part, move in zip(parts, moves, strict=True))]),
        np.concatenate(token_ids) if token_ids else None,
        np.concatenate([part.values[span] for part, span in zip(filled, spans, strict=True)]),
        np.concatenate([part.ranks[span] for part, span in zip(filled, spans, strict=True)]),
        None if filled[0].chosen_at is None else np.concatenate(chosen_at),
        texts,
        places,
    )


def _join_texts(parts: Sequence[ArrayRows]) -> tuple[TokenTexts | None, range]:
    """Keep the one source of texts where the parts follow each other in its rows; else work the texts out."""
    num_rows = sum(map(len, parts))
    texts, places = parts[0].texts, parts[0].places
    joined = range(places.start, places.start + num_rows * places.step, places.step)
    at = 0
    for part in parts:
        if part.texts is not texts or part.places != joined[at : at + len(part)]:
            break
        at += len(part)
    else:
        return texts, joined
    if all(part.texts is None for part in parts):
        return None, range(num_rows)
    rows: list[dict[int, str | None]] = []
    for part in parts:
        stored = part.with_stored_texts().texts
        rows.extend(stored.rows if isinstance(stored, StoredTexts) else _make_textless_rows(part))
    return StoredTexts(rows), range(num_rows)


def _make_textless_rows(part: ArrayRows) -> list[dict[int, str | None]]:
    return [dict.fromkeys(token_ids) for token_ids, _, _ in part.iterate()]
