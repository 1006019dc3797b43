"""Scored rows packed densely: an entry's id, value and rank side by side, so that a row is one piece of memory.

Handing a step's rows to hundreds of sequences is a loop in Python; with one piece a row, each costs one copy of bytes.
What a caller reads is made of them when he first looks.
"""

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm.logprobs_rows import ArrayRows, TokenTexts

ENTRY_BYTES = 12  # token id int32, value float32, rank int32


class PackedBlock(NamedTuple):
    """A step's rows: a row's entries follow each other in reading order, and between two rows there may be a gap."""

    entries: np.ndarray  # [num_slots, 3] int32; column 1 holds the bits of a float32
    first_entries: np.ndarray  # [num_rows] int64: where each row begins
    num_entries: np.ndarray  # [num_rows] int32, at least 1
    width: int = 0  # slots from each row's beginning to the next one's; 0: it differs

    @classmethod
    def of(cls, rows: ArrayRows) -> "PackedBlock":
        """Return these rows packed."""
        if rows.chosen_at is not None:
            rows = rows.in_reading_order()
        assert rows.token_ids is not None, "rows in reading order name their tokens"
        starts = rows.row_starts
        first, end = int(starts[0]), int(starts[-1])
        columns = (rows.token_ids[first:end], rows.values[first:end], rows.ranks[first:end])
        return cls(_interleave(*columns), starts[:-1] - first, np.diff(starts))

    @classmethod
    def of_rectangle(
        cls,
        token_ids: np.ndarray,  # [num_rows, width] int32
        values: np.ndarray,  # [num_rows, width] float32
        ranks: np.ndarray,  # [num_rows, width] int32
        num_entries: np.ndarray,  # [num_rows] int32: what lies beyond is a gap
    ) -> "PackedBlock":
        """Return the rows of a rectangle packed, gaps and all."""
        return cls.of_even_rows(_interleave(token_ids, values, ranks).reshape(-1, 3), num_entries)

    @classmethod
    def of_even_rows(
        cls,
        entries: np.ndarray,  # [num_rows * width, 3] int32
        num_entries: np.ndarray,  # [num_rows] int32
    ) -> "PackedBlock":
        """Return rows that begin at even distances."""
        num_rows = len(num_entries)
        width = len(entries) // max(num_rows, 1)
        return cls(entries, _space_evenly(num_rows, width), num_entries, width)

    @property
    def is_mostly_gaps(self) -> bool:
        return len(self.entries) > 2 * int(self.num_entries.sum())

    def unpack(self) -> ArrayRows:
        """Return the rows as arrays without gaps, a column each."""
        row_starts = np.zeros(len(self.num_entries) + 1, np.int64)
        np.cumsum(self.num_entries, out=row_starts[1:])
        places = np.arange(row_starts[-1]) + np.repeat(self.first_entries - row_starts[:-1], self.num_entries)
        columns = np.ascontiguousarray(self.entries[places].T)
        return ArrayRows(row_starts, columns[0], columns[1].view(np.float32), columns[2])


@functools.lru_cache(maxsize=64)
def _space_evenly(num_rows: int, width: int) -> np.ndarray:
    first_entries = np.arange(num_rows) * width
    first_entries.flags.writeable = False
    return first_entries


class PackedStep:
    """A packed block made ready for all sequences that take a row of it."""

    __slots__ = ("chosen_values", "data", "ends", "starts")

    def __init__(self, block: PackedBlock) -> None:
        entries, first_entries, num_entries, width = block
        self.data = entries.tobytes()  # a piece of a bytes object is cut faster than one of an array
        self.starts: Sequence[int] = (  # [num_rows] bytes
            range(0, len(num_entries) * width * ENTRY_BYTES, width * ENTRY_BYTES)
            if width
            else (first_entries * ENTRY_BYTES).tolist()
        )
        self.ends: list[int] = ((first_entries + num_entries) * ENTRY_BYTES).tolist()
        chosen = entries.view(np.float32)[slice(None, None, width) if width else first_entries, 1]
        self.chosen_values: list[float] = chosen.tolist()  # [num_rows]

    def cut(self, rows: list[int]) -> tuple[list[bytes], list[float]]:
        """Return the pieces of these rows and their chosen values."""
        data, starts, ends, values = self.data, self.starts, self.ends, self.chosen_values
        if rows == list(range(len(ends))):  # as mostly
            return [data[start:end] for start, end in zip(starts, ends, strict=True)], values
        return [data[starts[row] : ends[row]] for row in rows], [values[row] for row in rows]


class PackedRun(NamedTuple):
    """Rows of one sequence at even distances, with a gap behind each that is shorter."""

    entries: bytes
    num_entries: np.ndarray  # [num_rows] int32

    def close_gaps(self) -> bytes:
        """Return the rows back to back."""
        entries = np.frombuffer(self.entries, np.int32).reshape(len(self.num_entries), -1, 3)
        return entries[np.arange(entries.shape[1]) < self.num_entries[:, None]].tobytes()


def regroup(
    blocks: Sequence[PackedBlock], rows: Sequence[int], sums: Sequence[float]
) -> tuple[list[PackedRun], list[float]]:
    """Return what sequences got in steps in which each had the same row, and `sums` with their chosen values added.

    All blocks are even, of one width and of as many rows. Values are added one after the other.
    """
    width, places = blocks[0].width, np.array(rows)
    by_step = [block.entries.reshape(-1, 3 * width) for block in blocks]
    entries = np.stack(by_step, 1)[places]  # [num_sequences, num_steps, 3 * width]
    num_entries = np.stack([block.num_entries for block in blocks], 1)[places]
    chosen = np.concatenate([np.array(sums)[:, None], entries.view(np.float32)[:, :, 1]], 1)
    widest = (3 * num_entries.max(1)).tolist()  # a sequence's own: another's may be wider by far
    runs = [
        PackedRun(own[:, :end].tobytes(), counts.copy())
        for own, counts, end in zip(entries, num_entries, widest, strict=True)
    ]
    return runs, np.add.accumulate(chosen, 1)[:, -1].tolist()


class PackedRows:
    """Gathers one sequence's rows as they come, until somebody takes them."""

    __slots__ = ("num_taken", "pieces", "texts")

    def __init__(self, texts: TokenTexts | None = None) -> None:
        self.texts = texts
        self.pieces: list[bytes | PackedRun] = []  # bytes are one row
        self.num_taken = 0

    def append(self, step: PackedStep, row: int) -> None:
        """Copy a row of a step to the end."""
        self.pieces.append(step.data[step.starts[row] : step.ends[row]])

    def take(self) -> tuple["Packed", int]:
        """Return the rows and the number of the first, and forget them.

        The next ones keep their row numbers for the texts.
        """
        pieces, first_row = self.pieces, self.num_taken
        self.num_taken = first_row + sum(map(_count_rows, pieces))
        if len(pieces) == 1 and isinstance(pieces[0], bytes):
            return pieces.pop(), first_row  # type: ignore[return-value]  # the bytes
        self.pieces = []
        return pieces, first_row


class EntryColumns(NamedTuple):
    """One row's entries, the chosen token first."""

    token_ids: tuple[int, ...]
    values: tuple[float, ...]
    ranks: tuple[int, ...]


def read_packed_row(row: bytes) -> EntryColumns:
    """Return the entries of one row without making arrays: for rows that are read one by one, as a stream's are."""
    entries = _make_struct(len(row) // ENTRY_BYTES).unpack(row)
    return EntryColumns(entries[0::3], entries[1::3], entries[2::3])


@functools.lru_cache(maxsize=256)
def _make_struct(num_entries: int) -> struct.Struct:
    return struct.Struct("=" + "ifi" * num_entries)


# What `PackedRows.take` gives: of one row its bytes alone.
Packed = bytes | list[bytes | PackedRun]


def unpack(packed: Packed, texts: TokenTexts | None, first_row: int) -> ArrayRows:
    """Return what `PackedRows.take` gave as arrays, a column each."""
    data: list[bytes] = []
    num_entries: list[int] = []
    for piece in [packed] if isinstance(packed, bytes) else packed:
        if isinstance(piece, bytes):
            data.append(piece)
            num_entries.append(len(piece) // ENTRY_BYTES)
        else:
            data.append(piece.close_gaps())
            num_entries += piece.num_entries.tolist()
    columns = np.ascontiguousarray(np.frombuffer(b"".join(data), np.int32).reshape(-1, 3).T)
    row_starts = np.zeros(len(num_entries) + 1, np.int64)
    np.cumsum(num_entries, out=row_starts[1:])
    places = range(first_row, first_row + len(num_entries))
    return ArrayRows(row_starts, columns[0], columns[1].view(np.float32), columns[2], None, texts, places)


def _count_rows(piece: bytes | PackedRun) -> int:
    return 1 if isinstance(piece, bytes) else len(piece.num_entries)


def _interleave(token_ids: np.ndarray, values: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    entries = np.empty((*token_ids.shape, 3), np.int32)
    entries[..., 0] = token_ids
    entries[..., 1] = values.view(np.int32)
    entries[..., 2] = ranks
    return entries
