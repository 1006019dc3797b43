"""Matrix products with weights of any stored type."""

import torch
from torch import nn

from vllm.model_executor.number_types import NumberTypes
from vllm.ops import api as ops

SCALE_NAME = "weight_scale"
_MAX_INT8 = 127


class WeightMatrix(nn.Module):
    """A matrix as it is stored: float rows, or interleaved int8 rows (`ops.store_int8`) with float32 scales
    (`weight_scale`).

    An int8 row has one scale or, after `use_group_scales`, one for each group of 32 elements: [num_rows] or
    [size / 32, num_rows].
    """

    weight_scale: nn.Parameter | None

    def __init__(self, num_rows: int, size: int, types: NumberTypes) -> None:
        super().__init__()
        self.compute_dtype = types.compute
        self.shape = (num_rows, size)
        stored_shape = ops.get_stored_shape(num_rows, size, types.weights)
        self.weight = nn.Parameter(torch.empty(stored_shape, dtype=types.weights), requires_grad=False)
        is_int8 = types.weights == torch.int8
        scale = nn.Parameter(torch.empty(num_rows, dtype=torch.float32), requires_grad=False) if is_int8 else None
        self.register_parameter(SCALE_NAME, scale)

    @property
    def has_group_scales(self) -> bool:
        return ops.has_group_scales(self.weight_scale)

    def use_group_scales(self) -> None:
        """Give int8 rows a scale for each group of 32 elements, before they hold anything."""
        assert self.weight_scale is not None and self.shape[1] % ops.GROUP_SIZE == 0, "int8 rows of whole groups"
        scale = torch.empty(ops.get_scale_shape(*self.shape, True), dtype=torch.float32, device=self.weight.device)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def write_rows(self, tensor: torch.Tensor, first_row: int) -> None:  # [num_rows, size] of any float type
        """Store rows as int8: the largest magnitude that shares a scale becomes 127."""
        assert self.weight_scale is not None, "only int8 rows are rounded here"
        num_rows, size = tensor.shape
        group = ops.GROUP_SIZE if self.has_group_scales else size
        wide = tensor.to(self.weight.device, torch.float32).reshape(num_rows, -1, group)
        scale = wide.abs().amax(dim=2) / _MAX_INT8
        # Zeros keep the scale 0; what holds NaN or infinity must not come out finite.
        inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
        rounded = (wide * inverse[:, :, None]).round_().nan_to_num_(0.0).clamp_(-_MAX_INT8, _MAX_INT8)
        self.write_int8_rows(rounded.view(num_rows, size), scale, first_row)

    def write_int8_rows(
        self,
        elements: torch.Tensor,  # [num_rows, size], whole numbers from −128 to 127
        scale: torch.Tensor,  # [num_rows, scales of a row] float32
        first_row: int,
    ) -> None:
        """Store rows that are int8 already."""
        assert self.weight_scale is not None, "only int8 rows have scales"
        rows = slice(first_row, first_row + len(elements))
        ops.write_int8_rows(self.weight.data, first_row, elements)
        if self.has_group_scales:
            self.weight_scale.data[:, rows] = scale.t()
        else:
            self.weight_scale.data[rows] = scale[:, 0]


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
        return ops.linear(x, self.weight, self.bias, self.weight_scale)
