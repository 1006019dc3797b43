"""Top-k, top-p and min-p: which tokens stay, for the rows that ask.

What stays is always a prefix of the row's falling order (logit before temperature, ties by token id, lowest first),
so equal filters keep equal tokens whatever the temperature rounds together. The rule to the last bit:
`vllm.ops.api.filter_rows`.
"""

import numpy as np
import torch

from vllm.ops import api as ops


def apply_filters(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, before temperature
    rows: np.ndarray,  # [num_filtered] int64, each once: the rows that ask
    temperature: torch.Tensor,  # [num_filtered] float32
    top_k: torch.Tensor,  # [num_filtered] int64, vocab_size: off
    top_p: torch.Tensor,  # [num_filtered] float32, 1: off
    min_p: torch.Tensor,  # [num_filtered] float32, 0: off
) -> None:
    """Apply min-p, then top-k, then top-p on what the others left, renormalised: −inf in place for what is removed."""
    ops.filter_rows(logits, torch.from_numpy(rows).to(logits.device), temperature, top_k, top_p, min_p)
