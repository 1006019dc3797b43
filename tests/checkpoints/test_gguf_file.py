"""The GGUF reader: what it reads, and that damaged files get a clear error, quickly."""

import pathlib
import random
import struct
import time
from typing import Any

import gguf
import gguf.constants
import numpy as np
import pytest

from vllm.checkpoints.gguf_file import BLOCK_SIZES, GgmlType, GgufFile, open_gguf
from vllm.exceptions import ModelLoadError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def make_file(
    path: pathlib.Path,
    pairs: list[bytes] = (),  # type: ignore[assignment]
    tensors: list[bytes] = (),  # type: ignore[assignment]
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> pathlib.Path:
    num_tensors, num_pairs = counts or (len(tensors), len(pairs))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + b"".join(pairs) + b"".join(tensors)
    path.write_bytes(header + b"\0" * (-len(header) % alignment) + data)
    return path


def test_reads_what_the_gguf_package_writes(tmp_path: pathlib.Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 1 << 31)
    writer.add_int32("i32", -(1 << 31))
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 63))
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "héllo\0")
    writer.add_array("strings", ["a", "", "ĠĠ"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("bools", [True, False])
    numbers = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    writer.add_tensor("x", numbers)
    writer.add_tensor("y", np.array([1, 2], np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile(tmp_path / "a.gguf")
    wanted: dict[str, Any] = {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 1 << 31,
        "i32": -(1 << 31),
        "u64": 1 << 63,
        "i64": -(1 << 63),
        "f32": 1e-5,
        "f64": 0.1,
        "yes": True,
        "no": False,
        "text": "héllo\0",
        "strings": ["a", "", "ĠĠ"],
    }
    assert {key: file.metadata[key] for key in wanted} == wanted
    assert file.metadata["ints"].tolist() == [1, -2, 3]
    assert file.metadata["floats"].tolist() == [0.5, 1.5]
    assert file.metadata["bools"].tolist() == [True, False]
    assert file.tensors["x"].shape == (2, 3, 4)
    assert np.array_equal(file.read_tensor_bytes("x").view(np.float32).reshape(2, 3, 4), numbers)
    assert (file.tensors["y"].type, file.tensors["y"].nbytes) == (GgmlType.F16, 4)


def test_block_sizes_are_the_formats_own() -> None:
    known = {int(kind): sizes for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert {int(kind): sizes for kind, sizes in BLOCK_SIZES.items()} == {
        int(kind): known[int(kind)] for kind in GgmlType
    }


def test_a_whole_vocabulary_is_read_in_a_fraction_of_a_second(smollm2_gguf: pathlib.Path) -> None:
    start = time.process_time()
    file = GgufFile(smollm2_gguf)
    assert time.process_time() - start < 0.5
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"


def test_a_file_is_parsed_once_until_it_changes(tmp_path: pathlib.Path) -> None:
    path = make_file(tmp_path / "a.gguf", [pair("n", 4, struct.pack("<I", 1))])
    assert open_gguf(path) is open_gguf(str(path))
    make_file(path, [pair("n", 4, struct.pack("<I", 2)), pair("m", 7, b"\1")])
    assert open_gguf(path).metadata == {"n": 2, "m": True}


DATA = bytes(256)
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "wrong magic": ({"magic": b"GGML"}, "magic"),
    "version 1": ({"version": 1}, "version: 1 must be 2 or 3"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "absurd tensor count": ({"counts": (1 << 60, 0)}, "tensor count: 1152921504606846976 is more than"),
    "absurd metadata count": ({"counts": (0, 1 << 63)}, "metadata count"),
    "more tensors than there are": ({"tensors": [tensor("x", [8])], "counts": (3, 0), "data": DATA}, "tensor"),
    "key too long": ({"pairs": [struct.pack("<Q", 1 << 50) + b"abc"]}, "key of metadata pair 0"),
    "unknown value type": ({"pairs": [pair("k", 13, b"")]}, "type of 'k': 13 is unknown"),
    "absurd array": ({"pairs": [pair("k", 9, struct.pack("<IQ", 4, 1 << 62))]}, "length of 'k'"),
    "absurd string array": ({"pairs": [pair("k", 9, struct.pack("<IQ", 8, 1 << 40))]}, "length of 'k'"),
    "absurd string in an array": (
        {"pairs": [pair("k", 9, struct.pack("<IQQ", 8, 1, 1 << 40))]},
        r"length of 'k'\[0\]: 1099511627776",
    ),
    "unknown element type": ({"pairs": [pair("k", 9, struct.pack("<IQ", 99, 1))]}, "element type of 'k': 99"),
    "arrays nested deep": (
        {"pairs": [pair("k", 9, struct.pack("<IQ", 9, 1) * 50 + struct.pack("<IQ", 0, 0))]},
        "nested deeper",
    ),
    "a key twice": ({"pairs": [pair("k", 7, b"\1"), pair("k", 7, b"\1")]}, "metadata key: 'k' stands twice"),
    "not UTF-8": ({"pairs": [pair("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")]}, "is not UTF-8"),
    "alignment of zero": ({"pairs": [pair("general.alignment", 4, struct.pack("<I", 0))]}, "general.alignment"),
    "alignment of text": ({"pairs": [pair("general.alignment", 8, text("32"))]}, "general.alignment"),
    "a tensor twice": ({"tensors": [tensor("x", [8]), tensor("x", [8], offset=32)], "data": DATA}, "'x' stands twice"),
    "no dimensions": ({"tensors": [tensor("x", [])], "data": DATA}, "number of dimensions: 0"),
    "five dimensions": ({"tensors": [tensor("x", [1] * 5)], "data": DATA}, "number of dimensions: 5"),
    "absurd dimension": ({"tensors": [tensor("x", [1 << 62, 1 << 62])], "data": DATA}, "'x': dimensions"),
    "dimension of zero": ({"tensors": [tensor("x", [0])], "data": DATA}, "'x': dimensions"),
    "half a block": ({"tensors": [tensor("x", [33], kind=8)], "data": DATA}, "multiple of 32 for Q8_0"),
    "unknown tensor type": ({"tensors": [tensor("x", [8], kind=77)], "data": DATA}, "'x': type: 77 is unknown"),
    "odd offset": ({"tensors": [tensor("x", [8], offset=7)], "data": DATA}, "'x': offset: 7 must be a multiple"),
    "absurd offset": (
        {"tensors": [tensor("x", [8], offset=1 << 63)], "data": DATA},
        "'x': place.*beyond the file's end",
    ),
    "data cut off": ({"tensors": [tensor("x", [65])], "data": DATA}, "'x': place.*truncated"),
    "overlapping tensors": (
        {"tensors": [tensor("x", [16], offset=32), tensor("y", [9])], "data": DATA},
        "'x': offset.*overlaps tensor 'y'",
    ),
    "the same place twice": ({"tensors": [tensor("x", [8]), tensor("y", [8])], "data": DATA}, "overlaps"),
}


@pytest.mark.parametrize("case", list(DAMAGED))
def test_a_damaged_file_is_refused_by_file_and_field(tmp_path: pathlib.Path, case: str) -> None:
    settings, message = DAMAGED[case]
    path = make_file(tmp_path / "damaged.gguf", **settings)
    with pytest.raises(ModelLoadError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_refused(tmp_path: pathlib.Path) -> None:
    pairs = [pair("k", 8, text("value")), pair("a", 9, struct.pack("<IQ", 4, 3) + bytes(12))]
    whole = make_file(tmp_path / "whole.gguf", pairs, [tensor("x", [8])], bytes(32)).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError):
            GgufFile(path)


def test_random_damage_never_gives_another_error(tmp_path: pathlib.Path) -> None:
    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("bc") + text("")),
        pair("nested", 9, struct.pack("<IQ", 9, 2) + 2 * (struct.pack("<IQ", 4, 1) + bytes(4))),
        pair("x", 12, struct.pack("<d", 0.5)),
    ]
    tensors = [tensor("a", [8, 2]), tensor("b", [32], kind=8, offset=64)]
    whole = make_file(tmp_path / "whole.gguf", pairs, tensors, bytes(128)).read_bytes()
    rng, path, refused = random.Random(1), tmp_path / "damaged.gguf", 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            GgufFile(path)
        except ModelLoadError:
            refused += 1
    assert refused > 150


def test_a_missing_file_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="can't be read"):
        open_gguf(tmp_path / "none.gguf")
