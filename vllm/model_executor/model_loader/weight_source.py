"""What the loaders have in common: names and shapes first, tensors one at a time afterwards."""

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

import torch


class WeightSource(Protocol):
    """A checkpoint's weights under their Hugging Face names."""

    where: str  # for error messages

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name → shape without reading any data."""
        ...

    def iterate(self, skipped: Collection[str] = ()) -> Iterator["NamedWeight"]:
        """Yield every weight but the skipped once; a tensor may be overwritten when the next one is asked for."""
        ...


class NamedWeight(NamedTuple):
    """One weight; unpacks to what `load_weights` takes."""

    name: str
    tensor: torch.Tensor
