"""Root-mean-square normalisation."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last dimension; in float32, rounded once to the input's dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., size], the same shape out
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
        return (wide * inverse).mul_(self.weight).to(x.dtype)
