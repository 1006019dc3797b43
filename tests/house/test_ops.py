"""What belongs to an op is found by its name: the device's table, the oracle, the tests, the timing."""

import inspect
import pathlib
import re

import pytest

from vllm.ops import api
from vllm.ops.cpu import CpuOps
from vllm.ops.cuda import CudaOps
from vllm.ops.torch_reference import TorchReference

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests/kernels").glob("test_*.py")))
TIMINGS = (ROOT / "benchmarks/bench_kernels.py").read_text()
# Ops that a timing calls by another name.
TIMED_AS = {"paged_attention": "attend", "linear_to_float32": "linear"}


def read_parameters(function: object) -> list[tuple[str, object]]:
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in parameters if p.name != "self"]


@pytest.mark.parametrize("table", [TorchReference, CpuOps, CudaOps])
@pytest.mark.parametrize("op", api.OPS)
def test_a_table_has_each_op_as_the_entry_point_calls_it(op: str, table: type[TorchReference]) -> None:
    assert read_parameters(getattr(table, op)) == read_parameters(getattr(api, op))


def test_each_function_of_a_table_is_an_op() -> None:
    for table in (TorchReference, CpuOps, CudaOps):
        assert {name for name, _ in inspect.getmembers(table, inspect.isfunction) if name[0] != "_"} == {*api.OPS}


@pytest.mark.parametrize("op", api.OPS)
def test_an_op_is_tested_in_tests_kernels_and_timed_in_bench_kernels(op: str) -> None:
    assert re.search(rf"\b(ops|api)\.{op}\(", TESTS), f"no test in tests/kernels calls {op}"
    assert f".{TIMED_AS.get(op, op)}(" in TIMINGS, f"benchmarks/bench_kernels.py does not call {op}"
