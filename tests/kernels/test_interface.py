"""What csrc/cpu/api.h declares and what Python believes about it agree: functions, codes, sizes."""

import ctypes
import pathlib
import re

import pytest
import torch

from vllm.ops import library, stored_weights

HEADER = re.sub(r"//[^\n]*", "", (pathlib.Path(__file__).parents[2] / "csrc/cpu/api.h").read_text())
FUNCTIONS = {
    name: (result, [parameter for parameter in parameters.split(",") if parameter.strip()])
    for result, name, parameters in re.findall(r"VLLM_API\s+([\w\s*]+?)(vllm_\w+)\(([^;]*)\);", HEADER)
}


def to_ctypes(declaration: str) -> type:
    """Return the type of a parameter, or of a result, as ctypes must know it."""
    if "*" in declaration:
        return ctypes.c_char_p if re.search(r"\bchar\b", declaration) else ctypes.c_void_p
    (name,) = re.findall(r"\b(int64_t|int32_t|float)\b", declaration)
    return {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}[name]


def read_enum(name: str) -> dict[str, int]:
    (body,) = re.findall(rf"enum {name} : \w+ {{([^}}]*)}}", HEADER)
    return {member: int(value) for member, value in re.findall(r"(\w+) = (\d+)", body)}


def read_constant(name: str) -> int:
    (value,) = re.findall(rf"constexpr \w+ {name} = (\d+);", HEADER)
    return int(value)


def test_the_header_was_read() -> None:
    assert len(FUNCTIONS) == HEADER.count("VLLM_API") - 1 > 10, "each is declared once, after the macro"
    with_parameters = {name for name, (_, parameters) in FUNCTIONS.items() if parameters}
    assert with_parameters == {*library._SIGNATURES}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ctypes_passes_what_a_function_takes_and_reads_what_it_returns(name: str) -> None:
    loaded = library.load_library()
    assert loaded is not None
    function = getattr(loaded, name)
    result, parameters = FUNCTIONS[name]
    assert [*(function.argtypes or [])] == [*map(to_ctypes, parameters)]
    assert function.restype == to_ctypes(result)


def test_codes_and_sizes_are_the_headers() -> None:
    kinds = read_enum("WeightKind")
    dtypes = {torch.float32: "kFloat32", torch.bfloat16: "kBfloat16", torch.int8: "kInt8"}
    assert {dtype: kinds[name] for dtype, name in dtypes.items()} == stored_weights.WEIGHT_KINDS
    assert kinds["kInt8Groups"] == stored_weights._INT8_GROUPS
    assert {dtype: kinds[dtypes[dtype]] for dtype in (torch.float32, torch.bfloat16)} == library.CACHE_KINDS
    assert read_constant("kGroupSize") == stored_weights.GROUP_SIZE
    assert read_constant("kInterleavedRows") == stored_weights.INTERLEAVED_ROWS
    assert read_constant("kVllmAbiVersion") == library._ABI_VERSION


def test_statuses_become_their_errors() -> None:
    statuses = read_enum("Status")
    library.check_status(statuses["kOk"])
    for name, error in (("kOutOfMemory", MemoryError), ("kIdOutOfRange", IndexError), ("kCountOutOfRange", ValueError)):
        with pytest.raises(error):
            library.check_status(statuses[name])
