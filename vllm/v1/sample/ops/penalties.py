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


def make_penalties(penalty_rows: Iterable[PenaltyRow], device: torch.device) -> Penalties | None:
    """Return the cells of `penalty_rows`; None when there are none yet."""
    rows, ids, subtrahends, factors = [], [], [], []
    for item in penalty_rows:
        generated, counts = np.unique(item.token_ids[item.num_prompt_tokens :], return_counts=True)
        amounts = item.frequency * counts + item.presence
        if item.repetition == 1.0:
            cells, cell_amounts = generated, amounts
        else:
            cells = np.unique(item.token_ids)
            cell_amounts = np.zeros(len(cells))
            cell_amounts[np.searchsorted(cells, generated)] = amounts
        rows.append(np.full(len(cells), item.row, dtype=np.int64))
        ids.append(cells.astype(np.int64))
        subtrahends.append(cell_amounts.astype(np.float32))
        factors.append(np.full(len(cells), item.repetition, dtype=np.float32))
    if not any(len(part) for part in rows):
        return None
    return Penalties(
        *(torch.from_numpy(np.concatenate(parts)).to(device) for parts in (rows, ids, subtrahends, factors))
    )


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:  # [num_rows, vocab_size] float32
    """Divide positive logits by the repetition penalty, multiply others with it; then subtract the two others."""
    cells = (penalties.rows, penalties.token_ids)
    values = logits[cells]
    values = torch.where(values > 0, values / penalties.factors, values * penalties.factors)
    logits[cells] = values - penalties.subtrahends
