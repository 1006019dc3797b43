"""Scored rows on the host as they travel: from the runner through the core to the front end, one block a step."""

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm.logprobs.rows import EMPTY_SLOT, ENTRY_BYTES, WholeRow


class WholeRows(NamedTuple):
    """Rows of one request over the whole vocabulary, in the order of ids: they leave beside the step's block."""

    chosen_token_ids: np.ndarray  # [num_rows] int32
    values: np.ndarray  # [num_rows, vocab_size] float32
    ranks: np.ndarray  # [num_rows, vocab_size] int32

    def copy(self, rows: slice = slice(None)) -> "WholeRows":
        """Return some of the rows in arrays of their own."""
        return WholeRows(*(column[rows].copy() for column in self))

    def split(self) -> list[WholeRow]:
        """Return the rows, over the same arrays."""
        return list(map(WholeRow, self.chosen_token_ids.tolist(), self.values, self.ranks))


def count_rows(pieces: Sequence[WholeRows]) -> int:
    return sum(len(piece.values) for piece in pieces)


def take_rows(pieces: list[WholeRows], first: int, end: int) -> list[WholeRows]:
    """Return rows first … end − 1 of all pieces; they keep none of the others alive."""
    if (first, end) == (0, count_rows(pieces)):
        return pieces
    taken = []
    for piece in pieces:
        num_rows = len(piece.values)
        if first < num_rows and end > 0:
            taken.append(piece.copy(slice(max(first, 0), end)))
        first, end = first - num_rows, end - num_rows
    return taken


class LogprobsBlock(NamedTuple):
    """A step's rows: interleaved entries (token id, value, rank) in reading order.

    Rows have the same number of slots, empty ones at the end; with `sizes` they have no empty slots and stand back to
    back.
    """

    entries: np.ndarray  # [num_rows, width, 3] int32, or [num_slots, 3]; values are the bits of a float32
    sizes: np.ndarray | None = None  # [num_rows] int64, at least 1

    @classmethod
    def of_rectangle(
        cls,
        token_ids: np.ndarray,  # [num_rows, width] int32, EMPTY_SLOT behind a row's entries
        values: np.ndarray,  # [num_rows, width] float32
        ranks: np.ndarray,  # [num_rows, width] int32
    ) -> "LogprobsBlock":
        """Return the rows of a rectangle, copied; empty slots stay where they are few."""
        entries = np.empty((*token_ids.shape, 3), np.int32)
        entries[..., 0] = token_ids
        entries[..., 1] = values.view(np.int32)
        entries[..., 2] = ranks
        is_entry = token_ids != EMPTY_SLOT
        block = cls(entries)
        return block if 2 * np.count_nonzero(is_entry) >= is_entry.size else block._close_gaps()

    @classmethod
    def concatenate(cls, blocks: Sequence["LogprobsBlock"]) -> "LogprobsBlock":
        """Return the rows of all blocks in one."""
        if len(blocks) == 1:
            return blocks[0]
        entries, sizes = zip(*(block._close_gaps() for block in blocks), strict=True)
        return cls(np.concatenate(entries), np.concatenate(sizes))

    def _close_gaps(self) -> "LogprobsBlock":
        if self.sizes is not None:
            return self
        is_entry = self.entries[..., 0] != EMPTY_SLOT
        return LogprobsBlock(self.entries[is_entry], np.count_nonzero(is_entry, axis=1))

    def split(self) -> Sequence[bytes]:
        """Return the rows; they hold nothing of the block."""
        data = self.entries.tobytes()
        if self.sizes is None:
            num_rows, width, _ = self.entries.shape
            rows: tuple[bytes, ...] = _make_struct(num_rows, width * ENTRY_BYTES).unpack(data)
            return rows
        ends = (np.cumsum(self.sizes) * ENTRY_BYTES).tolist()
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def get_chosen_values(self) -> np.ndarray:  # [num_rows] float64
        """Return the values of the rows' chosen tokens."""
        first = self.entries[:, 0] if self.sizes is None else self.entries[np.cumsum(self.sizes) - self.sizes]
        return first[:, 1].view(np.float32).astype(np.float64)


@functools.lru_cache(maxsize=16)
def _make_struct(num_rows: int, num_bytes: int) -> struct.Struct:
    return struct.Struct(f"{num_bytes}s" * num_rows)  # cuts a step's rows in a fifth of the time that slices take


class BlockReader:
    """A block made ready for all sequences that take a row of it."""

    __slots__ = ("_rows", "_values")

    def __init__(self, block: LogprobsBlock) -> None:
        self._rows = block.split()
        self._values = block.get_chosen_values()

    def read(self, rows: range | list[int]) -> Sequence[bytes]:
        """Return these rows."""
        if isinstance(rows, range):
            return self._rows[rows.start : rows.stop]
        return [self._rows[row] for row in rows]

    def get_chosen_values(self, rows: range | list[int]) -> np.ndarray:  # [num_rows] float64
        """Return the values of these rows' chosen tokens."""
        return self._values[rows.start : rows.stop] if isinstance(rows, range) else self._values[rows]
