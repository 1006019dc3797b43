"""What `vllm score` says at the end: perplexities of the texts, accuracies of the choices, from the records alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Summary:
    """Running totals over records; a run that goes on after an interruption takes in the old ones first."""

    num_texts: int = 0
    num_choice_items: int = 0
    num_errors: int = 0
    num_tokens: int = 0
    num_scored_tokens: int = 0
    num_words: int = 0
    num_bytes: int = 0
    logprob: float = 0.0
    num_answered: int = 0  # choice items that know their answer
    num_correct: int = 0
    num_correct_per_byte: int = 0
    num_cut: int = 0  # choice items of which something was cut

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in one record."""
        if "error" in record:
            self.num_errors += 1
        elif record["type"] == "text":
            self.num_texts += 1
            self.num_tokens += record["num_tokens"]
            self.num_scored_tokens += record["num_scored_tokens"]
            self.num_words += record["num_words"]
            self.num_bytes += record["num_bytes"]
            self.logprob += record["logprob"]
        else:
            self.num_choice_items += 1
            self.num_cut += any(score["num_cut_context_tokens"] for score in record["scores"])
            if record["is_correct"] is not None:
                self.num_answered += 1
                self.num_correct += record["is_correct"]
                self.num_correct_per_byte += record["is_correct_per_byte"]

    def to_dict(self) -> dict[str, Any]:
        """Return the totals and what follows from them, in JSON's types; null where there is nothing to divide by."""
        return {
            "texts": self.num_texts,
            "choice_items": self.num_choice_items,
            "errors": self.num_errors,
            "tokens": self.num_tokens,
            "scored_tokens": self.num_scored_tokens,
            "words": self.num_words,
            "bytes": self.num_bytes,
            "logprob": self.logprob,
            "token_perplexity": self._exp(self.num_scored_tokens),
            "word_perplexity": self._exp(self.num_words),
            "byte_perplexity": self._exp(self.num_bytes),
            "bits_per_byte": -self.logprob / self.num_bytes / math.log(2) if self.num_bytes else None,
            "answered": self.num_answered,
            "accuracy": _divide(self.num_correct, self.num_answered),
            "accuracy_per_byte": _divide(self.num_correct_per_byte, self.num_answered),
            "cut_items": self.num_cut,
        }

    def _exp(self, count: int) -> float | None:
        """Return exp(−logprob / count); null where that is no number that JSON holds."""
        if not count:
            return None
        exponent = -self.logprob / count
        return math.exp(exponent) if exponent < 700 else None


def _divide(count: int, total: int) -> float | None:
    return count / total if total else None
