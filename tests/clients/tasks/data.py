"""The documents of the local tasks, for lm-eval's `custom_dataset`."""

import pathlib
from typing import Any

import datasets

FOLDER = pathlib.Path(__file__).parent / "data"


def choose(**options: Any) -> Any:
    return _load("choose")


def last_word(**options: Any) -> Any:
    return _load("last_word")


def whole_text(**options: Any) -> Any:
    return _load("whole_text")


def continue_line(**options: Any) -> Any:
    return _load("continue_line")


def _load(name: str) -> Any:
    return datasets.load_dataset("json", data_files={"test": str(FOLDER / f"{name}.jsonl")})
