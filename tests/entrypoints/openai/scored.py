"""Scored rows and a tokenizer for tests of shapes: no model, no engine."""

import functools
import tempfile
from collections.abc import Sequence

import numpy as np

from tests.tiny_tokenizers import write_tiny_tokenizer
from vllm.logprobs import FlatLogprobs
from vllm.tokenizers.loader import load_tokenizer
from vllm.tokenizers.tokenizer import Tokenizer

Entry = tuple[int, float, int]  # token id, value, rank


@functools.cache
def tiny_tokenizer(kind: str = "byte_level") -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_tokenizer(folder, 512, kind)  # type: ignore[arg-type]
        return load_tokenizer(folder)


def make_rows(rows: Sequence[Sequence[Entry]], num_none: int = 0) -> FlatLogprobs:
    """Return rows of (token id, value, rank), the chosen token first in each."""
    entries = [entry for row in rows for entry in row]
    return FlatLogprobs.from_arrays(
        np.cumsum([0, *map(len, rows)]),
        np.array([entry[0] for entry in entries], np.int32),
        np.array([entry[1] for entry in entries], np.float32),
        np.array([entry[2] for entry in entries], np.int32),
        num_none=num_none,
    )


def ids_of_bytes(data: bytes) -> list[int]:
    """Return the tiny byte-level tokenizer's tokens of single bytes, special tokens being 0, 1 and 2."""
    token_bytes = tiny_tokenizer().token_bytes
    by_byte = {token_bytes[token_id]: token_id for token_id in range(3, 259)}
    return [by_byte[bytes([byte])] for byte in data]
