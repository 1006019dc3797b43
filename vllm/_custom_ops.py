"""The one door to the kernels: torch tensors in, torch tensors out.

On the CPU an op runs the compiled library (csrc/, a plain C interface through ctypes); elsewhere, and where the
library is missing, its torch reference of the same contract. torch is imported before the library is loaded: both
then share torch's OpenMP runtime, while two runtimes in one process would spin against each other.

Order of tokens, everywhere: by (logit falling, id rising), on the float32 logits given. rank = 1 + the tokens before.
"""

import ctypes
import functools
import logging
import pathlib

import torch

from vllm._ops_reference import (
    ScoredEntries,
    argmax_rows_reference,
    draw_rows_reference,
    philox_bits_reference,
    score_full_rows_reference,
    score_given_ids_reference,
    score_rows_reference,
)
from vllm.logger import init_logger, log_once

__all__ = [
    "ScoredEntries",
    "argmax_rows",
    "argmax_rows_reference",
    "draw_rows",
    "draw_rows_reference",
    "get_simd_variant",
    "is_compiled",
    "philox_bits",
    "philox_bits_reference",
    "score_full_rows",
    "score_full_rows_reference",
    "score_given_ids",
    "score_given_ids_reference",
    "score_rows",
    "score_rows_reference",
    "set_simd_variant",
]

logger = init_logger(__name__)

_LIBRARY_PATH = pathlib.Path(__file__).with_name("_C_cpu.so")
_ABI_VERSION = 1
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_MATRIX = [_POINTER, _SIZE, _SIZE, _SIZE]  # data, row stride, rows, columns
_SIGNATURES = {
    "vllm_score_rows": [*_MATRIX, _POINTER, _POINTER, _INT, _INT, _INT, *[_POINTER] * 5],
    "vllm_score_given_ids": [*_MATRIX, _POINTER, _POINTER, _INT, _INT, _INT, *[_POINTER] * 5],
    "vllm_score_full_rows": [*_MATRIX, _INT, _INT, *[_POINTER] * 3],
    "vllm_argmax_rows": [*_MATRIX, _INT, *[_POINTER] * 2],
    "vllm_draw_rows": [*_MATRIX, *[_POINTER] * 3, _SIZE, _INT, _POINTER],
    "vllm_philox_bits": [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER],
    "vllm_set_variant": [ctypes.c_char_p],
}


@functools.cache
def _load_library() -> ctypes.CDLL | None:
    """Load the compiled library; None, said once, where it is missing or of another version."""
    try:
        library = ctypes.CDLL(str(_LIBRARY_PATH))
        found = library.vllm_abi_version()
    except (OSError, AttributeError) as error:
        reason = "was not built (no C++ compiler at install?)" if not _LIBRARY_PATH.exists() else f"failed: {error}"
    else:
        if found == _ABI_VERSION:
            for name, argument_types in _SIGNATURES.items():
                getattr(library, name).argtypes = argument_types
            library.vllm_get_variant.restype = ctypes.c_char_p
            return library
        reason = f"is of version {found}, not {_ABI_VERSION}; reinstall"
    log_once(logger.name, logging.WARNING, f"The compiled CPU kernels {reason}: running in plain torch, slower.")
    return None


def is_compiled() -> bool:
    """Say whether CPU tensors go to the compiled library; says once in the log when it is missing."""
    return _load_library() is not None


def get_simd_variant() -> str:
    """Return the instruction set that the kernels use: avx512, avx2 or portable; none without the library."""
    library = _load_library()
    return library.vllm_get_variant().decode() if library else "none"


def set_simd_variant(name: str) -> bool:
    """Choose the instruction set (also "auto"), for tests; False where it isn't compiled in or the CPU lacks it."""
    library = _load_library()
    return library is not None and library.vllm_set_variant(name.encode()) == 0


def _check_status(status: int) -> None:
    if status == 1:
        raise MemoryError("the kernel found no memory for its workspace")
    if status == 2:
        raise IndexError("token ids must lie in the vocabulary, and row numbers among the rows")
    if status == 3:
        raise ValueError("num_top must be from 0 to max_top")
    assert status == 0, f"unknown status {status}"


def _get_library_for(logits: torch.Tensor) -> ctypes.CDLL | None:
    """Return the library if it serves this tensor, after checking what every op takes for granted."""
    assert logits.dtype == torch.float32 and logits.dim() == 2, f"logits must be float32 rows; got {logits.dtype}"
    assert logits.shape[1] > 0, "logits must have a vocabulary"
    assert logits.stride(1) == 1 or logits.shape[1] == 1, "the vocabulary must be contiguous"
    return _load_library() if logits.device.type == "cpu" else None


def _describe(logits: torch.Tensor) -> tuple[int, int, int, int]:
    return logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1]


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).contiguous()


def _make_entries(num_rows: int, width: int) -> ScoredEntries:
    return ScoredEntries(
        torch.empty(num_rows, width, dtype=torch.int32),
        torch.empty(num_rows, width, dtype=torch.float32),
        torch.empty(num_rows, width, dtype=torch.int32),
        torch.empty(num_rows, dtype=torch.int32),
        torch.empty(num_rows, dtype=torch.bool),
    )


def score_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
    chosen: torch.Tensor,  # [num_rows] int64 or int32
    num_top: torch.Tensor,  # [num_rows] int32; vocab_size or more means all
    max_top: int,
    as_logits: bool,
) -> ScoredEntries:
    """Score each row's chosen token and its `num_top` most likely ones, the chosen one left out of those.

    Values are logit − log-sum-exp, or the logit itself with `as_logits`. The width is 1 + max_top.

    Raises:
        IndexError: a chosen id is outside the vocabulary.
        ValueError: num_top is negative, or larger than max_top.
    """
    library = _get_library_for(logits)
    if library is None:
        return score_rows_reference(logits, chosen, num_top, max_top, as_logits)
    chosen, num_top = _convert(chosen, torch.int64), _convert(num_top, torch.int32)
    assert chosen.shape == num_top.shape == logits.shape[:1], "one chosen token and one num_top a row"
    entries = _make_entries(logits.shape[0], 1 + max_top)
    status = library.vllm_score_rows(
        *_describe(logits),
        chosen.data_ptr(),
        num_top.data_ptr(),
        max_top,
        as_logits,
        torch.get_num_threads(),
        *(field.data_ptr() for field in entries),
    )
    _check_status(status)
    return entries


def score_given_ids(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
    chosen: torch.Tensor,  # [num_rows] int64 or int32
    given: torch.Tensor,  # [num_rows, max_given] int32, padded with −1
    as_logits: bool,
) -> ScoredEntries:
    """Score each row's chosen token and the ids given, in their order, with their true ranks.

    A given id that equals the chosen one, or repeats, is left out. The width is 1 + max_given.

    Raises:
        IndexError: an id is outside the vocabulary.
    """
    library = _get_library_for(logits)
    if library is None:
        return score_given_ids_reference(logits, chosen, given, as_logits)
    chosen, given = _convert(chosen, torch.int64), _convert(given, torch.int32)
    assert chosen.shape == given.shape[:1] == logits.shape[:1], "one chosen token and one list of ids a row"
    entries = _make_entries(logits.shape[0], 1 + given.shape[1])
    status = library.vllm_score_given_ids(
        *_describe(logits),
        chosen.data_ptr(),
        given.data_ptr(),
        given.shape[1],
        as_logits,
        torch.get_num_threads(),
        *(field.data_ptr() for field in entries),
    )
    _check_status(status)
    return entries


def score_full_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
    as_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score every token: values [num_rows, vocab_size] float32, ranks likewise int32, is_finite [num_rows] bool."""
    library = _get_library_for(logits)
    if library is None:
        return score_full_rows_reference(logits, as_logits)
    values = torch.empty(logits.shape, dtype=torch.float32)
    ranks = torch.empty(logits.shape, dtype=torch.int32)
    is_finite = torch.empty(logits.shape[0], dtype=torch.bool)
    status = library.vllm_score_full_rows(
        *_describe(logits),
        as_logits,
        torch.get_num_threads(),
        values.data_ptr(),
        ranks.data_ptr(),
        is_finite.data_ptr(),
    )
    _check_status(status)
    return values, ranks, is_finite


def argmax_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the id of each row's largest logit (lowest on ties; NaN left aside), [num_rows] int32, and is_finite.

    is_finite is False for a row that holds NaN or +inf, or −inf throughout.
    """
    library = _get_library_for(logits)
    if library is None:
        return argmax_rows_reference(logits)
    token_ids = torch.empty(logits.shape[0], dtype=torch.int32)
    is_finite = torch.empty(logits.shape[0], dtype=torch.bool)
    status = library.vllm_argmax_rows(
        *_describe(logits), torch.get_num_threads(), token_ids.data_ptr(), is_finite.data_ptr()
    )
    _check_status(status)
    return token_ids, is_finite


def draw_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free; −inf: the token is removed
    row_of_draw: torch.Tensor,  # [num_draws] int32: several draws may share a row
    seeds: torch.Tensor,  # [num_draws] int64, the bit pattern of a uint64
    positions: torch.Tensor,  # [num_draws] int64, absolute place of the token drawn
) -> torch.Tensor:
    """Draw a token a draw by Gumbel-max, [num_draws] int32: the noise is a pure function of (seed, position, token).

    Lowest id on ties; a NaN is never drawn; 0 when no token is left.

    Raises:
        IndexError: row_of_draw names a row that isn't there.
    """
    library = _get_library_for(logits)
    if library is None:
        return draw_rows_reference(logits, row_of_draw, seeds, positions)
    row_of_draw = _convert(row_of_draw, torch.int32)
    seeds, positions = _convert(seeds, torch.int64), _convert(positions, torch.int64)
    assert row_of_draw.shape == seeds.shape == positions.shape, "one row, seed and position a draw"
    token_ids = torch.empty(row_of_draw.shape[0], dtype=torch.int32)
    status = library.vllm_draw_rows(
        *_describe(logits),
        row_of_draw.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        row_of_draw.shape[0],
        torch.get_num_threads(),
        token_ids.data_ptr(),
    )
    _check_status(status)
    return token_ids


def philox_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the 32 random bits of each token that `draw_rows` draws from: [num_draws, vocab_size] int64."""
    library = _load_library()
    if library is None or seeds.device.type != "cpu":
        return philox_bits_reference(seeds, positions, vocab_size)
    seeds, positions = _convert(seeds, torch.int64), _convert(positions, torch.int64)
    bits = torch.empty(seeds.shape[0], vocab_size, dtype=torch.int64)
    status = library.vllm_philox_bits(
        seeds.data_ptr(), positions.data_ptr(), seeds.shape[0], vocab_size, bits.data_ptr()
    )
    _check_status(status)
    return bits
