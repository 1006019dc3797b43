"""Token rules: allowed_token_ids, bad_words, min_tokens and logit_bias, as cells of the logits to change.

Each rule names few tokens, so a step's rules become flat lists of (row, token id), whatever the vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from vllm.sampling_params import SamplingParams


class TokenRules(NamedTuple):
    """The rules of one request; the same for its whole life."""

    allowed_ids: np.ndarray | None  # [num_allowed] int64
    bad_words: list[list[int]]
    min_tokens: int
    min_tokens_stop_ids: list[int]
    bias_ids: np.ndarray  # [num_biased] int64
    bias_values: np.ndarray  # [num_biased] float32

    @staticmethod
    def try_make(
        params: SamplingParams, bad_words: list[list[int]], min_tokens_stop_ids: list[int]
    ) -> "TokenRules | None":
        """Return the rules of a request; None when it has none."""
        has_min_tokens = params.min_tokens > 0 and bool(min_tokens_stop_ids)
        if not (params.allowed_token_ids or bad_words or has_min_tokens or params.logit_bias):
            return None
        bias = params.logit_bias or {}
        return TokenRules(
            allowed_ids=np.array(params.allowed_token_ids, dtype=np.int64) if params.allowed_token_ids else None,
            bad_words=bad_words,
            min_tokens=params.min_tokens,
            min_tokens_stop_ids=min_tokens_stop_ids if has_min_tokens else [],
            bias_ids=np.array(list(bias), dtype=np.int64),
            bias_values=np.array(list(bias.values()), dtype=np.float32),
        )

    def find_banned(self, generated: np.ndarray) -> list[int]:  # [num_generated] int32
        """Return the ids that may not come next, after what was generated so far."""
        banned = list(self.min_tokens_stop_ids) if len(generated) < self.min_tokens else []
        for word in self.bad_words:
            num_before = len(word) - 1
            tail = generated[len(generated) - num_before :] if num_before <= len(generated) else None
            if tail is not None and tail.tolist() == word[:-1]:
                banned.append(word[-1])
        return banned


class RuledRow(NamedTuple):
    """A row with rules, and what its sequence generated so far."""

    row: int
    rules: TokenRules
    generated: np.ndarray  # [num_generated] int32


class Cells(NamedTuple):
    """Places in the logits."""

    rows: torch.Tensor  # [num_cells] int64
    token_ids: torch.Tensor  # [num_cells] int64


class LogitsEdits(NamedTuple):
    """A step's rules."""

    changed_rows: list[int]
    allowed_rows: torch.Tensor | None  # [num_allowed_rows] int64: rows where only the allowed cells stay
    allowed: Cells | None
    banned: Cells | None
    biased: Cells | None
    bias_values: torch.Tensor | None  # [num_biased] float32


def make_edits(ruled_rows: Iterable[RuledRow], device: torch.device) -> LogitsEdits | None:
    """Return what the rules of `ruled_rows` change in this step; None when that is nothing."""
    allowed: list[tuple[int, np.ndarray]] = []
    banned: list[tuple[int, np.ndarray]] = []
    biased: list[tuple[int, np.ndarray]] = []
    bias_values: list[np.ndarray] = []
    for item in ruled_rows:
        rules = item.rules
        if rules.allowed_ids is not None:
            allowed.append((item.row, rules.allowed_ids))
        if ids := rules.find_banned(item.generated):
            banned.append((item.row, np.array(ids, dtype=np.int64)))
        if len(rules.bias_ids):
            biased.append((item.row, rules.bias_ids))
            bias_values.append(rules.bias_values)
    changed = sorted({row for row, _ in (*allowed, *banned, *biased)})
    if not changed:
        return None
    return LogitsEdits(
        changed_rows=changed,
        allowed_rows=torch.tensor([row for row, _ in allowed], device=device) if allowed else None,
        allowed=_make_cells(allowed, device),
        banned=_make_cells(banned, device),
        biased=_make_cells(biased, device),
        bias_values=torch.from_numpy(np.concatenate(bias_values)).to(device) if bias_values else None,
    )


def _make_cells(ids_of_rows: list[tuple[int, np.ndarray]], device: torch.device) -> Cells | None:
    if not ids_of_rows:
        return None
    rows = np.repeat([row for row, _ in ids_of_rows], [len(ids) for _, ids in ids_of_rows])
    token_ids = np.concatenate([ids for _, ids in ids_of_rows])
    return Cells(torch.from_numpy(rows).to(device), torch.from_numpy(token_ids).to(device))


def apply_edits(logits: torch.Tensor, edits: LogitsEdits) -> None:  # [num_rows, vocab_size] float32
    """Remove (−inf) what is not allowed or is banned; add the biases."""
    if edits.allowed is not None and edits.allowed_rows is not None:
        kept = logits[edits.allowed]
        logits.index_fill_(0, edits.allowed_rows, -torch.inf)
        logits[edits.allowed] = kept
    if edits.banned is not None:
        logits.index_put_(edits.banned, logits.new_tensor(-torch.inf))
    if edits.biased is not None and edits.bias_values is not None:
        logits.index_put_(edits.biased, edits.bias_values, accumulate=True)
