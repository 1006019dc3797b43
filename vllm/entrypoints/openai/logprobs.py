"""OpenAI's shapes of logprobs: the one place that knows them.

Rows are read straight from the flat arrays of a `FlatLogprobs`, and each row's JSON is encoded by itself: no object an
entry outlives its row, and no single call holds the interpreter for long, however large the answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm.logprobs import FlatLogprobs
from vllm.logprobs_packed import ENTRY_BYTES, read_packed_row
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.token_bytes import ShownTokens, decode_bytes
from vllm.tokenizers.tokenizer import Tokenizer
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
    texts: list[str | None]


def read_rows(
    scores: FlatLogprobs, *, texts: SequenceTexts | None, first_row: int = 0, max_entries: int = 1
) -> Iterator[ScoredRow | None]:
    """Yield each position of `scores`, the first one being row `first_row` of `texts`; None where there are no scores.

    `max_entries` is the most that a row holds: it bounds what is taken from the arrays at once.
    """
    for i, (token_ids, values, ranks) in enumerate(_read_columns(scores, max_entries)):
        if not token_ids:
            yield None
            continue
        words: list[str | None] = [None] * len(token_ids)
        if texts is not None:
            words[:] = texts.decode_row(first_row + i, token_ids)
        yield ScoredRow(token_ids, values, ranks, words)


def _read_columns(scores: FlatLogprobs, max_entries: int) -> Iterator[tuple[list[int], list[float], list[int]]]:
    """Yield each position's ids, finite values and ranks."""
    if (packed := scores._get_packed_row()) is not None and len(packed) <= _FEW_ENTRIES * ENTRY_BYTES:
        row = read_packed_row(packed)  # a stream's event
        yield [*row.token_ids], _list_finite(row.values), [*row.ranks]
        return
    if len(scores) * max_entries <= _FEW_ENTRIES:  # several tokens: the arrays would cost more than they save
        for i in range(len(scores)):
            token_ids, values, ranks = scores.row_values(i)
            yield token_ids.tolist(), _list_finite(values.tolist()), ranks.tolist()
        return
    num_at_once = max(_ENTRIES_AT_ONCE // max(max_entries, 1), 1)
    for first in range(0, len(scores), num_at_once):
        arrays = scores[first : first + num_at_once].to_arrays()
        starts = arrays.row_starts.tolist()
        columns = arrays.token_ids.tolist(), make_finite(arrays.values).tolist(), arrays.ranks.tolist()
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


def encode_top_map(row: ScoredRow, as_token_ids: bool) -> msgspec.Raw:
    """Return a row as a JSON map from text to value.

    Of entries with the same text the first one keeps it, which is the chosen token or else the likelier one; the others
    stand under their ids, so that none is lost.
    """
    words = name_tokens(row.token_ids) if as_token_ids else [text or "" for text in row.texts]
    top = dict(zip(words, row.values, strict=True))
    if len(top) < len(words):
        top = {}
        for token_id, word, value in zip(row.token_ids, words, row.values, strict=True):
            top[f"token_id:{token_id}" if word in top else word] = value
    return msgspec.Raw(_encode(top))


# ---------------------------------------------------------------- what is generated, in both shapes


class SequenceLogprobs:
    """Writes the scores of one sequence's generated tokens, as they come or at once: the entries are the same.

    `start_offset` is where the generated text begins in the reported one. `num_top` is how many alternatives a chat
    entry lists; with `given_ids` it lists those instead, in the given order.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        as_token_ids: bool,
        vocab_size: int,
        start_offset: int = 0,
    ) -> None:
        k = params.logprobs or 0
        self._given_ids = list(dict.fromkeys(params.logprob_token_ids or ()))
        self._num_top = vocab_size if k == -1 else min(k, vocab_size)
        self._max_entries = (len(self._given_ids) or self._num_top) + 1
        self._as_token_ids = as_token_ids or tokenizer is None
        self._token_ids: list[int] = []
        self._prompt_token_ids = prompt_token_ids
        self._offset = start_offset
        self._texts: SequenceTexts | None = None
        self._shown: ShownTokens | None = None
        self._hidden_ids: frozenset[int] = frozenset()
        self._hides_stop_token = not params.include_stop_str_in_output
        if tokenizer is not None:
            self._shown = tokenizer.token_bytes.shown(params.skip_special_tokens)
            self._texts = SequenceTexts(
                tokenizer.token_bytes,
                self._token_ids,
                context=prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
            )
            if params.skip_special_tokens:
                self._hidden_ids = tokenizer.token_bytes.special_ids

    @property
    def num_entries_a_row(self) -> int:
        """The most entries that a row holds."""
        return self._max_entries

    def write_completion(
        self, token_ids: Sequence[int], scores: FlatLogprobs, finish_reason: str | None, stop_reason: int | str | None
    ) -> CompletionLogprobs:
        """Return the entries of the next tokens of the sequence."""
        written = CompletionLogprobs()
        rows = self._take(token_ids, scores)
        hidden_at = self._find_stop_token(len(token_ids), finish_reason, stop_reason)
        cut_at = len(token_ids) - 1 if finish_reason == "length" else -1
        for i, (token_id, row) in enumerate(zip(token_ids, rows, strict=True)):
            if row is None:  # no scores came for this token: say so rather than shift the others
                written.append(self._offset, self._name(token_id, None), None, None)
                continue
            if i == cut_at:
                row.texts[0] = self._finish_text(row.texts[0], token_id)
            text = row.texts[0] or ""
            top = encode_top_map(row, self._as_token_ids)
            written.append(self._offset, self._name(token_id, text), row.values[0], top)
            if token_id not in self._hidden_ids and i != hidden_at:
                self._offset += len(text)
        return written

    def write_chat(
        self, token_ids: Sequence[int], scores: FlatLogprobs, finish_reason: str | None
    ) -> list[msgspec.Raw]:
        """Return the entries of the next tokens of the sequence, each as JSON."""
        cut_at = len(token_ids) - 1 if finish_reason == "length" else -1
        first_row = len(self._token_ids)
        rows = self._take(token_ids, scores)
        written = []
        for i, (token_id, row) in enumerate(zip(token_ids, rows, strict=True)):
            if row is None:
                row = ScoredRow([token_id], [FLOOR], [self._num_top + 1], [None])
            if i == cut_at:
                row.texts[0] = self._finish_text(row.texts[0], token_id)
            entries = [
                {"token": self._name(entry_id, text), "logprob": value, "bytes": self._bytes(first_row + i, entry_id)}
                for entry_id, text, value in zip(row.token_ids, row.texts, row.values, strict=True)
            ]
            written.append(msgspec.Raw(_encode({**entries[0], "top_logprobs": self._choose_top(row, entries)})))
        return written

    def _take(self, token_ids: Sequence[int], scores: FlatLogprobs) -> Iterator[ScoredRow | None]:
        first_row = len(self._token_ids)
        self._token_ids += token_ids
        return read_rows(scores, texts=self._texts, first_row=first_row, max_entries=self._max_entries)

    def _find_stop_token(self, num_new: int, finish_reason: str | None, stop_reason: int | str | None) -> int:
        """Return the place of the token that ended the sequence and is not shown; −1 if there is none."""
        is_token = finish_reason == "stop" and not isinstance(stop_reason, str)
        return num_new - 1 if is_token and self._hides_stop_token else -1

    def _finish_text(self, text: str | None, token_id: int) -> str | None:
        """Return the text of the very last token: where nothing can complete a character any more, it shows U+FFFD."""
        if self._shown is None or token_id in self._hidden_ids:
            return text
        pending = self._shown.pending_bytes(self._token_ids, earlier=self._shown.pending_bytes(self._prompt_token_ids))
        return (text or "") + decode_bytes(pending, final=True)[0]

    def _name(self, token_id: int, text: str | None) -> str:
        return f"token_id:{token_id}" if self._as_token_ids or text is None else text

    def _bytes(self, row_index: int, token_id: int) -> list[int] | None:
        return None if self._texts is None else list(self._texts.bytes_at(row_index, token_id))

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
        for row in read_rows(part, texts=None, max_entries=max_entries):
            if row is None:
                written.append(None)
                continue
            entries = zip(row.token_ids, row.values, row.ranks, strict=True)
            position = {
                str(token_id): {"logprob": value, "rank": rank, "decoded_token": next(words)}
                for token_id, value, rank in entries
            }
            written.append(msgspec.Raw(_encode(position)))
    return written
