"""Matrix products with weights of any stored type."""

import torch
import torch.nn.functional as F
from torch import nn

from vllm import _custom_ops as ops
from vllm.model_executor.number_types import NumberTypes

SCALE_NAME = "weight_scale"
_MAX_INT8 = 127


class WeightMatrix(nn.Module):
    """A matrix as it is stored: float rows, or int8 rows with a float32 factor each (`weight_scale`)."""

    weight_scale: nn.Parameter | None

    def __init__(self, num_rows: int, size: int, types: NumberTypes) -> None:
        super().__init__()
        self.compute_dtype = types.compute
        self.weight = nn.Parameter(torch.empty(num_rows, size, dtype=types.weights), requires_grad=False)
        is_int8 = types.weights == torch.int8
        scale = nn.Parameter(torch.empty(num_rows, dtype=torch.float32), requires_grad=False) if is_int8 else None
        self.register_parameter(SCALE_NAME, scale)

    def write_rows(self, tensor: torch.Tensor, first_row: int) -> None:  # [num_rows, size] of any float type
        """Store rows as int8: the largest magnitude of each becomes 127."""
        assert self.weight_scale is not None, "only int8 rows are rounded here"
        wide = tensor.to(self.weight.device, torch.float32)
        scale = wide.abs().amax(dim=1) / _MAX_INT8
        # A row of zeros keeps the factor 0; one that holds NaN or infinity must not come out finite.
        factor = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
        rows = slice(first_row, first_row + len(wide))
        self.weight.data[rows] = (wide * factor[:, None]).round_().nan_to_num_(0.0).clamp_(-_MAX_INT8, _MAX_INT8)
        self.weight_scale.data[rows] = scale


class Linear(WeightMatrix):
    """y = x · Wᵀ + b; with `parts`, several named products of one input fused into one, rows under rows.

    out_features: a number, or part name → rows, such as {"q_proj": 576, "k_proj": 192, "v_proj": 192}. The parts are
    named as the checkpoint names them beside this module.
    """

    def __init__(
        self, in_features: int, out_features: int | dict[str, int], *, has_bias: bool = False, types: NumberTypes
    ) -> None:
        parts = out_features if isinstance(out_features, dict) else {}
        num_rows = out_features if isinstance(out_features, int) else sum(out_features.values())
        super().__init__(num_rows, in_features, types)
        self.parts = parts
        self.bias = nn.Parameter(torch.empty(num_rows, dtype=types.compute), requires_grad=False) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., in_features] → [..., out_features] in the compute type
        if self.compute_dtype == torch.float32 and x.is_cpu:
            return ops.linear(x, self.weight, self.bias, self.weight_scale)
        return F.linear(x, self.weight, self.bias)
