"""The containers of logprobs: one entry, and a sequence of scored positions.

A scored position reads as a dictionary from token id to `Logprob`: the chosen token (sampled, or the actual next prompt
token) first, then its alternatives. The dictionaries are made when somebody looks; the engine keeps flat arrays.
"""

import importlib
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np

from vllm.logprobs_packed import Packed, PackedBlock, unpack
from vllm.logprobs_rows import ArrayRows, ListRows, Row, TokenTexts, concatenate_rows

__all__ = [
    "FlatLogprobs",
    "Logprob",
    "LogprobArrays",
    "LogprobColumns",
    "LogprobsOnePosition",
    "PromptLogprobs",
    "SampleLogprobs",
    "TokenTexts",
]


@dataclass(slots=True)
class Logprob:
    """One token at one scored position."""

    logprob: float
    rank: int | None = None  # over the whole vocabulary, 1 is the most likely
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


class LogprobArrays(NamedTuple):
    """Scored positions for numeric work: row i is entries row_starts[i] … row_starts[i + 1] − 1, chosen first."""

    row_starts: np.ndarray  # [num_rows + 1] int64
    token_ids: np.ndarray  # [num_entries] int32
    values: np.ndarray  # [num_entries] float32
    ranks: np.ndarray  # [num_entries] int32


class LogprobColumns(NamedTuple):
    """What `to_numpy` gives: row i is entries row_starts[i] … row_starts[i + 1] − 1, the chosen token first."""

    row_starts: np.ndarray  # [num_rows + 1] int64, from 0
    token_ids: np.ndarray  # [num_entries] int32
    logprobs: np.ndarray  # [num_entries] float32
    ranks: np.ndarray  # [num_entries] int32, 1 is the most likely


class FlatLogprobs(MutableSequence["LogprobsOnePosition | None"]):
    """Scored positions that read like a list of dictionaries; a position without scores reads as None.

    What the engine hands out is frozen: mutation is a TypeError, `+=` makes a new object. One that is made by this
    constructor grows by `append`, `append_fast` and `extend`. Text of tokens is worked out when it is read; pickle and
    deepcopy store it. `to_arrays()` and `row_values()` give the numbers without a dictionary.
    """

    __slots__ = ("_first_row", "_made_rows", "_packed", "_texts")
    _made_rows: ArrayRows | ListRows | None
    _packed: Packed | PackedBlock  # set where the rows came packed, like the next two
    _texts: TokenTexts | None
    _first_row: int
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        start_indices: list[int] | None = None,  # one a position, like end_indices
        end_indices: list[int] | None = None,
        token_ids: list[int] | None = None,  # one an entry, like all that follow
        logprobs: list[float] | None = None,
        ranks: list[int | None] | None = None,
        decoded_tokens: list[str | None] | None = None,
    ) -> None:
        given: Any = (start_indices, end_indices, token_ids, logprobs, ranks, decoded_tokens)
        self._made_rows = ListRows(*([] if column is None else column for column in given))

    # ------------------------------------------------------------ what the engine makes

    @classmethod
    def _of(cls, rows: ArrayRows | ListRows) -> "FlatLogprobs":
        made = cls.__new__(cls)
        made._made_rows = rows
        return made

    @classmethod
    def _of_packed(
        cls, packed: Packed | PackedBlock, texts: TokenTexts | None = None, first_row: int = 0
    ) -> "FlatLogprobs":
        """Return rows whose arrays are made when somebody looks: of what is streamed, each row is read once at most."""
        made = cls.__new__(cls)
        made._made_rows = None
        made._packed, made._texts, made._first_row = packed, texts, first_row
        return made

    @property
    def _rows(self) -> ArrayRows | ListRows:
        rows = self._made_rows
        if rows is None:
            packed = self._packed
            rows = self._made_rows  # again: of two threads that read, one may have been here and let go of the bytes
            if rows is None:
                if isinstance(packed, PackedBlock):
                    rows = self._made_rows = packed.unpack()
                else:
                    rows = self._made_rows = unpack(packed, self._texts, self._first_row)
                    self._packed = b""
        return rows

    def _pack(self) -> PackedBlock:
        """Return the rows of a step in the form that many sequences take theirs from."""
        return self._get_packed_block() or PackedBlock.of(self._get_arrays())

    def _get_packed_block(self) -> PackedBlock | None:
        """Return the rows as they came, if that was packed."""
        packed = getattr(self, "_packed", None)
        return packed if isinstance(packed, PackedBlock) else None

    def _get_packed_row(self) -> bytes | None:
        """Return the one row there is as it came, if that was packed and nobody has looked at it."""
        packed = getattr(self, "_packed", None)  # first: another thread that reads lets go of it after it made the rows
        return packed if isinstance(packed, bytes) and self._made_rows is None else None

    @classmethod
    def from_arrays(
        cls,
        row_starts: np.ndarray,  # [num_rows + 1] int64
        token_ids: np.ndarray,  # [num_entries] int32
        values: np.ndarray,  # [num_entries] float32
        ranks: np.ndarray,  # [num_entries] int32
        *,
        num_none: int = 0,
        chosen_token_ids: np.ndarray | None = None,  # [num_rows], with in_id_order
        in_id_order: bool = False,
    ) -> "FlatLogprobs":
        """Return frozen rows over these arrays, which nobody may write to afterwards.

        Rows are in reading order (chosen token first), or with `in_id_order` in rising order of ids, chosen token
        included: then the reader makes the falling order, by rank.
        """
        row_starts = np.asarray(row_starts, np.int64)
        token_ids = np.asarray(token_ids, np.int32)
        assert row_starts[-1] <= len(token_ids) == len(values) == len(ranks), "rows reach beyond their entries"
        chosen_at = None
        if in_id_order:
            assert chosen_token_ids is not None, "rows in id order need their chosen tokens"
            chosen = np.repeat(np.asarray(chosen_token_ids), np.diff(row_starts))
            chosen_at = np.flatnonzero(token_ids[row_starts[0] : row_starts[-1]] == chosen) + row_starts[0]
            assert len(chosen_at) == len(row_starts) - 1, "each row holds its chosen token once"
        rows = ArrayRows(row_starts, token_ids, np.asarray(values, np.float32), np.asarray(ranks, np.int32), chosen_at)
        return cls._of(rows.with_none_positions(num_none) if num_none else rows)

    @classmethod
    def from_full_rows(
        cls,
        chosen_token_ids: np.ndarray,  # [num_rows] int32
        values: np.ndarray,  # [num_rows, vocab_size] float32
        ranks: np.ndarray,  # [num_rows, vocab_size] int32
        num_none: int = 0,
    ) -> "FlatLogprobs":
        """Return frozen rows of the whole vocabulary over these arrays, which nobody may write to afterwards."""
        num_rows, vocab_size = values.shape
        row_starts = np.arange(num_rows + 1, dtype=np.int64) * vocab_size
        chosen_at = row_starts[:-1] + np.asarray(chosen_token_ids, np.int64)
        flat_values = np.asarray(values, np.float32).reshape(-1)
        flat_ranks = np.asarray(ranks, np.int32).reshape(-1)
        rows = ArrayRows(row_starts, None, flat_values, flat_ranks, chosen_at)
        return cls._of(rows.with_none_positions(num_none) if num_none else rows)

    @classmethod
    def from_rectangle(
        cls,
        token_ids: np.ndarray,  # [num_rows, width] int32
        values: np.ndarray,  # [num_rows, width] float32
        ranks: np.ndarray,  # [num_rows, width] int32
        num_entries: np.ndarray,  # [num_rows] int32: what lies beyond is left out
    ) -> "FlatLogprobs":
        """Return frozen ragged rows, copied out of a rectangle in reading order."""
        return cls._of_packed(PackedBlock.of_rectangle(token_ids, values, ranks, num_entries))

    @classmethod
    def concatenate(cls, parts: Iterable["FlatLogprobs"]) -> "FlatLogprobs":
        """Return the positions of all parts in one frozen sequence."""
        return cls._of(concatenate_rows([part._get_arrays() for part in parts]))

    def take_rows(self, first: int, end: int) -> "FlatLogprobs":
        """Return positions first … end − 1, copied: a frozen sequence that keeps nothing of this one alive."""
        return self._of(self._get_arrays().copy_rows(first, end))

    def with_none_positions(self, count: int) -> "FlatLogprobs":
        """Return a frozen sequence that has `count` positions without scores in front."""
        return self._of(self._get_arrays().with_none_positions(count))

    def with_text(self, texts: TokenTexts | None, first_row: int = 0) -> "FlatLogprobs":
        """Return a frozen sequence whose tokens read their text from `texts`, position 0 as its row `first_row`."""
        return self._of(self._get_arrays().with_texts(texts, range(first_row, first_row + len(self))))

    def _get_texts(self) -> tuple[TokenTexts | None, int]:
        """Return what gives text to the tokens of contiguous rows, and the row number that position 0 has there."""
        rows = self._made_rows
        if rows is None:
            return self._texts, self._first_row
        arrays = self._get_arrays()
        assert arrays.places.step == 1, "rows of a slice with a step don't follow each other"
        return arrays.texts, arrays.places.start

    # ------------------------------------------------------------ numbers

    @property
    def is_frozen(self) -> bool:
        return isinstance(self._rows, ArrayRows)

    @property
    def num_none(self) -> int:
        """How many positions without scores stand in front."""
        row_starts = self._get_arrays().row_starts
        return int(np.searchsorted(row_starts, row_starts[0], side="right")) - 1

    def row_values(self, i: int) -> Row:
        """Return position `i` as read-only (token_ids int32, values float32, ranks int32), chosen token first."""
        rows = self._get_arrays()
        return Row(*map(_make_read_only, rows.get(range(len(rows))[i])))

    def chosen_values(self) -> np.ndarray:
        """Return the chosen tokens' values, read-only; NaN for a position without scores."""  # [len(self)] float32
        return _make_read_only(self._get_arrays().get_chosen_values())

    def to_arrays(self) -> LogprobArrays:
        """Return all positions as read-only flat arrays, chosen token first."""
        rows = self._get_arrays().in_reading_order()
        assert rows.token_ids is not None
        return LogprobArrays(*map(_make_read_only, (rows.row_starts, rows.token_ids, rows.values, rows.ranks)))

    def to_numpy(self) -> LogprobColumns:
        """Return all positions as compact arrays of the caller's own, chosen token first."""
        rows = self._get_arrays().in_reading_order()
        assert rows.token_ids is not None
        return LogprobColumns(*map(np.array, (rows.row_starts, rows.token_ids, rows.values, rows.ranks)))

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table` with a row a position: lists `token_ids`, `logprobs` and `ranks`.

        The chosen token stands first; a position without scores is null.

        Raises:
            ImportError: pyarrow is not installed.
        """
        try:
            # Not a dependency, and large: loaded only by who asks for it.
            arrow = importlib.import_module("pyarrow")
        except ModuleNotFoundError as error:
            raise ImportError("to_arrow needs pyarrow: pip install pyarrow; to_numpy does without") from error
        columns = self.to_numpy()
        is_empty = arrow.array(np.diff(columns.row_starts) == 0)
        starts = arrow.array(columns.row_starts)
        lists = {
            name: arrow.LargeListArray.from_arrays(starts, arrow.array(values), mask=is_empty)
            for name, values in zip(columns._fields[1:], columns[1:], strict=True)
        }
        return arrow.table(lists)

    def to_list(self) -> list[LogprobsOnePosition | None]:
        """Return a plain list of dictionaries."""
        return list(self)

    def _get_arrays(self) -> ArrayRows:
        return self._rows if isinstance(self._rows, ArrayRows) else self._rows.to_arrays()

    # ------------------------------------------------------------ vLLM's parallel lists

    @property
    def start_indices(self) -> list[int]:
        return self._get_lists().start_indices

    @property
    def end_indices(self) -> list[int]:
        return self._get_lists().end_indices

    @property
    def token_ids(self) -> list[int]:
        return self._get_lists().token_ids

    @property
    def logprobs(self) -> list[float]:
        return self._get_lists().logprobs

    @property
    def ranks(self) -> list[int | None]:
        return self._get_lists().ranks

    @property
    def decoded_tokens(self) -> list[str | None]:
        rows = self._rows
        if isinstance(rows, ListRows):
            return rows.decoded_tokens
        return [text for i, (token_ids, _, _) in enumerate(rows.iterate()) for text in rows.get_texts(i, token_ids)]

    def _get_lists(self) -> ListRows:
        """Return the lists themselves, or fresh ones of a frozen sequence (without texts)."""
        if isinstance(self._rows, ListRows):
            return self._rows
        rows = self._rows.in_reading_order()
        starts, token_ids, values, ranks = rows.starts, rows.token_ids, rows.values, rows.ranks
        assert token_ids is not None
        return ListRows(starts[:-1], starts[1:], token_ids.tolist(), values.tolist(), ranks.tolist(), [])

    # ------------------------------------------------------------ a sequence of dictionaries

    def __len__(self) -> int:
        rows = self._rows
        return len(rows) if isinstance(rows, ArrayRows) else len(rows.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "LogprobsOnePosition | None | FlatLogprobs":
        if isinstance(index, slice):
            return self._of(self._rows.select(index))
        if not hasattr(index, "__index__"):
            raise TypeError(f"positions are integers or slices; got {type(index).__name__}")
        length = len(self)
        i = index.__index__()
        if not -length <= i < length:
            raise IndexError(f"position {i} of {length}")
        return self._read(i % length)

    def __iter__(self) -> Iterator[LogprobsOnePosition | None]:
        rows = self._rows
        if isinstance(rows, ArrayRows):
            for i, (token_ids, values, ranks) in enumerate(rows.iterate()):
                yield _make_position(token_ids, values, ranks, rows.get_texts(i, token_ids))
            return
        i = 0
        while i < len(rows.start_indices):  # asked again each time, as a list's own iterator does
            yield _make_position(*rows.get(i))
            i += 1

    def _read(self, i: int) -> LogprobsOnePosition | None:
        rows = self._rows
        if not isinstance(rows, ArrayRows):
            return _make_position(*rows.get(i))
        row = rows.get(i)
        token_ids = row.token_ids.tolist()
        return _make_position(token_ids, row.values.tolist(), row.ranks.tolist(), rows.get_texts(i, token_ids))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (FlatLogprobs, list)):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __add__(self, other: Any) -> Any:
        """Return a FlatLogprobs for a FlatLogprobs, a list of dictionaries for a list."""
        if isinstance(other, list):
            return self.to_list() + other
        if not isinstance(other, FlatLogprobs):
            return NotImplemented
        if self.is_frozen or other.is_frozen:
            return self.concatenate([self, other])
        both = self[:]
        both.extend(other)
        return both

    def __radd__(self, other: Any) -> Any:
        return other + self.to_list() if isinstance(other, list) else NotImplemented

    def __iadd__(self, other: Iterable[LogprobsOnePosition | None]) -> Any:  # type: ignore[misc]
        if self.is_frozen:
            return self + (other if isinstance(other, FlatLogprobs) else list(other))
        self.extend(other)
        return self

    def __repr__(self) -> str:
        shown = [_show_position(row) for row in self[:2]]
        if len(self) > 2:
            shown += ["…"] if len(self) > 3 else []
            shown.append(_show_position(self[-1]))
        return f"FlatLogprobs({len(self)} positions: [{', '.join(shown)}])"

    def __copy__(self) -> "FlatLogprobs":
        return self if self.is_frozen else self[:]

    def __reduce__(self) -> Any:
        if isinstance(self._rows, ListRows):
            return FlatLogprobs, tuple(self._rows)
        rows = self._rows.copy_rows(0, len(self)).with_stored_texts()
        return _rebuild, (rows.row_starts, rows.token_ids, rows.values, rows.ranks, rows.chosen_at, rows.texts)

    # ------------------------------------------------------------ growing

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Add one position; None is one without scores."""
        entries = (value or {}).values()
        self.append_fast(
            list(value or ()),
            [entry.logprob for entry in entries],
            [entry.rank for entry in entries],
            [entry.decoded_token for entry in entries],
        )

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: Sequence[int | None],
        decoded_tokens: Sequence[str | None],
    ) -> None:
        """Add one position by its columns."""
        if not isinstance(self._rows, ListRows):
            self._refuse()
        self._rows.append(token_ids, logprobs, list(ranks), list(decoded_tokens))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        if self.is_frozen:
            self._refuse()
        super().extend(values)

    def insert(self, index: int, value: Any) -> NoReturn:
        self._refuse("can't be inserted into")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse("can't be assigned to")

    def __delitem__(self, index: Any) -> NoReturn:
        self._refuse("can't be deleted from")

    def clear(self) -> NoReturn:
        self._refuse("can't be deleted from")

    def reverse(self) -> NoReturn:
        self._refuse("can't be assigned to")

    def _refuse(self, what: str = "that the engine made is frozen and can't grow") -> NoReturn:
        raise TypeError(f"a FlatLogprobs {what}; to_list() gives a list of dictionaries to work on")


SampleLogprobs = FlatLogprobs | list[LogprobsOnePosition]
PromptLogprobs = FlatLogprobs | list[LogprobsOnePosition | None]


def _make_position(
    token_ids: list[int], values: list[float], ranks: Sequence[int | None], texts: Sequence[str | None]
) -> LogprobsOnePosition | None:
    return dict(zip(token_ids, map(Logprob, values, ranks, texts), strict=True)) if token_ids else None


def _make_read_only(array: np.ndarray) -> np.ndarray:
    view: np.ndarray = array.view()
    view.flags.writeable = False
    return view


def _rebuild(
    row_starts: np.ndarray,
    token_ids: np.ndarray | None,
    values: np.ndarray,
    ranks: np.ndarray,
    chosen_at: np.ndarray | None,
    texts: TokenTexts | None,
) -> FlatLogprobs:
    return FlatLogprobs._of(ArrayRows(row_starts, token_ids, values, ranks, chosen_at, texts))


def _show_position(position: LogprobsOnePosition | None, limit: int = 2) -> str:
    if position is None:
        return "None"
    shown = []
    for token_id, entry in list(position.items())[:limit]:
        text = entry.decoded_token
        text = text if text is None or len(text) <= 12 else f"{text[:12]}…"
        shown.append(f"{token_id}: {entry.logprob:.4f} rank {entry.rank}" + ("" if text is None else f" {text!r}"))
    if len(position) > limit:
        shown.append(f"… {len(position)} in all")
    return f"{{{', '.join(shown)}}}"
