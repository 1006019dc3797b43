"""Weights of a .gguf file under their Hugging Face names, as floating-point tensors."""

import math
import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch

from vllm.checkpoints.gguf_file import GgmlType, GgufFile
from vllm.checkpoints.rope_config import FREQUENCY_FACTORS
from vllm.config import TransformerConfig
from vllm.exceptions import ModelLoadError
from vllm.model_executor.families.family import Family
from vllm.model_executor.layers.linear import WeightMatrix
from vllm.model_executor.model_loader.dequantize import UnservedTypeError, dequantize, split_q8_0
from vllm.model_executor.model_loader.weight_source import NamedWeight
from vllm.model_executor.weights import WeightSlot

_PAIRED = re.compile(r"blk\.(\d+)\.attn_([qk])\.(weight|bias)")
# What files carry beside weights: read into the configuration, or worked out by the model.
_NOT_WEIGHTS = (FREQUENCY_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")


class GgufSource:
    """A file's tensors. Llama files hold the rows of q and k in another order, which is undone here."""

    def __init__(self, gguf: GgufFile, config: TransformerConfig, family: Family) -> None:
        self.gguf = gguf
        self.config = config
        self.where = str(gguf.path)
        self.has_paired_rows = family.has_paired_gguf_rows
        # A name that is none of the family's stays as it is, and is then listed as unexpected.
        name_weight = family.name_gguf_weight
        self.names = {name: name_weight(name) or name for name in gguf.tensors if name not in _NOT_WEIGHTS}

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {hf_name: self.gguf.tensors[name].shape for name, hf_name in self.names.items()}

    def choose_group_scales(self, slots: Mapping[str, WeightSlot]) -> None:
        """Let int8 matrices of which the file holds all rows as Q8_0 keep its elements and scales."""
        is_q8_0 = {hf_name: self.gguf.tensors[name].type is GgmlType.Q8_0 for name, hf_name in self.names.items()}
        can_keep: dict[WeightMatrix, bool] = {}
        for hf_name, slot in slots.items():
            matrix = slot.module
            if isinstance(matrix, WeightMatrix) and matrix.weight_scale is not None and slot.parameter == "weight":
                can_keep.setdefault(matrix, matrix.can_have_group_scales)
                can_keep[matrix] &= is_q8_0.get(hf_name, False)
        for matrix in [matrix for matrix, keeps in can_keep.items() if keeps]:
            matrix.use_group_scales()

    def fill_group_scales(self, slots: Mapping[str, WeightSlot]) -> set[str]:
        """Write what matrices keep as it is, and return its names."""
        filled = set()
        for name, hf_name in self.names.items():
            slot = slots.get(hf_name)
            if slot is None or slot.parameter != "weight":
                continue
            matrix = slot.module
            if isinstance(matrix, WeightMatrix) and matrix.has_group_scales:
                stored = split_q8_0(self.gguf.tensors[name], self.gguf.read_tensor_bytes(name))
                elements, scale = (self._restore_row_order(name, tensor) for tensor in stored)
                slot.write_int8(elements, scale)
                filled.add(hf_name)
        return filled

    def _restore_row_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        paired = _PAIRED.fullmatch(name) if self.has_paired_rows else None
        if paired is None:
            return tensor
        attention = self.config.layers[int(paired[1])].attention
        return _to_split_halves(tensor, attention.num_heads if paired[2] == "q" else attention.num_kv_heads)

    def iterate(self, skipped: Collection[str] = ()) -> Iterator[NamedWeight]:
        wanted = {name: hf_name for name, hf_name in self.names.items() if hf_name not in skipped}
        memory = np.empty(max((math.prod(self.gguf.tensors[name].shape) for name in wanted), default=0), np.float32)
        for name, hf_name in wanted.items():
            try:
                tensor = dequantize(self.gguf.tensors[name], self.gguf.read_tensor_bytes(name), memory)
            except UnservedTypeError as error:
                raise ModelLoadError(f"{self.where}: {error}") from error
            yield NamedWeight(hf_name, self._restore_row_order(name, tensor))


def _to_split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:  # [num_heads · head_dim, …]
    """Return the rows with each head's even ones first and its odd ones after them."""
    pairs = weight.view(num_heads, -1, 2, weight[0].numel())
    return pairs.transpose(1, 2).reshape(weight.shape)
