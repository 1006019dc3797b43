"""Batch-invariant mode: what a model must be, and do, for values that repeat bit for bit.

Each kernel of the compiled library sums a row in one fixed order, whatever runs beside it and on however many threads.
So the mode changes no arithmetic: it refuses what would leave those kernels, and looks at start-up whether the products
with weights, which have kernels for few rows and for many, agree on this machine.
"""

import torch

from vllm.exceptions import VLLMUnsupportedError
from vllm.model_executor.layers.embedding import Embedding
from vllm.model_executor.layers.linear import WeightMatrix
from vllm.model_executor.models.interface import CausalLM
from vllm.ops import api as ops

# Rows of one product that must agree: every kernel for few rows, the largest of those, panels whole and in part, many.
_ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 33, 48, 49, 64, 150, 192, 260)
_MAX_COLUMNS = 6 * ops.INTERLEAVED_ROWS  # of each product that is tried, so that a look takes milliseconds


def check_batch_invariant(model: CausalLM, device: torch.device) -> None:
    """Look whether `model` gives values that depend on nothing but their own sequence.

    Raises:
        VLLMUnsupportedError: it does not, and why.
    """
    if device.type != "cpu":
        _refuse(f"it needs the CPU; the device is {device} (device='cpu')")
    if not ops.is_compiled():
        _refuse("it needs the compiled kernels, which are not here (reinstall where there is a C++ compiler)")
    if model.dtype != torch.float32:
        _refuse(f"it computes in float32; the model computes in {model.dtype} (dtype='float32' or 'bfloat16')")
    for name, matrix in _choose_matrices(model).items():
        if (num_rows := find_dependence_on_rows(matrix)) is not None:
            kind, variant = matrix.weight.dtype, ops.get_simd_variant()
            _refuse(
                f"products with {name} ({kind}) differ between {num_rows} and {max(_ROW_COUNTS)} rows on this machine "
                f"({variant} kernels)"
            )


def find_dependence_on_rows(matrix: WeightMatrix) -> int | None:
    """Return the first number of rows whose product with `matrix` has other bits than the same rows among many."""
    weight, scale = matrix.weight[:_MAX_COLUMNS], None
    if matrix.weight_scale is not None:
        weight = matrix.weight[: _MAX_COLUMNS // ops.INTERLEAVED_ROWS]
        scale = matrix.weight_scale[..., :_MAX_COLUMNS].contiguous()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_ROW_COUNTS), matrix.shape[1], generator=generator)
    wanted = ops.linear(x, weight, None, scale).view(torch.int32)
    for num_rows in _ROW_COUNTS:
        # The last rows, which lie elsewhere in their block than among many.
        got = ops.linear(x[-num_rows:], weight, None, scale).view(torch.int32)
        if not torch.equal(got, wanted[-num_rows:]):
            return num_rows
    return None


def _choose_matrices(model: CausalLM) -> dict[str, WeightMatrix]:
    """Return one matrix of each shape and form, by name; the head's is the embedding's where they are tied."""
    by_shape: dict[tuple[object, ...], tuple[str, WeightMatrix]] = {}
    for name, module in model.named_modules():
        if isinstance(module, WeightMatrix) and (module is model.head or not isinstance(module, Embedding)):
            by_shape.setdefault((*module.shape, module.has_group_scales), (name, module))
    return dict(by_shape.values())


def _refuse(reason: str) -> None:
    raise VLLMUnsupportedError(
        f"batch_invariant is not supported here: {reason}", parameter="batch_invariant", value=True
    )
