"""What is asked of the C library and the kernel, each in a process of its own: it holds for a whole process."""

import os
import pathlib
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is spoken of")

PRELUDE = """
import ctypes, resource
from vllm import host_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = libc.free.argtypes = [ctypes.c_size_t]
MIB = 1 << 20

def take(num_mib):
    block = libc.malloc(num_mib * MIB)
    ctypes.memset(block, 1, num_mib * MIB)
    return block

def count_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def read_resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / MIB

def count_faults_of_steps():
    for _ in range(2):
        before = count_faults()
        for _ in range(10):  # the like of a step: two live at once, the first one freed first
            first, second = take(24), take(8)
            libc.free(first); libc.free(second)
    return count_faults() - before
"""


def run(code: str, **environment: str) -> float:
    """Run code after the prelude; return the number that it prints."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=plain | environment, capture_output=True, text=True, check=True
    )
    return float(result.stdout)


def test_memory_that_steps_free_is_taken_again() -> None:
    assert run("host_memory.keep_freed_memory(); print(count_faults_of_steps())") < 100


def test_a_process_that_set_malloc_up_itself_is_left_alone() -> None:
    code = "host_memory.keep_freed_memory(); print(count_faults_of_steps())"
    assert run(code, MALLOC_MMAP_THRESHOLD_="1048576") > 10_000


def test_what_stays_is_bounded_and_given_back_when_asked() -> None:
    code = """
host_memory.keep_freed_memory()
before = read_resident_mib()
for block in [take(16) for _ in range(32)]:
    libc.free(block)
kept = read_resident_mib() - before
assert kept < 140, kept
blocks = [take(16) for _ in range(8)]
for block in blocks[:-1]:  # the last one lies above them
    libc.free(block)
held = read_resident_mib()
host_memory.return_free_memory()
print(held - read_resident_mib())
"""
    assert run(code) > 100


def test_huge_pages_come_where_the_kernel_gives_them_on_request() -> None:
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel gives none")
    code = """
import mmap
memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
host_memory.advise_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 64 * MIB)
memory[:] = bytes(64 * MIB)
print(sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages")))
"""
    assert run(code) >= 32 * 1024


def test_a_place_smaller_than_a_huge_page_is_left_alone() -> None:
    assert run("host_memory.advise_huge_pages(4096 * 3, 4096 * 5); print(0)") == 0
