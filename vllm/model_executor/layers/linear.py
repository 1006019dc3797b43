"""Matrix products with weights of any stored type."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from vllm.distributed.parallel_state import Share, take_share, take_vocabulary_share
from vllm.model_executor.dtypes import ModelDtypes
from vllm.model_executor.layers.module import Module
from vllm.ops import api as ops

SCALE_NAME = "weight_scale"
_MAX_INT8 = 127

# How tensor-parallel ranks share a layer's outputs and inputs: each computes some of the outputs ("columns": of every
# part alike; "vocabulary": sizes may differ by one), or from some of the inputs a summand of all outputs ("rows").
Sharding = Literal["columns", "rows", "vocabulary"]


class WeightMatrix(Module):
    """A matrix as it is stored: float rows, or interleaved int8 rows (`ops.store_int8`) with float32 scales
    (`weight_scale`).

    An int8 row has one scale or, after `use_group_scales`, one for each group of 32 elements: [num_rows] or
    [size / 32, num_rows].

    tensors: the checkpoint's tensors that lie here, rows under rows: name beside this module, or "" where it is this
    module's own → what this rank holds of its rows, for each of the sections that the checkpoint has fused.
    columns: what this rank holds of their columns.
    """

    weight_scale: nn.Parameter | None

    def __init__(self, tensors: Mapping[str, tuple[Share, ...]], columns: Share, dtypes: ModelDtypes) -> None:
        super().__init__()
        self.compute_dtype = dtypes.compute
        self.tensors, self.columns = tensors, columns
        num_rows, size = sum(share.size for sections in tensors.values() for share in sections), columns.size
        self.shape = (num_rows, size)
        stored_shape = ops.get_stored_shape(num_rows, size, dtypes.weights)
        self.weight = nn.Parameter(torch.empty(stored_shape, dtype=dtypes.weights), requires_grad=False)
        is_int8 = dtypes.weights == torch.int8
        scale = nn.Parameter(torch.empty(num_rows, dtype=torch.float32), requires_grad=False) if is_int8 else None
        self.register_parameter(SCALE_NAME, scale)

    @property
    def has_group_scales(self) -> bool:
        return ops.has_group_scales(self.weight_scale)

    @property
    def can_have_group_scales(self) -> bool:
        """Say whether this rank's columns are whole groups."""
        return self.columns.start % ops.GROUP_SIZE == 0 and self.columns.size % ops.GROUP_SIZE == 0

    def use_group_scales(self) -> None:
        """Give int8 rows a scale for each group of 32 elements, before they hold anything."""
        assert self.weight_scale is not None and self.can_have_group_scales, "int8 rows of whole groups"
        scale = torch.empty(ops.get_scale_shape(*self.shape, True), dtype=torch.float32, device=self.weight.device)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)

    def write_rows(
        self,
        tensor: torch.Tensor,  # [num_rows, size or columns.total] of any float type
        first_row: int,
    ) -> None:
        """Store rows as int8: the largest magnitude that shares a scale becomes 127.

        Of whole rows this rank's columns are stored, with the scales of the whole.
        """
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
        elements: torch.Tensor,  # [num_rows, size or columns.total], whole numbers from −128 to 127
        scale: torch.Tensor,  # [num_rows, scales of a row] float32
        first_row: int,
    ) -> None:
        """Store rows that are int8 already."""
        assert self.weight_scale is not None, "only int8 rows have scales"
        if elements.shape[1] != self.shape[1]:
            elements = elements[:, self.columns.slice]
            if self.has_group_scales:
                scale = scale[:, self.columns.start // ops.GROUP_SIZE : self.columns.stop // ops.GROUP_SIZE]
        rows = slice(first_row, first_row + len(elements))
        ops.write_int8_rows(self.weight.data, first_row, elements)
        if self.has_group_scales:
            self.weight_scale.data[:, rows] = scale.t()
        else:
            self.weight_scale.data[rows] = scale[:, 0]


class Linear(WeightMatrix):
    """y = x · Wᵀ + b; with parts, several products of one input in one matrix, rows under rows.

    out_features: a number, or part name → rows, such as {"q_proj": 576, "k_proj": 192, "v_proj": 192}. The parts are
    named as the checkpoint names them beside this module, unless it holds them as one tensor of this module
    (`is_fused`).
    shard, unit: how tensor-parallel ranks share the layer, and how many of the rows or columns that it splits stay
    together (a head's). What an output needs beyond a rank's own product (a sum, the others' columns) is the caller's;
    of a sum the bias is the first rank's summand.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        has_bias: bool = False,
        dtypes: ModelDtypes,
        is_fused: bool = False,
        shard: Sharding | None = None,
        unit: int = 1,
    ) -> None:
        parts = {"": out_features} if isinstance(out_features, int) else out_features
        shares = {name: _take_rows(num_rows, shard, unit) for name, num_rows in parts.items()}
        tensors = {"": (*shares.values(),)} if is_fused else {name: (share,) for name, share in shares.items()}
        columns = take_share(in_features, unit) if shard == "rows" else Share.whole(in_features)
        super().__init__(tensors, columns, dtypes)
        empty = torch.empty(self.shape[0], dtype=dtypes.compute)
        self.bias = nn.Parameter(empty, requires_grad=False) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., size] → [..., rows] of this rank, in the compute type
        return ops.linear(x, self.weight, self.bias, self.weight_scale)


def _take_rows(num_rows: int, shard: Sharding | None, unit: int) -> Share:
    if shard == "columns":
        return take_share(num_rows, unit, may_repeat=True)
    return take_vocabulary_share(num_rows) if shard == "vocabulary" else Share.whole(num_rows)
