"""Loading a tokenizer: from a Hugging Face folder, a .gguf file, or a hub id."""

import os
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from vllm.checkpoints.gguf_file import open_gguf
from vllm.checkpoints.json_file import read_json_object_if_there
from vllm.exceptions import ModelLoadError, VLLMUnsupportedError, shorten
from vllm.logger import init_logger
from vllm.tokenizers.gguf_tokenizer import make_tokenizer_from_gguf
from vllm.tokenizers.tokenizer import Tokenizer, TokenizerSettings

logger = init_logger(__name__)

_MODES = ("auto", "hf", "slow")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_KEYS = ("additional_special_tokens", "extra_special_tokens")
_HUB_PATTERNS = ["*token*", "*.jinja", "chat_template.json", "vocab*", "merges.txt", "spiece.model", "config.json"]
_VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(
    source: str | Path, *, mode: str = "auto", trust_remote_code: bool = False, revision: str | None = None
) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder, a tokenizer.json, a .gguf file, or a hub id.

    A folder with tokenizer.json, and a .gguf file, are read without transformers; a folder that has only an older
    vocabulary file is converted by transformers, which the log says. `mode` is "auto", "hf" or "slow": one and the same
    here. Raises ModelLoadError (the message says what was looked for) and VLLMUnsupportedError for another mode.
    """
    check_mode(mode)
    path = find_tokenizer_path(source, revision)
    if path.is_file() and path.name != "tokenizer.json":
        return make_tokenizer_from_gguf(open_gguf(path).metadata, str(path))
    folder = path.parent if path.is_file() else path
    settings = read_settings(folder)
    if (folder / "tokenizer.json").is_file():
        return Tokenizer(_read_backend(folder / "tokenizer.json"), settings, str(folder))
    return Tokenizer(_convert_by_transformers(folder, trust_remote_code), settings, str(folder))


def check_mode(mode: str) -> None:
    """Raise VLLMUnsupportedError unless `mode` is a tokenizer mode that is served."""
    if mode not in _MODES:
        raise VLLMUnsupportedError(
            f"tokenizer_mode must be one of {', '.join(_MODES)}; got {mode!r}", parameter="tokenizer_mode", value=mode
        )


def find_tokenizer_path(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder or file that `source` names; a hub id is downloaded (the tokenizer's files only)."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        return _download(str(source), revision)
    if not (path / "tokenizer.json").is_file() and not _find_vocabulary_files(path):
        gguf_files = sorted(path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return gguf_files[0]
    return path


def read_settings(folder: Path) -> TokenizerSettings:
    """Return what tokenizer_config.json, special_tokens_map.json and the chat templates of a folder say.

    Which tokens stand around every text is the post-processor's matter (in tokenizer.json), whatever add_bos_token and
    add_eos_token say: so transformers does it too.
    """
    file = folder / "tokenizer_config.json"
    config = read_json_object_if_there(file)
    names = read_json_object_if_there(folder / "special_tokens_map.json") | config
    special = {role: _read_token(names[role], role, file) for role in _ROLES if names.get(role) is not None}
    extra: list[AddedToken] = []
    for key in _EXTRA_KEYS:
        listed = names.get(key) or []
        values = list(listed.values()) if isinstance(listed, dict) else listed
        extra += [_read_token(value, key, file) for value in values]
    added = {
        int(token_id): _read_token(value, f"added_tokens_decoder[{token_id}]", file, special=bool(value["special"]))
        for token_id, value in (config.get("added_tokens_decoder") or {}).items()
    }
    max_length = config.get("model_max_length")
    return TokenizerSettings(
        special_tokens=special,
        extra_special_tokens=tuple(extra),
        added_tokens=added,
        chat_templates=_read_chat_templates(folder, config.get("chat_template")),
        # "No limit" is written as a float of 1e30.
        model_max_length=max_length if isinstance(max_length, int) and max_length < 2**31 else None,
    )


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelLoadError(f"{file} can't be read as a tokenizer: {shorten(error)}") from error


def _read_token(value: Any, key: str, file: Path, special: bool = True) -> AddedToken:
    fields = {"content": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise ModelLoadError(f"{file}: {key} must be a string or an object with a content; got {shorten(value)}")
    flags = {flag: bool(fields.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(fields["content"], special=special, **flags)


def _read_chat_templates(folder: Path, configured: Any) -> dict[str, str]:
    """Return the templates by name: files of their own stand above what tokenizer_config.json holds."""
    templates: dict[str, str] = {}
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        templates |= {item["name"]: item["template"] for item in configured}
    elif isinstance(configured, dict):
        templates |= configured
    old = read_json_object_if_there(folder / "chat_template.json").get("chat_template")
    if isinstance(old, str):
        templates["default"] = old
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (file := folder / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    return templates


def _find_vocabulary_files(folder: Path) -> list[str]:
    return [name for name in _VOCABULARY_FILES if (folder / name).is_file()]


def _convert_by_transformers(folder: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    found = _find_vocabulary_files(folder)
    if not found:
        raise ModelLoadError(
            f"{folder} holds no tokenizer: looked for tokenizer.json, {', '.join(_VOCABULARY_FILES)} and a .gguf file; "
            "give its folder as tokenizer"
        )
    logger.info("%s has %s but no tokenizer.json: transformers converts it (seconds)", folder, " and ".join(found))
    from transformers import AutoTokenizer  # seconds, and only for folders without tokenizer.json

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        return converted.backend_tokenizer
    except Exception as error:  # conversion runs code of many kinds; each failure means the same here
        raise ModelLoadError(
            f"{folder} has {' and '.join(found)} but no tokenizer.json, and transformers could not convert it "
            f"({type(error).__name__}: {shorten(error)}); save it once with transformers' save_pretrained"
        ) from error


def _download(name: str, revision: str | None) -> Path:
    if name.count("/") > 1 or os.path.isabs(name) or name.endswith((".gguf", ".json")):
        raise ModelLoadError(f"tokenizer {name!r}: no such folder or file (looked at {Path(name).absolute()})")
    import huggingface_hub  # 0.3 s, and only hub ids need it

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        raise ModelLoadError(
            f"tokenizer {name!r}: no such folder or file (looked at {Path(name).absolute()}), and the hub said: "
            f"{type(error).__name__}: {shorten(error)}; without a network give a folder or a .gguf file"
        ) from error
