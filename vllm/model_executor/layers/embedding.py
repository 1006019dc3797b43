"""Token embedding and language-model head; tied models hold one matrix for both."""

import torch

from vllm.model_executor.layers.linear import WeightMatrix
from vllm.ops import api as ops


class Embedding(WeightMatrix):
    """Token id → row of the matrix."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:  # [num_tokens] int64 → [num_tokens, hidden_size]
        return ops.embed(token_ids, self.weight, self.weight_scale, self.compute_dtype)


def compute_float32_product(
    hidden: torch.Tensor,  # [num_rows, hidden_size]
    head: WeightMatrix,  # [vocab_size, hidden_size]
    out: torch.Tensor | None = None,  # [num_rows, vocab_size] float32
) -> torch.Tensor:  # [num_rows, vocab_size] float32
    """Return hidden · weightᵀ with float32 results: logits are never rounded to the weights' narrower type."""
    return ops.linear_to_float32(hidden, head.weight, head.weight_scale, out)
