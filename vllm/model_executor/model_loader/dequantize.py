"""GGUF blocks as float32 tensors.

The common types are a few numpy operations each, over pieces that stay in the cache: a fifth of the time of the gguf
package, and half of that of torch's operations, whose threads spin against whatever else runs. The K-quants and the
rest are left to that package, imported only when a file has them.
"""

from collections.abc import Callable

import numpy as np
import torch

from vllm.checkpoints.gguf_file import BLOCK_SIZES, GgmlType, GgufTensor

_BLOCKS_AT_ONCE = 4096  # 0.5 MB of elements
# Elements that the gguf package converts at a time: its temporaries are several times as large.
_MAX_ELEMENTS_AT_ONCE = 1 << 24


class UnservedTypeError(ValueError):
    """Blocks of this type can't be dequantized."""


def dequantize(
    tensor: GgufTensor,
    data: np.ndarray,  # [nbytes] uint8
    memory: np.ndarray | None = None,  # [at least the tensor's elements] float32
) -> torch.Tensor:  # tensor.shape
    """Return the tensor's elements: float32, or bfloat16 and float16 as they are stored.

    They lie in `memory` where the type allows it and memory is given (fresh pages cost as much as the arithmetic).

    Raises:
        UnservedTypeError: a type that holds no weights or that nobody here can read.
    """
    if tensor.type in _PLAIN:
        return torch.from_numpy(data).view(_PLAIN[tensor.type]).view(tensor.shape)
    with np.errstate(all="ignore"):  # a scale that is NaN or infinite is what the checkpoint says
        return (
            _dequantize_here(tensor, data, memory) if tensor.type in _FILLERS else _dequantize_elsewhere(tensor, data)
        )


def _read_scales(blocks: np.ndarray, count: int) -> np.ndarray:  # [num_blocks, block_bytes] uint8 → [num_blocks, count]
    """Return the float16 scales that a block begins with, as float32."""
    return np.ascontiguousarray(blocks[:, : 2 * count]).view("<f2").astype(np.float32)


def split_q8_0(tensor: GgufTensor, data: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a Q8_0 tensor as it is stored: int8 elements, and the float32 scales of each 32 of a row."""
    block, block_bytes = BLOCK_SIZES[GgmlType.Q8_0]
    blocks = data.reshape(-1, block_bytes)
    num_rows, size = tensor.shape
    elements = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).reshape(num_rows, size)
    return torch.from_numpy(elements), torch.from_numpy(_read_scales(blocks, 1).reshape(num_rows, size // block))


def _fill_from_q8_0(blocks: np.ndarray, elements: np.ndarray) -> None:
    """Scale, 32 signed bytes."""
    np.multiply(blocks[:, 2:].view(np.int8), _read_scales(blocks, 1), out=elements)


def _fill_from_q4_0(blocks: np.ndarray, elements: np.ndarray) -> None:
    """Scale, 16 bytes: the low halves are elements 0–15, the high halves 16–31, each less 8."""
    _split_halves(blocks[:, 2:], elements)
    elements -= 8
    elements *= _read_scales(blocks, 1)


def _fill_from_q4_1(blocks: np.ndarray, elements: np.ndarray) -> None:
    """Scale, minimum, 16 bytes of halves as in Q4_0."""
    scales = _read_scales(blocks, 2)
    _split_halves(blocks[:, 4:], elements)
    elements *= scales[:, :1]
    elements += scales[:, 1:]


def _split_halves(halves: np.ndarray, elements: np.ndarray) -> None:  # [num_blocks, 16] uint8, [num_blocks, 32]
    elements[:, :16] = halves & 15
    elements[:, 16:] = halves >> 4


def _dequantize_here(tensor: GgufTensor, data: np.ndarray, memory: np.ndarray | None) -> torch.Tensor:
    block, block_bytes = BLOCK_SIZES[tensor.type]
    fill = _FILLERS[tensor.type]
    blocks = data.reshape(-1, block_bytes)
    memory = np.empty(len(blocks) * block, np.float32) if memory is None else memory
    elements = memory[: len(blocks) * block].reshape(-1, block)
    for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
        piece = slice(first, first + _BLOCKS_AT_ONCE)
        fill(blocks[piece], elements[piece])
    return torch.from_numpy(elements).view(tensor.shape)


_PLAIN = {
    GgmlType.F32: torch.float32,
    GgmlType.F16: torch.float16,
    GgmlType.BF16: torch.bfloat16,
    GgmlType.F64: torch.float64,
}
_FILLERS: dict[GgmlType, Callable[[np.ndarray, np.ndarray], None]] = {
    GgmlType.Q8_0: _fill_from_q8_0,
    GgmlType.Q4_0: _fill_from_q4_0,
    GgmlType.Q4_1: _fill_from_q4_1,
}


def _dequantize_elsewhere(tensor: GgufTensor, data: np.ndarray) -> torch.Tensor:
    import gguf  # 0.1 s, and only some files need it
    import gguf.quants

    block, block_bytes = BLOCK_SIZES[tensor.type]
    elements = np.empty(data.size // block_bytes * block, np.float32)
    blocks_at_once = max(1, _MAX_ELEMENTS_AT_ONCE // block)
    try:
        kind = gguf.GGMLQuantizationType(int(tensor.type))
        for first in range(0, data.size // block_bytes, blocks_at_once):
            part = data[first * block_bytes : (first + blocks_at_once) * block_bytes].reshape(-1, block_bytes)
            elements[first * block : (first + len(part)) * block] = gguf.quants.dequantize(part, kind).reshape(-1)
    except (NotImplementedError, ValueError) as error:
        raise UnservedTypeError(
            f"tensor {tensor.name!r}: type {tensor.type.name} can't be turned into numbers"
        ) from error
    return torch.from_numpy(elements).view(tensor.shape)
