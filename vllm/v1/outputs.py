"""What one step makes on the device, before the one copy to the host.

logits ──sample, score──▶ SamplerOutput (here) ──copy──▶ ModelRunnerOutput (vllm/v1/messages.py)
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm.logprobs.rows import EMPTY_SLOT


class LogprobsTensors(NamedTuple):
    """Scored rows as a rectangle.

    A row: the chosen token, then its alternatives in order, the chosen one left out, then empty slots with the
    token id −1. Ranks are over the whole vocabulary, 1 is the most likely.
    """

    token_ids: torch.Tensor  # [num_rows, 1 + max_k] int32
    values: torch.Tensor  # [num_rows, 1 + max_k] float32
    ranks: torch.Tensor  # [num_rows, 1 + max_k] int32

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def take_rows(self, index: torch.Tensor) -> "LogprobsTensors":  # [num_taken] int64
        """Return a copy of the rows that `index` names, in its order, repeats allowed."""
        return LogprobsTensors(*(tensor.index_select(0, index) for tensor in self))

    @staticmethod
    def concatenate(parts: list["LogprobsTensors"]) -> "LogprobsTensors":
        """Return the rows of all `parts` in one rectangle as wide as the widest."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.token_ids.shape[1] for part in parts)
        num_rows = sum(part.num_rows for part in parts)
        return LogprobsTensors(
            token_ids=_join_columns([part.token_ids for part in parts], num_rows, width, EMPTY_SLOT),
            values=_join_columns([part.values for part in parts], num_rows, width, 0.0),
            ranks=_join_columns([part.ranks for part in parts], num_rows, width, 0),
        )


def _join_columns(tensors: list[torch.Tensor], num_rows: int, width: int, fill: float) -> torch.Tensor:
    joined = tensors[0].new_full((num_rows, width), fill)
    first = 0
    for tensor in tensors:
        joined[first : first + tensor.shape[0], : tensor.shape[1]] = tensor
        first += tensor.shape[0]
    return joined


class WideRows(NamedTuple):
    """Scored rows that are too wide for the rectangle: adjacent rows of one call, still on the device.

    token_ids is None where the rows hold the whole vocabulary, in id order; else a row is laid out as in
    LogprobsTensors.
    """

    first: int  # index among the rows of the call
    chosen_token_ids: torch.Tensor  # [num_rows] int32
    token_ids: torch.Tensor | None  # [num_rows, width] int32
    values: torch.Tensor  # [num_rows, width or vocab_size] float32
    ranks: torch.Tensor  # [num_rows, width or vocab_size] int32


class Scores(NamedTuple):
    """What the scorer made of some rows of logits."""

    rectangle: LogprobsTensors | None  # the rows with up to 128 alternatives or with given ids, in order
    wide: list[WideRows]  # the others, in order
    is_finite: torch.Tensor  # [num_rows] bool; False: NaN, +inf, or −inf throughout


class SamplerOutput(NamedTuple):
    """What the sampler made of some rows of logits; a row may be drawn from several times."""

    token_ids: torch.Tensor  # [num_draws] int32
    is_finite: torch.Tensor  # [num_rows] bool, of the model's own logits
    has_candidates: torch.Tensor | None  # [num_rows] bool; False: masks left no token. None: no row is masked
    scores: Scores | None  # a row a draw that asked, in the order of the draws


class LogprobsLists(NamedTuple):
    """vLLM's name for scored rows on the host, kept as a name; column 0 is the chosen token."""

    logprob_token_ids: np.ndarray  # [num_rows, 1 + max_k] int32
    logprobs: np.ndarray  # [num_rows, 1 + max_k] float32
    sampled_token_ranks: np.ndarray  # [num_rows] int32
