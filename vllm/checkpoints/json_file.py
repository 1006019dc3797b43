"""JSON files of a checkpoint, with errors that name the file."""

import json
import pathlib
from typing import Any

from vllm.exceptions import ModelLoadError


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """Return the object that `path` holds.

    Raises:
        ModelLoadError: the file can't be read, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path}: can't be read: {error}") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object; got {type(value).__name__}")
    return value


def read_json_object_if_there(path: pathlib.Path) -> dict[str, Any]:
    """Return the object that `path` holds, or an empty one where there is no such file."""
    return read_json_object(path) if path.is_file() else {}
