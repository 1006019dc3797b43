"""Matrix products with weights: the one class behind which packed weights can replace plain ones."""

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """y = x · Wᵀ + b; with `parts`, several named products of one input fused into one, rows under rows.

    out_features: a number, or part name → rows, such as {"q_proj": 576, "k_proj": 192, "v_proj": 192}. The parts are
    named as the checkpoint names them beside this module.
    """

    def __init__(
        self, in_features: int, out_features: int | dict[str, int], *, has_bias: bool = False, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.parts = out_features if isinstance(out_features, dict) else {}
        num_rows = out_features if isinstance(out_features, int) else sum(out_features.values())
        self.weight = nn.Parameter(torch.empty(num_rows, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_rows, dtype=dtype), requires_grad=False) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., in_features] → [..., out_features]
        return F.linear(x, self.weight, self.bias)
