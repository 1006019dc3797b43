"""Loads the compiled CPU library (csrc/): a plain C interface, through ctypes.

torch is imported before the library is loaded: both then share torch's OpenMP runtime, while two runtimes in one
process would spin against each other.
"""

import ctypes
import functools
import logging
import pathlib

import torch  # before the library, see above

from vllm.logger import init_logger, log_once

logger = init_logger(__name__)

_LIBRARY_PATH = pathlib.Path(__file__).parents[1] / "_C_cpu.so"
_ABI_VERSION = 10
_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
# What a KV cache may hold → the library's code for it.
CACHE_KINDS = {torch.float32: 0, torch.bfloat16: 1}
# An activation's name in config.json → the library's code for it.
ACTIVATION_CODES = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
_MATRIX = [_POINTER, _SIZE, _SIZE, _SIZE]  # data, row stride, rows, columns
_SIGNATURES = {
    "vllm_score_rows": [*_MATRIX, _POINTER, _POINTER, _INT, _INT, _INT, *[_POINTER] * 5],
    "vllm_score_given_ids": [*_MATRIX, _POINTER, _POINTER, _INT, _INT, _INT, *[_POINTER] * 5],
    "vllm_score_full_rows": [*_MATRIX, _INT, _INT, *[_POINTER] * 3],
    "vllm_argmax_rows": [*_MATRIX, _INT, *[_POINTER] * 2],
    "vllm_draw_rows": [*_MATRIX, *[_POINTER] * 3, _SIZE, _INT, _POINTER],
    "vllm_filter_rows": [*_MATRIX, *[_POINTER] * 5, _SIZE, _INT],
    "vllm_philox_bits": [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER],
    "vllm_set_variant": [ctypes.c_char_p],
    "vllm_paged_attention": [
        *[_POINTER, _SIZE, _SIZE],  # query
        *[_POINTER, _INT, _SIZE, _SIZE, _SIZE, _SIZE],  # cache
        *[_POINTER, _SIZE, _POINTER, _POINTER, _SIZE],  # requests
        *[_FLOAT, _SIZE, _INT, _POINTER],
    ],
    "vllm_write_kv": [*[_POINTER, _SIZE] * 2, _SIZE, _SIZE, _POINTER, _POINTER, _INT, _SIZE, _INT],
    "vllm_rotate_and_write_kv": [
        *[_POINTER, *[_SIZE] * 5],
        *[_POINTER, _POINTER, _SIZE, _POINTER, _POINTER],  # rotation, norms
        *[_FLOAT, _POINTER, _POINTER, _INT, _SIZE, _INT, _POINTER],
    ],
    "vllm_rotate": [_POINTER, *[_SIZE] * 4, _POINTER, _POINTER, _SIZE, _INT, _POINTER],
    "vllm_rms_norm": [*[_POINTER, _SIZE] * 2, _SIZE, _SIZE, _POINTER, _FLOAT, _INT, _POINTER],
    "vllm_linear": [
        *[_POINTER, _SIZE, _SIZE, _SIZE],  # x
        *[_POINTER, _SIZE, _SIZE, _INT, _POINTER, _POINTER],  # weight, kind, scale, bias
        *[_INT, _POINTER, _SIZE],
    ],
    "vllm_activate": [_POINTER, _SIZE, _SIZE, _SIZE, _INT, _INT, _INT, _POINTER],
    "vllm_run_program": [_POINTER, _POINTER, _POINTER, _INT, _POINTER],
    "vllm_count_program_scratch": [_POINTER, _SIZE],
}


@functools.cache
def load_library() -> ctypes.CDLL | None:
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
            library.vllm_count_program_scratch.restype = _SIZE
            return library
        reason = f"is of version {found}, not {_ABI_VERSION}; reinstall"
    log_once(logger.name, logging.WARNING, f"The compiled CPU kernels {reason}: running in plain torch, slower.")
    return None


def is_compiled() -> bool:
    """Say whether CPU tensors go to the compiled library; says once in the log when it is missing."""
    return load_library() is not None


def get_simd_variant() -> str:
    """Return the instruction set that the kernels use: avx512, avx2 or portable; none without the library."""
    library = load_library()
    return library.vllm_get_variant().decode() if library else "none"


def set_simd_variant(name: str) -> bool:
    """Choose the instruction set (also "auto"), for tests; False where it isn't compiled in or the CPU lacks it."""
    library = load_library()
    return library is not None and library.vllm_set_variant(name.encode()) == 0


def check_status(status: int) -> None:
    if status == 1:
        raise MemoryError("the kernel found no memory for its workspace")
    if status == 2:
        raise IndexError("a token id, row number, block or slot lies outside its table")
    if status == 3:
        raise ValueError("num_top must be from 0 to max_top")
    assert status == 0, f"unknown status {status}"
