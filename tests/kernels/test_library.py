"""The compiled library as a guest in the process: one OpenMP runtime, a clear word when it is missing."""

import logging
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from vllm.ops import api, library


def test_the_kernels_are_compiled_here() -> None:
    assert api.is_compiled(), "reinstall with a C++ compiler: pip install -e ."
    assert api.get_simd_variant() in ("portable", "avx2", "avx512")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    program = (
        "from vllm.ops import api as ops\n"
        "import torch\n"
        "torch.set_num_threads(2)\n"
        "torch.randn(400, 400) @ torch.randn(400, 400)\n"
        "ops.argmax_rows(torch.randn(8, 50000))\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "print(*sorted({line.split()[-1] for line in lines if 'libgomp' in line or 'libomp' in line}))"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert len(said) == 1, f"OpenMP runtimes in one process: {said}"


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the test change what is loaded, and load the real library again afterwards."""
    monkeypatch.setattr(api, "_TABLES", api._Tables())
    library.load_library.cache_clear()
    yield monkeypatch
    library.load_library.cache_clear()


def test_without_the_library_ops_give_the_same_and_say_so_once(
    fresh_library: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_library.setattr(library, "_LIBRARY_PATH", pathlib.Path("/nowhere/_C_cpu.so"))
    logging.getLogger("vllm").addHandler(caplog.handler)
    library.log_once.cache_clear()
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(0))
    try:
        for _ in range(3):
            assert torch.equal(api.argmax_rows(logits)[0], logits.argmax(dim=1).int())
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert not api.is_compiled() and api.get_simd_variant() == "none"
    assert [record.getMessage().count("slower") for record in caplog.records] == [1]


def test_a_library_of_another_version_is_not_used(fresh_library: pytest.MonkeyPatch) -> None:
    fresh_library.setattr(library, "_ABI_VERSION", 0)
    assert not api.is_compiled()


def test_an_unknown_instruction_set_is_refused() -> None:
    before = api.get_simd_variant()
    assert not api.set_simd_variant("mmx")
    assert api.get_simd_variant() == before


def test_float64_logits_are_refused_rather_than_read_as_float32() -> None:
    with pytest.raises(AssertionError, match="float32"):
        api.argmax_rows(torch.zeros(1, 4, dtype=torch.float64))
