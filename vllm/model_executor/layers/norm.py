"""Root-mean-square normalisation."""

import torch
from torch import nn

from vllm.model_executor.layers.module import Module
from vllm.ops import api as ops


class RMSNorm(Module):
    """x / √(mean(x²) + eps) · weight over the last dimension; in float32, rounded once to the input's dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(
        self,
        x: torch.Tensor,  # [..., size]
        residual: torch.Tensor | None = None,  # [num_rows, size]: x is added to it in place, and the sum is normed
    ) -> torch.Tensor:  # the shape of x
        return ops.rms_norm(x, self.weight, self.eps, residual)
