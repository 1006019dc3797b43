"""What KV blocks keep for prompt logprobs, beside their keys and values: hidden states and scores.

Each position of a block has a slot. It holds the position's final hidden state (after the final norm: what the LM head
reads), from which the token that follows can be scored, whatever it is; and the score of the token at the position:
its logit, log-probability and rank, and those of the most likely tokens. A score is kept in both forms, as logits and
as log-probabilities, so that each logprobs_mode reads exactly the values of the run that made them.

Which slots are valid only the core knows (vllm/v1/core/prompt_logprobs_index.py).
"""

from typing import NamedTuple

import numpy as np
import torch

from vllm.logprobs.rows import EMPTY_SLOT
from vllm.ops import api as ops
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.block_table import BlockTable


class KeptRows(NamedTuple):
    """Scored rows as they are kept: the chosen token, then the `num_kept` most likely, the chosen one left out."""

    token_ids: torch.Tensor  # [num_rows, 1 + num_kept] int32
    logits: torch.Tensor  # [num_rows, 1 + num_kept] float32
    logprobs: torch.Tensor  # [num_rows, 1 + num_kept] float32
    chosen_ranks: torch.Tensor  # [num_rows] int32


def score_kept_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32
    chosen: torch.Tensor,  # [num_rows] int32
    num_kept: int,
) -> tuple[KeptRows, torch.Tensor]:
    """Score rows in the form that is kept; returns is_finite ([num_rows] bool) too."""
    num_top = torch.full(chosen.shape, num_kept, dtype=torch.int32, device=logits.device)
    token_ids, logprobs, ranks, _, is_finite = ops.score_rows(logits, chosen, num_top, num_kept, False)
    kept_logits = logits.gather(1, token_ids.clamp(min=0).long())  # what lies beyond a row's end is never read
    return KeptRows(token_ids, kept_logits, logprobs, ranks[:, 0].contiguous()), is_finite


class PromptLogprobsCache:
    """The slots of all blocks; slot = block id · block_size + place in the block.

    A score whose token has no block (a prompt's last one, when that is not run) gets a slot of its row in the batch.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_reqs: int,
        vocab_size: int,
        hidden_size: int,
        num_kept: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_kept = min(num_kept, vocab_size)
        self.num_slots = num_blocks * block_size
        self.block_size = block_size
        num_slots, width = self.num_slots + max_num_reqs, 1 + self.num_kept

        def take(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)  # a CPU's pages are touched when they are written

        self.states = take(self.num_slots, hidden_size, dtype=dtype)
        self.rows = KeptRows(
            take(num_slots, width, dtype=torch.int32),
            take(num_slots, width, dtype=torch.float32),
            take(num_slots, width, dtype=torch.float32),
            take(num_slots, dtype=torch.int32),
        )

    @staticmethod
    def bytes_per_block(block_size: int, vocab_size: int, hidden_size: int, num_kept: int, dtype: torch.dtype) -> int:
        """Return the bytes that one block takes."""
        return block_size * (hidden_size * dtype.itemsize + 12 * (1 + min(num_kept, vocab_size)) + 4)

    def find_slots(self, table: BlockTable, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:  # [num] int64 each
        """Return the slots of positions of rows of the batch."""
        slots = table.find_slots(rows, positions, self.block_size)
        return np.where(slots < 0, self.num_slots + rows, slots)

    def write_states(self, slots: torch.Tensor, states: torch.Tensor) -> None:  # [num] int64, [num, hidden_size]
        self.states[slots] = states

    def read_states(self, slots: np.ndarray) -> torch.Tensor:  # [num] int64 → [num, hidden_size]
        return self.states[torch.from_numpy(slots).to(self.states.device)]

    def write_scores(self, slots: np.ndarray, rows: KeptRows) -> None:  # [num] int64
        index = torch.from_numpy(slots).to(self.states.device)
        for target, source in zip(self.rows, rows, strict=True):
            target[index] = source

    def read_answer(
        self,
        slots: np.ndarray,  # [num_rows] int64
        num_top: np.ndarray,  # [num_rows] int32, each at most num_kept
        as_logits: bool,
    ) -> LogprobsTensors:
        """Return rows with `num_top` alternatives each, as the scorer would give them."""
        device = self.states.device
        index, counts = torch.from_numpy(slots).to(device), torch.from_numpy(num_top).to(device)
        width = 1 + int(num_top.max())
        chosen_ranks = self.rows.chosen_ranks[index]
        # Behind a chosen token that is among the most likely, each has the rank that is one below its column's.
        column = torch.arange(width, dtype=torch.int32, device=device)[None]
        ranks = column + (chosen_ranks[:, None] <= column)
        ranks[:, 0] = chosen_ranks
        values = self.rows.logits if as_logits else self.rows.logprobs
        num_entries = 1 + counts - (chosen_ranks <= counts).int()
        token_ids = self.rows.token_ids[index, :width].masked_fill_(column >= num_entries[:, None], EMPTY_SLOT)
        return LogprobsTensors(token_ids, values[index, :width], ranks)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:  # [num_copies] int64 each
        """Copy blocks, all sources read before any target is written."""
        for tensor in (self.states, *self.rows):
            blocks = tensor[: self.num_slots].view(-1, self.block_size, *tensor.shape[1:])
            blocks[targets] = blocks[sources]
