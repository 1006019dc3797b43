"""Presence, frequency and repetition penalties, for the rows that ask.

Presence and frequency count the generated tokens, repetition the prompt's too. Only the cells of tokens that a
sequence holds are touched: one gather and one scatter for all rows.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch


class PenaltyRow(NamedTuple):
    """A row that asks, and its sequence so far."""

    row: int
    token_ids: np.ndarray  # [num_tokens] int32, prompt and generated
    num_prompt_tokens: int
    presence: float
    frequency: float
    repetition: float


class Penalties(NamedTuple):
    """The cells to change; a (row, token id) pair stands once."""

    rows: torch.Tensor  # [num_cells] int64
    token_ids: torch.Tensor  # [num_cells] int64
    subtrahends: torch.Tensor  # [num_cells] float32: frequency · count + presence
    factors: torch.Tensor  # [num_cells] float32: the repetition penalty


def make_penalties(penalty_rows: Iterable[PenaltyRow], vocab_size: int, device: torch.device) -> Penalties | None:
    """Return the cells of `penalty_rows`; None when there are none yet."""
    items = list(penalty_rows)
    # Prompt tokens count only for the repetition penalty.
    firsts = [item.num_prompt_tokens if item.repetition == 1 else 0 for item in items]
    sequences = [item.token_ids[first:] for item, first in zip(items, firsts, strict=True)]
    lens = np.array([len(tokens) for tokens in sequences])
    if not lens.sum():
        return None
    owners = np.repeat(np.arange(len(items)), lens)
    positions = np.concatenate(
        [np.arange(first, len(item.token_ids)) for item, first in zip(items, firsts, strict=True)]
    )
    is_generated = positions >= np.array([item.num_prompt_tokens for item in items])[owners]
    # One sort for all rows finds each row's distinct tokens.
    cells, cell_of_token = np.unique(owners * vocab_size + np.concatenate(sequences), return_inverse=True)
    counts = np.bincount(cell_of_token, weights=is_generated, minlength=len(cells))
    owners, token_ids = np.divmod(cells, vocab_size)
    rows, presence, frequency, repetition = (
        np.array(column)[owners]
        for column in zip(*((item.row, item.presence, item.frequency, item.repetition) for item in items), strict=True)
    )
    subtrahends = frequency * counts + presence * (counts > 0)
    columns = (rows, token_ids, subtrahends.astype(np.float32), repetition.astype(np.float32))
    return Penalties(*(torch.from_numpy(column).to(device) for column in columns))


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:  # [num_rows, vocab_size] float32
    """Divide positive logits by the repetition penalty, multiply others with it; then subtract the two others."""
    cells = (penalties.rows, penalties.token_ids)
    values = logits[cells]
    values = torch.where(values > 0, values / penalties.factors, values * penalties.factors)
    logits[cells] = values - penalties.subtrahends
