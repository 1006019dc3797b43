"""Where each named weight of a checkpoint goes: whole parameters, or rows of fused ones.

A checkpoint names q_proj, k_proj, v_proj, gate_proj and up_proj; the model holds them fused, rows under rows. A slot is
the place of one named tensor, so weights may arrive one at a time, in any order, any subset.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from vllm.distributed.parallel_state import Share
from vllm.exceptions import ModelLoadError, shorten
from vllm.model_executor.layers.linear import SCALE_NAME, WeightMatrix

_MAX_NAMES_SHOWN = 8


class WeightSlot(NamedTuple):
    """The place of one tensor of a checkpoint: what this rank holds of it, in a module's parameter from a row on.

    Its rows are of one section, or of several that the checkpoint fuses: the rank has a share of each.
    """

    module: nn.Module
    parameter: str
    first_row: int
    sections: tuple[Share, ...]
    others: tuple[Share, ...] = ()  # of the dimensions after the rows
    is_zero: bool = False  # a bias that another rank adds

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return (sum(share.total for share in self.sections), *(share.total for share in self.others))

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of what this rank holds of it."""
        return (sum(share.size for share in self.sections), *(share.size for share in self.others))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's part of `tensor`, or `tensor` where it is just that, converting dtype and device.

        int8 rows get new scales.
        """
        if tuple(tensor.shape) not in (self.shape, self.local):
            raise ModelLoadError(f"weight {name!r} must have the shape {list(self.shape)}; got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ModelLoadError(f"weight {name!r} must hold floating-point numbers; got {tensor.dtype}")
        rows = self._take_rows(tensor.detach())
        if self._memory.dtype == torch.int8:
            assert isinstance(self.module, WeightMatrix), "only matrices are stored as int8"
            self.module.write_rows(rows, self.first_row)  # takes the columns when the scales are known
        elif self.is_zero:
            self._memory.zero_()
        else:
            is_all = rows.shape == self.local
            copy_elements(rows if is_all else rows[:, *(share.slice for share in self.others)], self._memory)

    def write_int8(self, elements: torch.Tensor, scale: torch.Tensor) -> None:
        """Copy this rank's part of int8 rows and their scales (see `WeightMatrix.write_int8_rows`)."""
        assert isinstance(self.module, WeightMatrix), "only matrices are stored as int8"
        self.module.write_int8_rows(self._take_rows(elements), self._take_rows(scale), self.first_row)

    def find_memory(self) -> torch.Tensor | None:
        """Return the slot's memory where that of a weight can be read straight into it: all of it, floats, on a CPU."""
        memory = self._memory
        is_plain = memory.device.type == "cpu" and memory.dtype != torch.int8 and memory.is_contiguous()
        return memory if is_plain and self.shape == self.local and not self.is_zero else None

    @property
    def _memory(self) -> torch.Tensor:
        """The rows in the parameter; not of int8, which is stored in another order."""
        parameter: torch.Tensor = getattr(self.module, self.parameter).data
        return parameter[self.first_row : self.first_row + self.local[0]]

    def _take_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows that this rank holds; they may be all that there are."""
        if len(tensor) == self.local[0]:
            return tensor
        sections = tensor.split([share.total for share in self.sections])
        return torch.cat([section[share.slice] for section, share in zip(sections, self.sections, strict=True)])


def copy_elements(source: torch.Tensor, target: torch.Tensor) -> None:  # any shape, the same for both
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
            if not isinstance(module, WeightMatrix):
                rows, *others = map(Share.whole, parameter.shape)
                slots[f"{path}.{parameter_name}"] = WeightSlot(module, parameter_name, 0, (rows,), tuple(others))
                continue
            is_weight, first_row = parameter_name == "weight", 0
            for name, sections in module.tensors.items():
                owner = f"{path.rpartition('.')[0]}.{name}" if name else path
                slot = WeightSlot(module, parameter_name, first_row, sections, (module.columns,) if is_weight else ())
                slots[f"{owner}.{parameter_name}"] = slot._replace(is_zero=not is_weight and module.columns.start > 0)
                first_row += slot.local[0]
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
