"""Every op runs once per instruction set of the compiled library and once in its torch reference."""

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm import _custom_ops

OPS = [name.removesuffix("_reference") for name in _custom_ops.__all__ if name.endswith("_reference")]
VARIANTS = ["portable", "avx2", pytest.param("avx512", marks=pytest.mark.avx512)]


def use_variant(name: str) -> None:
    if not _custom_ops.set_simd_variant(name):
        pytest.skip(f"this CPU or build has no {name}")


@pytest.fixture(autouse=True)
def restore_settings() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    _custom_ops.set_simd_variant("auto")


@pytest.fixture(params=[*VARIANTS, "reference"])
def ops(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The ops of one implementation under their plain names."""
    if request.param == "reference":
        return SimpleNamespace(**{name: getattr(_custom_ops, f"{name}_reference") for name in OPS})
    use_variant(request.param)
    return SimpleNamespace(**{name: getattr(_custom_ops, name) for name in OPS})


@pytest.fixture
def on_each_variant() -> Callable[[Callable[[], Any]], list[Any]]:
    """Run a function on each instruction set that this CPU has."""

    def run(compute: Callable[[], Any]) -> list[Any]:
        names = [name for name in ("portable", "avx2", "avx512") if _custom_ops.set_simd_variant(name)]
        assert names, "the kernels are not compiled"
        return [functools.partial(_run_on, name)(compute) for name in names]

    return run


def _run_on(name: str, compute: Callable[[], Any]) -> Any:
    assert _custom_ops.set_simd_variant(name)
    return compute()
