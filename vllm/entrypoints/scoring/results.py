"""What scoring answers: a continuation's values, and those of labels at the next position."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JSON_FLOOR = -9999.0  # in JSON, which has no infinities, −inf of one token is this


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How a model values one continuation of a context.

    `token_ids`, `logprobs` and `ranks` have an entry a scored token. What was too long for the model was cut on the
    left: `num_cut_context_tokens` of the context and then, if that was not enough, `num_cut_tokens` of the continuation
    itself, which are in no sum. A pair whose logits were no numbers has an `error`, and NaN as its values.
    """

    token_ids: list[int]
    logprobs: list[float]  # natural logarithms, of the model's own logits
    ranks: list[int]  # over the whole vocabulary, 1 is the most likely
    num_bytes: int | None  # of the continuation in UTF-8; None: token ids, and no tokenizer to decode them
    num_context_tokens: int  # as computed, special tokens included
    num_cut_context_tokens: int = 0
    num_cut_tokens: int = 0
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def logprob(self) -> float:
        """The sum over the continuation's tokens."""
        return math.fsum(self.logprobs) if -math.inf not in self.logprobs else -math.inf

    @property
    def logprob_per_byte(self) -> float | None:
        """The sum divided by the continuation's length in bytes; None where that is unknown or 0."""
        return self.logprob / self.num_bytes if self.num_bytes else None

    @property
    def is_greedy(self) -> bool:
        """Say whether greedy decoding writes this continuation: each token is the most likely one."""
        return self.error is None and all(rank == 1 for rank in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return the score in JSON's types; −inf of a token is −9999.0 there, NaN is null."""
        total = sum_for_json(self.logprobs)
        fields: dict[str, Any] = {
            "logprob": total,
            "logprob_per_byte": total / self.num_bytes if total is not None and self.num_bytes else None,
            "is_greedy": self.is_greedy,
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "num_context_tokens": self.num_context_tokens,
            "num_cut_context_tokens": self.num_cut_context_tokens,
            "num_cut_tokens": self.num_cut_tokens,
            "token_ids": self.token_ids,
            "logprobs": [as_json_number(value) for value in self.logprobs],
            "ranks": self.ranks,
        }
        return fields if self.error is None else {**fields, "error": self.error}


@dataclass(frozen=True, slots=True)
class LabelScores:
    """How likely each of some labels is as the next token of one prompt; entries stand in the order of the labels."""

    token_ids: list[int]
    logprobs: list[float]  # over the whole vocabulary
    ranks: list[int]  # over the whole vocabulary
    num_prompt_tokens: int
    error: str | None = None

    @property
    def normalized_logprobs(self) -> list[float]:
        """The logprobs among the labels alone: their probabilities sum to 1 (NaN where every label is impossible)."""
        highest = max(self.logprobs)
        if not math.isfinite(highest):
            return [math.nan] * len(self.logprobs)
        total = highest + math.log(math.fsum(math.exp(value - highest) for value in self.logprobs))
        return [value - total for value in self.logprobs]

    @property
    def probabilities(self) -> list[float]:
        """The probabilities over the whole vocabulary."""
        return [math.exp(value) for value in self.logprobs]

    @property
    def normalized_probabilities(self) -> list[float]:
        """The probabilities among the labels alone."""
        return [math.exp(value) for value in self.normalized_logprobs]


def as_json_number(value: float | None) -> float | None:
    """Return a token's value as JSON holds it: −inf is −9999.0, NaN is null."""
    if value is None or math.isnan(value):
        return None
    return max(value, JSON_FLOOR)


def sum_for_json(values: Sequence[float | None]) -> float | None:
    """Return the sum of tokens' values as JSON has them; None (no value) adds nothing, NaN makes it null."""
    shown = [as_json_number(value) for value in values if value is not None]
    return None if None in shown else math.fsum(value for value in shown if value is not None)


def describe_labels(scores: LabelScores, labels: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the labels' values in JSON's types, in the order of the labels."""
    columns = zip(scores.token_ids, scores.logprobs, scores.normalized_logprobs, scores.ranks, strict=True)
    return [
        {
            **({} if labels is None else {"label": labels[index]}),
            "token_id": token_id,
            "logprob": as_json_number(logprob),
            "normalized_logprob": as_json_number(normalized),
            "rank": rank,
        }
        for index, (token_id, logprob, normalized, rank) in enumerate(columns)
    ]
