"""OpenAI's shapes of logprobs: the one place that knows them.

Rows are read straight from the flat arrays of a `FlatLogprobs`, and each row's JSON is encoded by itself: no object an
entry outlives its row, and no single call holds the interpreter for long, however large the answer.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.logprobs import SequenceTexts

FLOOR = -9999.0  # what −inf and NaN are in JSON, which has neither
LARGEST = float(np.finfo(np.float32).max)
_FEW_ENTRIES = 64
_ENTRIES_AT_ONCE = 16_384  # read from the arrays in one piece

_encode = msgspec.json.Encoder().encode


class ScoredRow(NamedTuple):
    """One position: the chosen token first, then its alternatives."""

    token_ids: list[int]
    values: list[float]  # finite
    ranks: list[int]
    names: list[str]  # the texts, or what stands for them
    num_shown: int  # characters of the chosen token's text


def read_rows(scores: FlatLogprobs, *, as_token_ids: bool = False, max_entries: int = 1) -> Iterator[ScoredRow | None]:
    """Yield each position of `scores`; None where there are no scores.

    `max_entries` is the most that a row holds: it bounds what is taken from the arrays at once.
    """
    texts, first_row = scores._get_texts()
    for i, (token_ids, values, ranks) in enumerate(_read_columns(scores, max_entries)):
        if not token_ids:
            yield None
            continue
        shown_ids = token_ids[:1] if as_token_ids else token_ids
        words = [] if texts is None else [word or "" for word in texts.decode_row(first_row + i, shown_ids)]
        names = name_tokens(token_ids) if as_token_ids or texts is None else words
        yield ScoredRow(token_ids, values, ranks, names, len(words[0]) if words else 0)


def _read_columns(scores: FlatLogprobs, max_entries: int) -> Iterator[tuple[list[int], list[float], list[int]]]:
    """Yield each position's ids, finite values and ranks."""
    if len(scores) * max_entries <= _FEW_ENTRIES:  # arrays would cost more than they save
        for token_ids, values, ranks in scores.iter_entries():
            yield [*token_ids], _list_finite(values), [*ranks]
        return
    num_at_once = max(_ENTRIES_AT_ONCE // max(max_entries, 1), 1)
    for first in range(0, len(scores), num_at_once):
        arrays = scores[first : first + num_at_once].to_numpy()
        starts = arrays.row_starts.tolist()
        columns = arrays.token_ids.tolist(), make_finite(arrays.logprobs).tolist(), arrays.ranks.tolist()
        for start, end in zip(starts, starts[1:], strict=False):
            yield columns[0][start:end], columns[1][start:end], columns[2][start:end]


def _list_finite(values: Iterable[float]) -> list[float]:
    """Do for a few values what `make_finite` does."""
    return [min(value, LARGEST) if value > FLOOR else FLOOR for value in values]


def make_finite(values: np.ndarray) -> np.ndarray:
    """Return values that JSON can hold: −inf, NaN and what lies below the floor become the floor."""
    return np.where(values > FLOOR, np.minimum(values, np.float32(LARGEST)), np.float32(FLOOR))


def name_tokens(token_ids: Sequence[int]) -> list[str]:
    """Return the names that stand for tokens by their ids."""
    return [f"token_id:{token_id}" for token_id in token_ids]


# ---------------------------------------------------------------- completions


@dataclass(slots=True)
class CompletionLogprobs:
    """Completions' four parallel lists, an entry a token; they grow in order."""

    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[msgspec.Raw | None] = field(default_factory=list)

    def append(self, offset: int, token: str, logprob: float | None, top: msgspec.Raw | None) -> None:
        self.text_offset.append(offset)
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)

    def followed_by(self, other: "CompletionLogprobs") -> "CompletionLogprobs":
        """Return the entries of both."""
        return CompletionLogprobs(
            self.text_offset + other.text_offset,
            self.token_logprobs + other.token_logprobs,
            self.tokens + other.tokens,
            self.top_logprobs + other.top_logprobs,
        )


def encode_top_map(row: ScoredRow) -> msgspec.Raw:
    """Return a row as a JSON map from text to value.

    Of entries with the same text the first one keeps it, which is the chosen token or else the likelier one; the others
    stand under their ids, so that none is lost.
    """
    top = dict(zip(row.names, row.values, strict=True))
    if len(top) < len(row.names):
        top = {}
        for token_id, name, value in zip(row.token_ids, row.names, row.values, strict=True):
            top[f"token_id:{token_id}" if name in top else name] = value
    return msgspec.Raw(_encode(top))


# ---------------------------------------------------------------- what is generated, in both shapes


class SequenceLogprobs:
    """Writes the scores of one sequence's generated tokens, as they come or at once: the entries are the same.

    Texts and bytes are those of the scores themselves, as `decoded_token` reads them. `hidden_ids` are the tokens that
    the text leaves out, `start_offset` is where the generated text begins in the reported one. `num_top` is how many
    alternatives a chat entry lists; with `given_ids` it lists those instead, in the given order.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        as_token_ids: bool,
        vocab_size: int,
        hidden_ids: Collection[int] = (),
        start_offset: int = 0,
    ) -> None:
        k = params.logprobs or 0
        self._given_ids = list(dict.fromkeys(params.logprob_token_ids or ()))
        self._num_top = vocab_size if k == -1 else min(k, vocab_size)
        self._as_token_ids = as_token_ids
        self._offset = start_offset
        self._hidden_ids = hidden_ids
        self._hides_stop_token = not params.include_stop_str_in_output
        self.num_entries_a_row = (len(self._given_ids) or self._num_top) + 1  # at most

    def write_completion(
        self, token_ids: Sequence[int], scores: FlatLogprobs, finish_reason: str | None, stop_reason: int | str | None
    ) -> CompletionLogprobs:
        """Return the entries of the next tokens of the sequence."""
        written = CompletionLogprobs()
        hidden_at = self._find_stop_token(len(token_ids), finish_reason, stop_reason)
        for i, (token_id, row) in enumerate(zip(token_ids, self._read(scores), strict=True)):
            if row is None:  # no scores came for this token: say so rather than shift the others
                written.append(self._offset, f"token_id:{token_id}", None, None)
                continue
            written.append(self._offset, row.names[0], row.values[0], encode_top_map(row))
            if token_id not in self._hidden_ids and i != hidden_at:
                self._offset += row.num_shown
        return written

    def write_chat(self, token_ids: Sequence[int], scores: FlatLogprobs) -> list[msgspec.Raw]:
        """Return the entries of the next tokens of the sequence, each as JSON."""
        texts, first_row = scores._get_texts()
        written = []
        for i, (token_id, row) in enumerate(zip(token_ids, self._read(scores), strict=True)):
            if row is None:
                row = ScoredRow([token_id], [FLOOR], [self._num_top + 1], name_tokens([token_id]), 0)
            data: list[Any] = [None] * len(row.token_ids)
            if isinstance(texts, SequenceTexts):
                data = [list(texts.bytes_at(first_row + i, entry_id)) for entry_id in row.token_ids]
            entries = [
                {"token": name, "logprob": value, "bytes": true_bytes}
                for name, value, true_bytes in zip(row.names, row.values, data, strict=True)
            ]
            written.append(msgspec.Raw(_encode({**entries[0], "top_logprobs": self._choose_top(row, entries)})))
        return written

    def _read(self, scores: FlatLogprobs) -> Iterator[ScoredRow | None]:
        return read_rows(scores, as_token_ids=self._as_token_ids, max_entries=self.num_entries_a_row)

    def _find_stop_token(self, num_new: int, finish_reason: str | None, stop_reason: int | str | None) -> int:
        """Return the place of the token that ended the sequence and is not shown; −1 if there is none."""
        is_token = finish_reason == "stop" and not isinstance(stop_reason, str)
        return num_new - 1 if is_token and self._hides_stop_token else -1

    def _choose_top(self, row: ScoredRow, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the alternatives to list: the given ids in their order, or the k most likely in falling order."""
        if self._given_ids:
            by_id = dict(zip(row.token_ids, entries, strict=True))
            return [by_id[token_id] for token_id in self._given_ids if token_id in by_id]
        chosen_rank = row.ranks[0]
        if chosen_rank > self._num_top:
            return entries[1 : self._num_top + 1]
        place = sum(rank < chosen_rank for rank in row.ranks[1:])
        return [*entries[1 : place + 1], entries[0], *entries[place + 1 :]]


# ---------------------------------------------------------------- prompts


def write_prompt_logprobs(scores: FlatLogprobs, max_entries: int) -> list[msgspec.Raw | None]:
    """Return `prompt_logprobs`: a position is null, or a map from token id to its entry, the actual token first."""
    written: list[msgspec.Raw | None] = []
    num_at_once = max(_ENTRIES_AT_ONCE // max(max_entries, 1), 1)
    for first in range(0, len(scores), num_at_once):
        part = scores[first : first + num_at_once]
        words = iter(part.decoded_tokens)
        for token_ids, values, ranks in _read_columns(part, max_entries):
            position = {
                str(token_id): {"logprob": value, "rank": rank, "decoded_token": next(words)}
                for token_id, value, rank in zip(token_ids, values, ranks, strict=True)
            }
            written.append(msgspec.Raw(_encode(position)) if position else None)
    return written
