"""What a caller reads: one entry, and a sequence of scored positions.

A scored position reads as a dictionary from token id to `Logprob`: the chosen token (sampled, or the actual next prompt
token) first, then its alternatives. The dictionaries are made when somebody looks; the engine keeps rows.
"""

import importlib
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np

from vllm.logprobs.columns import LogprobColumns, RowArrays
from vllm.logprobs.rows import (
    ENTRY,
    ENTRY_BYTES,
    NO_SCORES,
    Row,
    WholeRow,
    join_columns,
    pack_row,
    read_arrays,
    read_chosen_value,
    read_entries,
)
from vllm.logprobs.texts import JoinedTexts, StoredTexts, TokenTexts


@dataclass(slots=True)
class Logprob:
    """One token at one scored position."""

    logprob: float
    rank: int | None = None  # over the whole vocabulary, 1 is the most likely
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


class _Lists(NamedTuple):
    """The parallel lists of a sequence that grows, as vLLM's constructor takes them."""

    start_indices: list[int]  # [num_rows]
    end_indices: list[int]  # [num_rows]
    token_ids: list[int]  # [num_entries], like all that follow
    logprobs: list[float]
    ranks: list[int | None]
    decoded_tokens: list[str | None]

    def get(self, i: int) -> tuple[list[int], list[float], list[int | None], list[str | None]]:
        span = slice(self.start_indices[i], self.end_indices[i])
        return self.token_ids[span], self.logprobs[span], self.ranks[span], self.decoded_tokens[span]


class FlatLogprobs(MutableSequence["LogprobsOnePosition | None"]):
    """Scored positions that read like a list of dictionaries; a position without scores reads as None.

    What the engine hands out is frozen: mutation is a TypeError, `+=` makes a new object. One that is made by this
    constructor grows by `append`, `append_fast` and `extend`. Text of tokens is worked out when it is read; pickle and
    deepcopy store it. `to_numpy()` and `row_values()` give the numbers without a dictionary.
    """

    __slots__ = ("_first_row", "_rows", "_span", "_texts")
    # Frozen: one row as a stream brings it, or a list that may grow behind the end of `_span`.
    _rows: bytes | list[Row] | _Lists
    _span: range  # which of the list's rows these are; set with a list only
    _texts: TokenTexts | None  # set with frozen rows, like the next one
    _first_row: int  # the number that the list's first row has in `_texts`
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
        self._rows = _Lists(*([] if column is None else column for column in given))

    # ------------------------------------------------------------ what the engine makes

    @classmethod
    def of_rows(
        cls, rows: list[Row], texts: TokenTexts | None = None, first_row: int = 0, span: range | None = None
    ) -> "FlatLogprobs":
        """Return frozen positions over the rows of a list, all that it has now; only appending to it is allowed.

        `first_row` is the number that `texts` knows the list's first row by.
        """
        made = cls.__new__(cls)
        made._rows, made._texts, made._first_row = rows, texts, first_row
        made._span = range(len(rows)) if span is None else span
        return made

    @classmethod
    def of_one_row(cls, row: bytes, texts: TokenTexts | None, first_row: int) -> "FlatLogprobs":
        """Return one frozen position; of what is streamed each token makes one."""
        made = cls.__new__(cls)
        made._rows, made._texts, made._first_row = row, texts, first_row
        return made

    @classmethod
    def from_arrays(
        cls,
        row_starts: np.ndarray,  # [num_rows + 1] int64
        token_ids: np.ndarray,  # [num_entries] int32
        values: np.ndarray,  # [num_entries] float32
        ranks: np.ndarray,  # [num_entries] int32
        *,
        num_none: int = 0,
    ) -> "FlatLogprobs":
        """Return frozen rows that are copied out of arrays, the chosen token of each first."""
        assert row_starts[-1] <= len(token_ids) == len(values) == len(ranks), "rows reach beyond their entries"
        entries = np.empty(len(token_ids), ENTRY)
        entries["token_id"], entries["value"], entries["rank"] = token_ids, values, ranks
        data, starts = entries.tobytes(), (np.asarray(row_starts) * ENTRY_BYTES).tolist()
        rows: list[Row] = [NO_SCORES] * num_none
        rows += [data[start:end] for start, end in zip(starts, starts[1:], strict=False)]
        return cls.of_rows(rows)

    @classmethod
    def concatenate(cls, parts: Iterable["FlatLogprobs"]) -> "FlatLogprobs":
        """Return the positions of all parts in one frozen sequence."""
        frozen = [part._freeze() for part in parts]
        filled = [part for part in frozen if len(part)] or frozen[:1]
        if len(filled) == 1:
            return filled[0]
        rows = [row for part in filled for row in part._list_rows()]
        if not filled:
            return cls.of_rows(rows)
        first_row = filled[0]._places.start
        at = first_row
        for part in filled:
            if part._texts is not filled[0]._texts or part._places != range(at, at + len(part)):
                break
            at += len(part)
        else:
            return cls.of_rows(rows, filled[0]._texts, first_row)
        joined = JoinedTexts()
        for part in filled:
            joined.extend(part._texts, part._places)
        return cls.of_rows(rows, joined if any(text is not None for text in joined.sources) else None)

    def take_rows(self, first: int, end: int) -> "FlatLogprobs":
        """Return positions first … end − 1 as a frozen sequence that keeps nothing of this one alive."""
        part = self._freeze()[first:end]
        rows: list[Row] = [row.copy() if isinstance(row, WholeRow) else row for row in part._list_rows()]
        return self.of_rows(rows, part._texts, part._places.start)

    def with_none_positions(self, count: int) -> "FlatLogprobs":
        """Return a frozen sequence that has `count` positions without scores in front."""
        frozen = self._freeze()
        rows: list[Row] = [NO_SCORES] * count
        return self.of_rows(rows + frozen._list_rows(), frozen._texts, frozen._places.start - count)

    def with_text(self, texts: TokenTexts | None, first_row: int = 0) -> "FlatLogprobs":
        """Return a frozen sequence whose tokens read their text from `texts`, position 0 as its row `first_row`."""
        return self.of_rows(self._freeze()._list_rows(), texts, first_row)

    # ------------------------------------------------------------ rows

    @property
    def is_frozen(self) -> bool:
        return not isinstance(self._rows, _Lists)

    @property
    def _places(self) -> range:
        """The numbers of frozen positions in `_texts`."""
        first = self._first_row
        if isinstance(self._rows, bytes):
            return range(first, first + 1)
        return range(self._span.start + first, self._span.stop + first, self._span.step)

    def _list_rows(self) -> list[Row]:
        """Return the rows of frozen positions."""
        rows = self._rows
        if isinstance(rows, bytes):
            return [rows]
        assert isinstance(rows, list)
        return [rows[i] for i in self._span]

    def _freeze(self) -> "FlatLogprobs":
        """Return the same positions frozen: values rounded to float32, a missing rank as 0."""
        lists = self._rows
        if not isinstance(lists, _Lists):
            return self
        rows: list[Row] = []
        texts: list[dict[int, str | None]] = []
        for i in range(len(self)):
            token_ids, values, ranks, words = lists.get(i)
            rows.append(pack_row(token_ids, values, ranks))
            texts.append(dict(zip(token_ids, words, strict=True)))
        has_texts = any(text is not None for text in lists.decoded_tokens)
        return self.of_rows(rows, StoredTexts(texts) if has_texts else None)

    def _get_texts(self) -> tuple[TokenTexts | None, int]:
        """Return what gives text to the tokens of contiguous rows, and the row number that position 0 has there."""
        if isinstance(self._rows, bytes):
            return self._texts, self._first_row
        frozen = self._freeze()
        places = frozen._places
        assert places.step == 1 or len(places) < 2, "rows of a slice with a step don't follow each other"
        return frozen._texts, places.start

    def _decode(self, row_index: int, token_ids: Sequence[int]) -> Sequence[str | None]:
        return [None] * len(token_ids) if self._texts is None else self._texts.decode_row(row_index, token_ids)

    def iter_entries(self) -> Iterator[tuple[Sequence[int], Sequence[float], Sequence[int]]]:
        """Yield the token ids, values and ranks of each position, the chosen token first; none without scores."""
        rows = self._rows
        return map(read_entries, (rows,) if isinstance(rows, bytes) else self._freeze()._list_rows())

    # ------------------------------------------------------------ numbers

    @property
    def num_none(self) -> int:
        """How many positions without scores stand in front."""
        rows = self._freeze()._list_rows()
        return next((i for i, row in enumerate(rows) if row), len(rows))

    def row_values(self, i: int) -> RowArrays:
        """Return position `i` as read-only (token_ids int32, values float32, ranks int32), chosen token first."""
        frozen = self._freeze()
        rows = frozen._rows
        columns = read_arrays(rows[frozen._span[i]] if isinstance(rows, list) else frozen._list_rows()[i])
        for column in columns:
            column.flags.writeable = False
        return columns

    def chosen_values(self) -> np.ndarray:
        """Return the chosen tokens' values, read-only; NaN for a position without scores."""  # [len(self)] float32
        values = np.array(list(map(read_chosen_value, self._freeze()._list_rows())), np.float32)
        values.flags.writeable = False
        return values

    def to_numpy(self) -> LogprobColumns:
        """Return all positions as compact arrays of the caller's own, chosen token first."""
        return join_columns(self._freeze()._list_rows())

    to_arrays = to_numpy

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
        if isinstance(self._rows, _Lists):
            return self._rows.decoded_tokens
        places = zip(self._places, self.iter_entries(), strict=True)
        return [text for place, (token_ids, _, _) in places if token_ids for text in self._decode(place, token_ids)]

    def _get_lists(self) -> _Lists:
        """Return the lists themselves, or fresh ones of a frozen sequence (without texts)."""
        if isinstance(self._rows, _Lists):
            return self._rows
        columns = self.to_numpy()
        starts = columns.row_starts.tolist()
        entries = (columns.token_ids.tolist(), columns.logprobs.tolist(), columns.ranks.tolist())
        return _Lists(starts[:-1], starts[1:], *entries, [])

    # ------------------------------------------------------------ a sequence of dictionaries

    def __len__(self) -> int:
        rows = self._rows
        if isinstance(rows, bytes):
            return 1
        return len(self._span) if isinstance(rows, list) else len(rows.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "LogprobsOnePosition | None | FlatLogprobs":
        rows = self._rows
        if isinstance(index, slice):
            if isinstance(rows, bytes):
                return self.of_rows([rows], self._texts, self._first_row, range(1)[index])
            if isinstance(rows, list):
                return self.of_rows(rows, self._texts, self._first_row, self._span[index])
            selected = FlatLogprobs()
            for i in range(len(self))[index]:
                selected.append_fast(*rows.get(i))
            return selected
        if not hasattr(index, "__index__"):
            raise TypeError(f"positions are integers or slices; got {type(index).__name__}")
        length = len(self)
        i = index.__index__()
        if not -length <= i < length:
            raise IndexError(f"position {i} of {length}")
        if isinstance(rows, _Lists):
            return _make_position(*rows.get(i % length))
        if isinstance(rows, bytes):
            return self._read(rows, self._first_row)
        number = self._span[i]
        return self._read(rows[number], self._first_row + number)

    def __iter__(self) -> Iterator[LogprobsOnePosition | None]:
        rows = self._rows
        if not isinstance(rows, _Lists):
            yield from map(self._read, self._list_rows(), self._places)
            return
        i = 0
        while i < len(rows.start_indices):  # asked again each time, as a list's own iterator does
            yield _make_position(*rows.get(i))
            i += 1

    def _read(self, row: Row, place: int) -> LogprobsOnePosition | None:
        if not row:
            return None
        token_ids, values, ranks = read_entries(row)
        texts = repeat(None) if self._texts is None else self._texts.decode_row(place, token_ids)
        return dict(zip(token_ids, map(Logprob, values, ranks, texts), strict=True))

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
        if isinstance(self._rows, _Lists):
            return FlatLogprobs, tuple(self._rows)
        if self._texts is None:
            return FlatLogprobs.of_rows, (self._list_rows(),)
        entries = zip(self._places, self.iter_entries(), strict=True)
        words = [dict(zip(ids, self._decode(place, ids) if ids else (), strict=True)) for place, (ids, _, _) in entries]
        return FlatLogprobs.of_rows, (self._list_rows(), StoredTexts(words))

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
        lists = self._rows
        if not isinstance(lists, _Lists):
            self._refuse()
        lists.start_indices.append(len(lists.token_ids))
        lists.token_ids.extend(token_ids)
        lists.logprobs.extend(logprobs)
        lists.ranks.extend(ranks)
        lists.decoded_tokens.extend(decoded_tokens)
        lists.end_indices.append(len(lists.token_ids))

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
    token_ids: Sequence[int], values: Sequence[float], ranks: Sequence[int | None], texts: Sequence[str | None]
) -> LogprobsOnePosition | None:
    return dict(zip(token_ids, map(Logprob, values, ranks, texts), strict=True)) if token_ids else None


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
