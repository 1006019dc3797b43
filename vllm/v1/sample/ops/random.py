"""Draws: the noise of a draw depends on its seed and its position only, never on its batch mates."""

import numpy as np
import torch

from vllm.ops import api as ops


def to_seed_bits(seed: int) -> int:
    """Return the int64 that has the bits of `seed` modulo 2^64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def draw(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32; −inf: removed
    row_of_draw: np.ndarray,  # [num_draws] int32
    seeds: np.ndarray,  # [num_draws] int64, bits of the 64-bit seed
    positions: np.ndarray,  # [num_draws] int64, the place of the drawn token in its sequence
) -> torch.Tensor:  # [num_draws] int32
    """Draw a token a draw from softmax of its row; rows are read in place however many draws share one."""
    device = logits.device
    columns = (torch.from_numpy(array).to(device) for array in (row_of_draw, seeds, positions))
    return ops.draw_rows(logits, *columns)
