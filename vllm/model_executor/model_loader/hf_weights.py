"""Weights of a Hugging Face folder: safetensors, one file or shards with an index, or .bin files.

The safetensors data is read with plain reads instead of a memory map: a map would be cut from under the engine when
a trainer saves over the folder.
"""

import pathlib
import pickle
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from vllm.checkpoints.json_file import read_json_object
from vllm.checkpoints.safetensors_header import SafetensorsEntry, read_safetensors_header
from vllm.exceptions import ModelLoadError
from vllm.model_executor.model_loader.weight_source import NamedWeight, WeightSource
from vllm.model_executor.weights import list_names

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_NUM_READERS = 2
_SHARD = re.compile(r"[\w.-]+")


def open_folder(folder: pathlib.Path, load_format: str) -> WeightSource:
    """Return the folder's weights; safetensors are preferred, "safetensors" and "pt" insist on one kind.

    Raises:
        ModelLoadError: no weights there, a shard that is missing, or a damaged file.
    """
    if load_format in ("auto", "safetensors"):
        files = _find_files(folder, "model.safetensors", "*.safetensors")
        if files:
            return SafetensorsSource(files, str(folder))
    if load_format in ("auto", "pt"):
        files = _find_files(folder, "pytorch_model.bin", "pytorch_model*.bin")
        if files:
            return PickleSource(files, str(folder))
    wanted = {"auto": "*.safetensors or pytorch_model*.bin", "safetensors": "*.safetensors", "pt": "pytorch_model*.bin"}
    if load_format not in wanted:
        raise ModelLoadError(
            f"load_format {load_format!r} does not read a Hugging Face folder (auto, safetensors, pt do)"
        )
    raise ModelLoadError(f"{folder}: holds no weights ({wanted[load_format]})")


def _find_files(folder: pathlib.Path, single: str, pattern: str) -> list[pathlib.Path]:
    """Return the files that hold the weights: those of the index, the single one, or all that match."""
    index = folder / f"{single}.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelLoadError(f"{index}: weight_map must name a file for each weight")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if not _SHARD.fullmatch(name) or name.startswith(".")]
        if outside:
            raise ModelLoadError(f"{index}: weight_map must name files beside it; got {list_names(outside)}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(f"{folder}: the index names files that are not there: {list_names(missing)}")
        return [folder / name for name in names]
    if (folder / single).is_file():
        return [folder / single]
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith(("consolidated", "adapter")))


class SafetensorsSource:
    """Weights in .safetensors files, whose headers are checked when this is made."""

    def __init__(self, files: list[pathlib.Path], where: str) -> None:
        self.where = where
        self.headers = {path: read_safetensors_header(path) for path in files}
        self.places: dict[str, tuple[pathlib.Path, SafetensorsEntry]] = {}
        for path, header in self.headers.items():
            for name, entry in header.items():
                if name in self.places:
                    raise ModelLoadError(f"{path}: weight {name!r} also stands in {self.places[name][0].name}")
                self.places[name] = (path, entry)

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, (_, entry) in self.places.items()}

    def fill(self, places: Mapping[str, torch.Tensor]) -> set[str]:
        """Read each weight whose place (contiguous CPU memory) has its type straight into it; return their names.

        Two threads, since most of the time goes into fresh memory: 540 MB took 0.7 s, by one thread and a buffer 1.9.
        """
        direct = [
            name
            for name, (_, entry) in self.places.items()
            if name in places
            and _DTYPES.get(entry.dtype) == places[name].dtype
            and places[name].nbytes == entry.end - entry.first
        ]
        with ThreadPoolExecutor(_NUM_READERS) as readers:
            list(readers.map(lambda name: self._read(name, _as_bytes(places[name])), direct))
        return set(direct)

    def iterate(self, skipped: Collection[str] = ()) -> Iterator[NamedWeight]:
        wanted = {name: entry for name, (_, entry) in self.places.items() if name not in skipped}
        largest = max((entry.end - entry.first for entry in wanted.values()), default=0)
        memory = np.empty(largest, np.uint8)  # for one after the other: fresh memory for each costs twice the time
        for name, entry in wanted.items():
            if entry.dtype not in _DTYPES:
                raise ModelLoadError(
                    f"{self.places[name][0]}: weight {name!r} has dtype {entry.dtype}; {', '.join(_DTYPES)} are served"
                )
            data = memory[: entry.end - entry.first]
            self._read(name, data)
            yield NamedWeight(name, torch.from_numpy(data).view(_DTYPES[entry.dtype]).view(entry.shape))

    def _read(self, name: str, target: np.ndarray) -> None:
        path, entry = self.places[name]
        with path.open("rb", buffering=0) as file:
            file.seek(8 + int.from_bytes(file.read(8), "little") + entry.first)
            if _read_fully(file, target) != target.size:
                raise ModelLoadError(f"{path}: weight {name!r} is cut off (truncated while it was read?)")


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _read_fully(file: Any, target: np.ndarray) -> int:
    """Fill `target` from an unbuffered file (one read stops at 2 GiB on Linux); return the bytes that came."""
    done = 0
    while done < target.size:
        count = file.readinto(target.data[done:])
        if not count:
            break
        done += count
    return done


class PickleSource:
    """Weights in .bin files, read with torch's restricted unpickler: no code in them runs."""

    def __init__(self, files: list[pathlib.Path], where: str) -> None:
        self.where = where
        self.tensors: dict[str, torch.Tensor] = {}
        for path in files:
            try:
                is_zip = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and can't be mapped
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
            except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
                raise ModelLoadError(f"{path}: can't be read: {type(error).__name__}: {error}") from error
            if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
                raise ModelLoadError(f"{path}: must hold a state dict of tensors; got {type(content).__name__}")
            self.tensors.update(content)

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def iterate(self, skipped: Collection[str] = ()) -> Iterator[NamedWeight]:
        for name, tensor in self.tensors.items():
            if name in skipped:
                continue
            yield NamedWeight(name, tensor)
