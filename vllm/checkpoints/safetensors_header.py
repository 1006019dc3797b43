"""The header of a .safetensors file: names, types and shapes, checked, without touching the data.

    header length u64 · JSON {name: {dtype, shape, data_offsets: [first, end]}} · data

Read before any memory is allocated, so that what is missing, mis-shaped or cut off is said at once and by name.
"""

import json
import math
import os
import pathlib
from typing import Any, NamedTuple

from vllm.exceptions import ModelLoadError, shorten

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class SafetensorsEntry(NamedTuple):
    """One tensor of the file."""

    dtype: str  # the format's own name, such as "BF16"
    shape: tuple[int, ...]
    first: int  # bytes from the start of the data
    end: int


def read_safetensors_header(path: pathlib.Path) -> dict[str, SafetensorsEntry]:
    """Return name → entry in the file's order.

    Raises:
        ModelLoadError: truncated, not a safetensors file, or entries that overlap, leave gaps or pass the end.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise ModelLoadError(f"{path}: header length {length} does not fit a file of {size} bytes (truncated?)")
            text = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{path}: the header must be a JSON object; got {type(header).__name__}")
    header.pop("__metadata__", None)
    entries = {name: _read_entry(path, name, entry) for name, entry in header.items()}
    _check_places(path, entries, size - 8 - length)
    return entries


def _read_entry(path: pathlib.Path, name: str, entry: Any) -> SafetensorsEntry:
    where = f"{path}: tensor {shorten(name)!r}"
    try:
        dtype, shape, (first, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ModelLoadError(f"{where}: must have dtype, shape and two data_offsets; got {shorten(entry)}") from None
    if dtype not in _ITEM_BYTES:
        raise ModelLoadError(f"{where}: dtype {shorten(dtype)!r} is unknown (known: {', '.join(_ITEM_BYTES)})")
    numbers = (*shape, first, end)
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) or len(shape) > 8:
        raise ModelLoadError(f"{where}: shape and data_offsets must be whole numbers from 0; got {shorten(entry)}")
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - first != nbytes:
        raise ModelLoadError(
            f"{where}: {dtype} {list(shape)} takes {nbytes} bytes; its offsets {first} to {end} hold {end - first}"
        )
    return SafetensorsEntry(dtype, shape, first, end)


def _check_places(path: pathlib.Path, entries: dict[str, SafetensorsEntry], num_data_bytes: int) -> None:
    position, previous = 0, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].first, item[1].end)):
        if entry.end > num_data_bytes:
            end = f"ends at byte {entry.end}, beyond the data's {num_data_bytes} bytes"
            raise ModelLoadError(f"{path}: tensor {name!r} {end} (truncated?)")
        if entry.first != position:
            how = "overlaps" if entry.first < position else "leaves a gap after"
            raise ModelLoadError(
                f"{path}: tensor {name!r} at byte {entry.first} {how} {previous}, which ends at {position}"
            )
        position, previous = entry.end, repr(name)
    if position != num_data_bytes:
        raise ModelLoadError(f"{path}: the tensors end at byte {position} of {num_data_bytes}")
