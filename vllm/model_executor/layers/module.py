"""The base of our modules: counts changes to any of them, so that what was made of a model is known to hold still.

A change is a module, parameter or attribute set or taken out, other memory for a weight, a hook that comes or goes. All
are counted together, for all models of the process: what a step asks is one comparison.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

_MISSING = object()


class Changes:
    """How many changes there have been."""

    count = 0


def has_global_hooks() -> bool:
    """Say whether somebody wants to hear of the calls of all modules."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


class Weight(nn.Parameter):
    """A parameter whose memory is not replaced unseen."""

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        Changes.count += 1
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class Module(nn.Module):
    """A module whose changes are counted. Its parameters become `Weight`s."""

    def __init__(self) -> None:
        super().__init__()
        self._hook_ids: set[int] = set()

    @property
    def has_hooks(self) -> bool:
        """Say whether somebody wants to hear of the module's calls."""
        return bool(self._hook_ids)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, name, _MISSING) is not value:
            Changes.count += 1
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        Changes.count += 1
        super().__delattr__(name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        Changes.count += 1
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        Changes.count += 1
        _adopt(param)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Module":
        Changes.count += 1
        super()._apply(fn, recurse)  # may put other parameters in the old ones' places
        for parameter in self.parameters(recurse=False):
            _adopt(parameter)
        return self

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._count_hook(super().register_forward_hook(*args, **kwargs))

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._count_hook(super().register_forward_pre_hook(*args, **kwargs))

    def _count_hook(self, handle: RemovableHandle) -> RemovableHandle:
        remove = handle.remove

        def remove_and_count() -> None:
            remove()
            self._hook_ids.discard(handle.id)
            Changes.count += 1

        self._hook_ids.add(handle.id)
        Changes.count += 1
        handle.remove = remove_and_count  # type: ignore[method-assign]
        return handle


class ModuleList(Module, nn.ModuleList):
    """A list of modules, itself never called."""

    def __init__(self, modules: Iterable[nn.Module] | None = None) -> None:
        Module.__init__(self)
        self.extend(modules or ())

    def insert(self, index: int, module: nn.Module) -> None:
        Changes.count += 1
        super().insert(index, module)


def _adopt(parameter: nn.Parameter | None) -> None:
    if type(parameter) is nn.Parameter:
        parameter.__class__ = Weight
