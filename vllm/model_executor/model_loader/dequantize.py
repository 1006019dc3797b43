"""GGUF blocks as float32 numbers.

The common types are a few torch operations each (0.3 s for 135M numbers in Q4_1, against 2.6 s by the gguf package's
numpy); the K-quants and the rest are left to that package, imported only when a file has them.
"""

from collections.abc import Callable

import numpy as np
import torch

from vllm.checkpoints.gguf_file import BLOCK_SIZES, GgmlType, GgufTensor
from vllm.exceptions import ModelLoadError

# Numbers that the gguf package turns at a time: its temporaries are several times as large.
_MAX_NUMBERS_AT_ONCE = 1 << 24


def dequantize(tensor: GgufTensor, data: np.ndarray) -> torch.Tensor:  # [nbytes] uint8 → tensor.shape
    """Return the tensor's numbers: float32, or bfloat16 and float16 as they are stored.

    Raises:
        ModelLoadError: a type that holds no weights or that nobody here can read.
    """
    raw = torch.from_numpy(data)
    if tensor.type in _PLAIN:
        return raw.view(_PLAIN[tensor.type]).view(tensor.shape)
    if tensor.type in _BLOCKS:
        block_bytes = BLOCK_SIZES[tensor.type][1]
        return _BLOCKS[tensor.type](raw.view(-1, block_bytes)).view(tensor.shape)
    return _dequantize_elsewhere(tensor, data)


def _scale(blocks: torch.Tensor, first_byte: int) -> torch.Tensor:  # [num_blocks, block_bytes] uint8 → [num_blocks, 1]
    return blocks[:, first_byte : first_byte + 2].view(torch.float16).float()


def _from_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale f16, 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8) * _scale(blocks, 0)


def _from_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale f16, 16 bytes: the low halves are numbers 0–15, the high halves 16–31, each less 8."""
    scale = _scale(blocks, 0)
    return _from_halves(blocks[:, 2:], scale, -8.0 * scale)


def _from_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale f16, minimum f16, 16 bytes of halves as in Q4_0."""
    return _from_halves(blocks[:, 4:], _scale(blocks, 0), _scale(blocks, 2))


def _from_halves(halves: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    numbers = torch.empty(halves.shape[0], 32, dtype=torch.float32)
    numbers[:, :16] = halves & 15
    numbers[:, 16:] = halves >> 4
    return torch.addcmul(minimum, numbers, scale, out=numbers)


_PLAIN = {
    GgmlType.F32: torch.float32,
    GgmlType.F16: torch.float16,
    GgmlType.BF16: torch.bfloat16,
    GgmlType.F64: torch.float64,
}
_BLOCKS: dict[GgmlType, Callable[[torch.Tensor], torch.Tensor]] = {
    GgmlType.Q8_0: _from_q8_0,
    GgmlType.Q4_0: _from_q4_0,
    GgmlType.Q4_1: _from_q4_1,
}


def _dequantize_elsewhere(tensor: GgufTensor, data: np.ndarray) -> torch.Tensor:
    import gguf  # 0.1 s, and only some files need it
    import gguf.quants

    block, block_bytes = BLOCK_SIZES[tensor.type]
    numbers = np.empty(data.size // block_bytes * block, np.float32)
    blocks_at_once = max(1, _MAX_NUMBERS_AT_ONCE // block)
    try:
        kind = gguf.GGMLQuantizationType(int(tensor.type))
        for first in range(0, data.size // block_bytes, blocks_at_once):
            part = data[first * block_bytes : (first + blocks_at_once) * block_bytes].reshape(-1, block_bytes)
            numbers[first * block : (first + len(part)) * block] = gguf.quants.dequantize(part, kind).reshape(-1)
    except (NotImplementedError, ValueError) as error:
        raise ModelLoadError(f"tensor {tensor.name!r}: type {tensor.type.name} can't be turned into numbers") from error
    return torch.from_numpy(numbers).view(tensor.shape)
