"""Finding a checkpoint: a Hugging Face folder, a .gguf file, or a hub id that becomes a folder."""

import os
import pathlib
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm.checkpoints.gguf_file import GgufFile, open_gguf
from vllm.checkpoints.json_file import read_json_object, read_json_object_if_there
from vllm.exceptions import ModelLoadError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TEXT_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB_IGNORED = ["original/*", "consolidated*", "*.msgpack", "*.h5", "onnx/*"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on this machine and what its small files say."""

    kind: Literal["hf", "gguf"]
    path: str  # the folder, or the .gguf file
    config: dict[str, Any] = field(default_factory=dict)  # config.json; empty for a .gguf file
    generation_config: dict[str, Any] = field(
        default_factory=dict
    )  # generation_config.json, or made from GGUF metadata


def resolve_checkpoint(
    model: str, revision: str | None = None, hf_token: str | None = None, download_dir: str | None = None
) -> Checkpoint:
    """Return the checkpoint that `model` names: a folder, a .gguf file, or a hub id (downloaded if it isn't cached).

    Raises:
        ModelLoadError: nothing is there (the message says what was tried), or a small file is damaged.
    """
    path = pathlib.Path(model).expanduser()
    if path.is_file():
        return _make_gguf_checkpoint(path)
    if path.is_dir():
        return _make_folder_checkpoint(path)
    if not _HUB_ID.fullmatch(model) or model.endswith((".gguf", ".json", ".safetensors", ".bin")):
        raise ModelLoadError(
            f"model {model!r}: no such folder or .gguf file (looked at {path.absolute()}), and not a hub id"
        )
    return _make_folder_checkpoint(_download(model, revision, hf_token, download_dir))


def read_generation_eos_token_ids(generation_config: dict[str, Any]) -> tuple[int, ...]:
    """Return every end token that the generation config names, in its order.

    Raises:
        ModelLoadError: eos_token_id is neither an id nor a list of ids.
    """
    value = generation_config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelLoadError(
            f"generation_config.json: eos_token_id must be a token id or a list of them; got {value!r}"
        )
    return tuple(dict.fromkeys(ids))


def _make_gguf_checkpoint(path: pathlib.Path) -> Checkpoint:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf and path.suffix != ".gguf":
        raise ModelLoadError(
            f"model {str(path)!r}: a single file must be a .gguf file; for other weights give their folder"
        )
    generation_config = _make_generation_config(open_gguf(path))
    return Checkpoint(kind="gguf", path=str(path), generation_config=generation_config)


def _make_folder_checkpoint(folder: pathlib.Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        gguf_files = sorted(folder.glob("*.gguf"))
        if len(gguf_files) == 1:
            return _make_gguf_checkpoint(gguf_files[0])
        found = ", ".join(path.name for path in gguf_files) or "no .gguf file"
        raise ModelLoadError(
            f"model {str(folder)!r}: the folder holds no config.json ({found}); name a .gguf file itself"
        )
    return Checkpoint(
        kind="hf",
        path=str(folder),
        config=read_json_object(folder / "config.json"),
        generation_config=read_json_object_if_there(folder / "generation_config.json"),
    )


def _download(model: str, revision: str | None, hf_token: str | None, download_dir: str | None) -> pathlib.Path:
    """Return the folder of hub id `model`; only what is needed crosses: text files, and one format of weights."""
    import huggingface_hub  # 0.3 s, and only hub ids need it
    from huggingface_hub.constants import HF_HUB_CACHE

    def fetch(weight_pattern: str) -> pathlib.Path:
        return pathlib.Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                token=hf_token,
                cache_dir=download_dir,
                allow_patterns=[*_HUB_TEXT_PATTERNS, weight_pattern],
                ignore_patterns=_HUB_IGNORED,
            )
        )

    try:
        folder = fetch("*.safetensors")
        return folder if any(folder.glob("*.safetensors")) else fetch("*.bin")
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        offline = (
            " (HF_HUB_OFFLINE is set)"
            if os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "TRUE", "YES", "ON"}
            else ""
        )
        raise ModelLoadError(
            f"model {model!r}: not found. Tried: a folder or file {pathlib.Path(model).absolute()}; the cache "
            f"{download_dir or HF_HUB_CACHE}; the hub{offline}, which said: {type(error).__name__}: {error}. "
            f"Without a network, give the path of a Hugging Face folder or of a .gguf file."
        ) from error


def _make_generation_config(gguf: GgufFile) -> dict[str, Any]:
    """Return what generation_config.json would say: the special ids in the tokenizer's metadata."""
    found: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int:
            found[name] = value
    ends = [gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(end for end in ends if type(end) is int))
    if ids:
        found["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return found
