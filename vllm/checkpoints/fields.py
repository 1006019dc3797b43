"""Typed reading of configuration fields, and the limits that no decoder passes.

The limits are far above any real model: they keep a damaged file from asking for terabytes before its weights are
compared with it.
"""

import math
from typing import Any

from vllm.exceptions import ModelLoadError, shorten

MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 22
MAX_VOCAB_SIZE = 1 << 26
MAX_LENGTH = 1 << 40  # of a sequence


class Fields:
    """The fields of one file; each reader checks type and range and names the file in its error."""

    def __init__(self, values: dict[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def has(self, name: str) -> bool:
        """Say whether the field is there, null included (null: derive it; absent: the architecture's default)."""
        return self.prefix + name in self.values

    def read_int(self, name: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, value, f"must be a whole number from {low} to {high}")
        return value

    def read_float(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.error(name, value, "must be a finite number from 0")
        return float(value)

    def read_bool(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, value, "must be true or false")
        return value

    def read_str(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if type(value) is not str:
            raise self.error(name, value, "must be a string")
        return value

    def read_token_id(self, name: str, default: int | None = None) -> int | None:
        """Return a token id, the first of a list of them, or None where the field is null."""
        value = self.values.get(self.prefix + name, default)
        first = value[0] if isinstance(value, list) and value else value
        if first is None or first == []:
            return None
        if type(first) is not int or not -1 <= first < MAX_VOCAB_SIZE:
            raise self.error(name, value, "must be a token id")
        return None if first < 0 else first

    def error(self, name: str, value: Any, rule: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {self.prefix}{name} {rule}; got {shorten(repr(value))}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(self.prefix + name)
        if value is None:
            if default is None:
                raise ModelLoadError(f"{self.where}: {self.prefix}{name} is missing")
            return default
        return value
