"""Token embedding and language-model head; tied models hold one matrix for both."""

import torch
import torch.nn.functional as F

from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import WeightMatrix

# torch before 2.8 rounds such a product to the weights' type.
_HAS_WIDE_RESULTS = "dtype_out" in torch.ops.aten.mm.overloads()
# Rows of a narrow head that are widened to float32 at a time off the CPU: 8,192 · 4,096 numbers are 128 MiB.
_MAX_WIDENED_NUMBERS = 1 << 25


class Embedding(WeightMatrix):
    """Token id → row of the matrix."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:  # [num_tokens] int64 → [num_tokens, hidden_size]
        scale = self.weight_scale
        if scale is None:
            return F.embedding(token_ids, self.weight).to(self.compute_dtype)
        return ops.widen_rows(ops.take_int8_rows(self.weight, token_ids), scale[..., token_ids])


def compute_float32_product(
    hidden: torch.Tensor,  # [num_rows, hidden_size]
    head: WeightMatrix,  # [vocab_size, hidden_size]
    out: torch.Tensor | None = None,  # [num_rows, vocab_size] float32
) -> torch.Tensor:  # [num_rows, vocab_size] float32
    """Return hidden · weightᵀ with float32 results: logits are never rounded to the weights' narrower type."""
    weight = head.weight
    if weight.is_cpu and weight.dtype != torch.float16:
        return ops.linear(hidden.float(), weight, None, head.weight_scale, out)
    if weight.dtype == torch.float32:
        return torch.mm(hidden.float(), weight.t()) if out is None else torch.mm(hidden.float(), weight.t(), out=out)
    if out is None:
        out = torch.empty(hidden.shape[0], weight.shape[0], dtype=torch.float32, device=hidden.device)
    if weight.device.type == "cuda" and _HAS_WIDE_RESULTS:
        return torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=torch.float32, out=out)
    hidden = hidden.float()
    num_rows = max(1, _MAX_WIDENED_NUMBERS // weight.shape[1])
    for first in range(0, weight.shape[0], num_rows):
        part = weight[first : first + num_rows].float()
        out[:, first : first + part.shape[0]] = torch.mm(hidden, part.t())
    return out
