"""Every op runs once per instruction set of the compiled library and once in its torch reference."""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kernels.oracle import REFERENCE
from vllm.ops import api

VARIANTS = ["portable", "avx2", pytest.param("avx512", marks=pytest.mark.avx512)]


def use_variant(name: str) -> None:
    if not api.set_simd_variant(name):
        pytest.skip(f"this CPU or build has no {name}")


@pytest.fixture(autouse=True)
def restore_settings() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    api.set_simd_variant("auto")


@pytest.fixture(params=[*VARIANTS, "reference"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The ops, by one implementation."""
    if request.param == "reference":
        monkeypatch.setitem(api._TABLES, torch.device("cpu"), REFERENCE)
    else:
        use_variant(request.param)
    return api


@pytest.fixture
def on_each_variant() -> Callable[[Callable[[], Any]], list[Any]]:
    """Run a function on each instruction set that this CPU has."""

    def run(compute: Callable[[], Any]) -> list[Any]:
        names = [name for name in ("portable", "avx2", "avx512") if api.set_simd_variant(name)]
        assert names, "the kernels are not compiled"
        return [functools.partial(_run_on, name)(compute) for name in names]

    return run


def _run_on(name: str, compute: Callable[[], Any]) -> Any:
    assert api.set_simd_variant(name)
    return compute()
