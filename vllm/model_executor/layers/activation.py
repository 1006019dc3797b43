"""The gated feed-forward activations, by their names in config.json."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm import _custom_ops as ops


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


def is_silu(activation: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Say whether the kernels have this activation."""
    return activation is F.silu


def gate_and_multiply(
    gate_up: torch.Tensor,  # [num_rows, 2 · size]: gate columns, then up columns
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # [num_rows, size]
    """Return activation(gate) · up."""
    if is_silu(activation):
        return ops.silu_and_multiply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)
