"""One scored row as it is kept: a piece of bytes, or two arrays over the whole vocabulary.

Handing a step's rows to hundreds of sequences is a loop in Python; a row that is one bytes object costs one copy, and
the garbage collector never visits it. Numbers are read from it when somebody looks.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm.logprobs.columns import LogprobColumns, RowArrays

ENTRY = np.dtype([("token_id", np.int32), ("value", np.float32), ("rank", np.int32)])
ENTRY_BYTES = ENTRY.itemsize
EMPTY_SLOT = -1  # in place of a token id
# By the length of a row; longer ones are read by numpy.
_UNPACK = {num * ENTRY_BYTES: struct.Struct("=" + "ifi" * num).unpack for num in range(65)}
_FIRST_VALUE = struct.Struct("=4xf")


class WholeRow(NamedTuple):
    """A row that holds the whole vocabulary in the order of ids; the reader makes the falling order, by rank."""

    chosen_token_id: int
    values: np.ndarray  # [vocab_size] float32
    ranks: np.ndarray  # [vocab_size] int32, each from 1 to vocab_size once

    def copy(self) -> "WholeRow":
        """Return a row that keeps no larger array alive."""
        return WholeRow(self.chosen_token_id, self.values.copy(), self.ranks.copy())


# Bytes are entries in reading order (the chosen token first), perhaps with empty slots behind them: the rows of a step
# are cut out alike. Without any bytes the position has no scores.
Row = bytes | WholeRow
NO_SCORES = b""


def pack_row(token_ids: Sequence[int], values: Sequence[float], ranks: Sequence[int | None]) -> bytes:
    """Return a row of these entries: values rounded to float32, a missing rank as 0."""
    entries = np.empty(len(token_ids), ENTRY)
    entries["token_id"], entries["value"], entries["rank"] = token_ids, values, [rank or 0 for rank in ranks]
    return entries.tobytes()


def read_arrays(row: Row) -> RowArrays:
    """Return a row's entries as arrays, the chosen token first."""
    if isinstance(row, bytes):
        entries = np.frombuffer(row, ENTRY)
        entries = entries[: np.count_nonzero(entries["token_id"] != EMPTY_SLOT)]
        return RowArrays(entries["token_id"], entries["value"], entries["rank"])
    # Each rank is there once: it is the place in the falling order.
    falling = np.empty(len(row.ranks), np.int32)
    falling[row.ranks - 1] = np.arange(len(row.ranks), dtype=np.int32)
    chosen = np.array([row.chosen_token_id], np.int32)
    order = np.concatenate((chosen, falling[falling != chosen]))
    return RowArrays(order, row.values[order], row.ranks[order])


def read_entries(row: Row) -> tuple[Sequence[int], Sequence[float], Sequence[int]]:
    """Return a row's token ids, values and ranks as Python numbers, the chosen token first."""
    if isinstance(row, bytes) and (unpack := _UNPACK.get(len(row))) is not None:
        entries = unpack(row)
        token_ids = entries[0::3]
        if token_ids and token_ids[-1] == EMPTY_SLOT:
            end = token_ids.index(EMPTY_SLOT)
            return token_ids[:end], entries[1 : 3 * end : 3], entries[2 : 3 * end : 3]
        return token_ids, entries[1::3], entries[2::3]
    columns = read_arrays(row)
    return columns.token_ids.tolist(), columns.values.tolist(), columns.ranks.tolist()


def read_chosen_value(row: Row) -> float:
    """Return the chosen token's value; NaN where there are no scores."""
    if isinstance(row, bytes):
        value: float = _FIRST_VALUE.unpack_from(row)[0] if row else np.nan
        return value
    return float(row.values[row.chosen_token_id])


def join_columns(rows: Sequence[Row]) -> LogprobColumns:
    """Return all rows as arrays of their own, the chosen token of each first."""
    row_starts = np.zeros(len(rows) + 1, np.int64)
    if WholeRow not in set(map(type, rows)):
        entries = np.frombuffer(b"".join(rows), np.int32).reshape(-1, 3)  # type: ignore[arg-type]  # bytes only
        np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)) // ENTRY_BYTES, out=row_starts[1:])
        is_entry = entries[:, 0] != EMPTY_SLOT
        if not is_entry.all():
            row_starts = np.concatenate(([0], np.cumsum(is_entry)))[row_starts]
            entries = entries[is_entry]
        token_ids, values, ranks = np.ascontiguousarray(entries.T)
        return LogprobColumns(row_starts, token_ids, values.view(np.float32), ranks)
    arrays = list(map(read_arrays, rows))
    np.cumsum([len(row.token_ids) for row in arrays], out=row_starts[1:])
    return LogprobColumns(row_starts, *map(np.concatenate, zip(*arrays, strict=True)))
