"""Scored rows as arrays, for numeric work."""

from typing import NamedTuple

import numpy as np


class RowArrays(NamedTuple):
    """One scored row in reading order: the chosen token, then its alternatives."""

    token_ids: np.ndarray  # [num_entries] int32
    values: np.ndarray  # [num_entries] float32
    ranks: np.ndarray  # [num_entries] int32, 1 is the most likely


class LogprobColumns(NamedTuple):
    """Scored rows, compact: row i is entries row_starts[i] … row_starts[i + 1] − 1, the chosen token first."""

    row_starts: np.ndarray  # [num_rows + 1] int64, from 0
    token_ids: np.ndarray  # [num_entries] int32
    logprobs: np.ndarray  # [num_entries] float32
    ranks: np.ndarray  # [num_entries] int32, 1 is the most likely

    @property
    def values(self) -> np.ndarray:
        """The numbers, which in a mode of logits are no logprobs."""
        return self.logprobs
