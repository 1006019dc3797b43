"""Which dtypes a model is stored and computed in."""

from typing import NamedTuple

import torch

from vllm import platforms
from vllm.exceptions import ModelLoadError


class ModelDtypes(NamedTuple):
    """weights: of matrices and the embedding (int8: with a scale a row); compute: of everything else, KV cache too."""

    weights: torch.dtype
    compute: torch.dtype


def choose_dtypes(
    dtype: torch.dtype, quantization: str | None, device: str, *, batch_invariant: bool = False
) -> ModelDtypes:
    """Return the dtypes of a model whose resolved dtype is `dtype`, on `device` ("cpu", "cuda", …).

    A CPU without bfloat16 units keeps such weights narrow, which halves what a step reads, and computes in float32; so
    does any CPU in batch-invariant mode, since the units' products are not ours.

    Raises:
        ModelLoadError: int8 weights off the CPU.
    """
    if quantization == "int8":
        if device != "cpu":
            raise ModelLoadError(f"quantization='int8' is served on the CPU only; the device is {device}")
        return ModelDtypes(torch.int8, torch.float32)
    is_narrow = device == "cpu" and dtype == torch.bfloat16
    if is_narrow and (batch_invariant or not platforms.has_fast_dtype("bfloat16", device)):
        return ModelDtypes(torch.bfloat16, torch.float32)
    return ModelDtypes(dtype, dtype)
