"""The ctypes structures are those of csrc/cpu/api.h: the same names in the same order, of the same types."""

import ctypes
import enum
import pathlib
import re

import pytest

from vllm.ops import compiled_program
from vllm.ops.library import ACTIVATION_CODES
from vllm.ops.program import OpKind
from vllm.ops.program_layout import BufferPlace

HEADER = (pathlib.Path(__file__).parents[2] / "csrc/cpu/api.h").read_text()
STRUCTS = [
    name.removesuffix("Struct") for name in vars(compiled_program) if name.endswith("Struct") and name != "Struct"
]


def read_body(kind: str, name: str) -> str:
    found = re.search(rf"{kind} {name}(?: : int64_t)? {{(.*?)\n}};", HEADER, re.DOTALL)
    assert found is not None, f"api.h has no {name}"
    return re.sub(r"//[^\n]*", "", found[1])


def read_fields(name: str) -> list[tuple[str, str]]:
    """Return (name, type in ctypes' words) for each field of a struct."""
    fields: list[tuple[str, str]] = []
    for declaration in filter(None, map(str.strip, read_body("struct", name).split(";"))):
        first, *others = declaration.split(",")
        base, _, first_name = first.strip().rpartition(" ")
        for field in (first_name, *map(str.strip, others)):
            is_pointer = "*" in base + field
            word = {"int64_t": "c_long", "float": "c_float"}.get(base, base + "Struct")
            fields.append((field.lstrip("*"), "c_void_p" if is_pointer else word))
    return fields


def test_all_structs_are_compared() -> None:
    assert {"Matrix", "ProgramOp", "Program", "ProgramStep", "ProgramBuffer", "PagedCache", "RotationTable"} == {
        *STRUCTS
    }


@pytest.mark.parametrize("name", STRUCTS)
def test_a_structure_is_the_headers(name: str) -> None:
    structure: type[ctypes.Structure] = getattr(compiled_program, f"{name}Struct")
    found = [(field, type_.__name__) for field, type_ in structure._fields_]  # type: ignore[misc]
    assert found == read_fields(name)


@pytest.mark.parametrize(("name", "members"), [("OpKind", OpKind), ("BufferPlace", BufferPlace)])
def test_a_code_is_the_headers(name: str, members: type[enum.IntEnum]) -> None:
    found = re.findall(r"k(\w+) = (\d+)", read_body("enum", name))
    wanted = [(member.name.title().replace("_", ""), str(member.value)) for member in members]
    assert found == wanted


def test_activations_are_the_headers() -> None:
    names = {"kSilu": "silu", "kGelu": "gelu", "kGeluTanh": "gelu_pytorch_tanh", "kRelu": "relu"}
    found = re.findall(r"(k\w+) = (\d+)", re.search(r"enum Activation[^}]*}", HEADER)[0])  # type: ignore[index]
    assert {names[name]: int(code) for name, code in found} == {name: ACTIVATION_CODES[name] for name in names.values()}
    assert f"kNumActivations = {len(names)};" in HEADER
