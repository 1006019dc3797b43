"""Where each named weight of a checkpoint goes: whole parameters, or rows of fused ones.

A checkpoint names q_proj, k_proj, v_proj, gate_proj and up_proj; the model holds them fused, rows under rows. A slot is
the place of one named tensor, so weights may arrive one at a time, in any order, any subset.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from vllm.exceptions import ModelLoadError, shorten
from vllm.model_executor.layers.linear import SCALE_NAME, Linear, WeightMatrix

_MAX_NAMES_SHOWN = 8


class WeightSlot(NamedTuple):
    """Rows first_row … first_row + shape[0] − 1 of a module's parameter."""

    module: nn.Module
    parameter: str
    first_row: int
    shape: tuple[int, ...]

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` into its place, converting dtype and device; int8 rows get new factors."""
        if tuple(tensor.shape) != self.shape:
            raise ModelLoadError(f"weight {name!r} must have the shape {list(self.shape)}; got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ModelLoadError(f"weight {name!r} must hold floating-point numbers; got {tensor.dtype}")
        parameter = getattr(self.module, self.parameter)
        if parameter.dtype == torch.int8:
            assert isinstance(self.module, WeightMatrix), "only matrices are stored as int8"
            return self.module.write_rows(tensor.detach(), self.first_row)
        copy_numbers(tensor.detach(), parameter.data[self.first_row : self.first_row + self.shape[0]])

    def find_memory(self) -> torch.Tensor | None:
        """Return the slot's memory where that of a weight can be read straight into it: float numbers on a CPU."""
        parameter = getattr(self.module, self.parameter)
        rows = parameter.data[self.first_row : self.first_row + self.shape[0]]
        is_plain = parameter.device.type == "cpu" and parameter.dtype != torch.int8 and rows.is_contiguous()
        return rows if is_plain else None


def copy_numbers(source: torch.Tensor, target: torch.Tensor) -> None:  # any shape, the same for both
    """Copy between dtypes and devices; plain copies on the CPU by one thread.

    torch would split each of the hundreds of copies over its threads, which wait for each other by spinning: 0.3 s for
    540 MB on two idle cores, but 4 s when another process keeps them busy (0.4 s this way).
    """
    if source.device.type == target.device.type == "cpu" and source.dtype == target.dtype and source.is_contiguous():
        np.copyto(target.view(-1).view(torch.uint8).numpy(), source.reshape(-1).view(torch.uint8).numpy())
    else:
        target.copy_(source)


def collect_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Return canonical name → slot for every weight of `model`."""
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter_name == SCALE_NAME:
                continue  # written with its weight
            is_matrix = isinstance(module, WeightMatrix) and parameter_name == "weight"
            shape = module.shape if is_matrix else tuple(parameter.shape)
            if not isinstance(module, Linear) or not module.parts:
                slots[f"{path}.{parameter_name}"] = WeightSlot(module, parameter_name, 0, shape)
                continue
            parent, first_row = path.rpartition(".")[0], 0
            for part, num_rows in module.parts.items():
                part_shape = (num_rows, *shape[1:])
                slots[f"{parent}.{part}.{parameter_name}"] = WeightSlot(module, parameter_name, first_row, part_shape)
                first_row += num_rows
    return {to_canonical_name(name): slot for name, slot in slots.items()}


def to_canonical_name(name: str) -> str:
    """Return a weight's name without "model.", which checkpoints of the bare decoder leave out."""
    return name.removeprefix("model.")


def is_ignored(name: str) -> bool:
    """Say whether checkpoints may carry `name` although the model works it out itself."""
    return name.endswith("rotary_emb.inv_freq")


def check_weights(
    slots: Mapping[str, WeightSlot], found: Mapping[str, tuple[int, ...]], where: str, *, is_tied: bool
) -> None:
    """Compare the names and shapes that a checkpoint holds with what the model needs, before memory is taken.

    Raises:
        ModelLoadError: lists missing, unexpected and mis-shaped weights.
    """
    found = {to_canonical_name(name): shape for name, shape in found.items() if not is_ignored(name)}
    if is_tied:
        found.pop("lm_head.weight", None)
    problems: list[str] = []
    missing = [name for name in slots if name not in found]
    unexpected = [name for name in found if name not in slots]
    mis_shaped = [
        f"{name} is {list(found[name])}, must be {list(slot.shape)}"
        for name, slot in slots.items()
        if name in found and tuple(found[name]) != slot.shape
    ]
    for what, names in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", mis_shaped)):
        if names:
            problems.append(f"{what} weights: {list_names(names)}")
    if problems:
        raise ModelLoadError(f"{where}: {'; '.join(problems)}")


def list_names(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(shorten(name) for name in names[:_MAX_NAMES_SHOWN])
    return shown if len(names) <= _MAX_NAMES_SHOWN else f"{shown} and {len(names) - _MAX_NAMES_SHOWN} more"
