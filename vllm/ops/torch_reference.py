"""Every op in plain torch: what serves a device without kernels of its own, and the oracle of the kernels' tests.

All layers compute in float32 and round once.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm.ops.stored_weights import has_group_scales, take_int8_rows, widen_rows
from vllm.ops.torch_sampling import TorchSampling

# Elements of narrow weights that are widened to float32 at a time: 128 MiB.
_MAX_WIDENED_ELEMENTS = 1 << 25


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


class TorchReference(TorchSampling):
    """The contract of each method is that of its namesake in `vllm.ops.api`."""

    def embed(
        self, token_ids: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if scale is None:
            return F.embedding(token_ids, weight).to(dtype)
        return widen_rows(take_int8_rows(weight, token_ids), scale[..., token_ids])

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if scale is None and x.dtype == weight.dtype:
            product = F.linear(x, weight, bias)
            return product if out is None else out.copy_(product)
        has_groups = has_group_scales(scale)
        rows = weight if scale is None else take_int8_rows(weight, torch.arange(scale.shape[-1]))
        product = x.float() @ (widen_rows(rows, scale) if has_groups else rows.float()).t()
        if scale is not None and not has_groups:
            product *= scale
        if bias is not None:
            product += bias
        return product if out is None else out.copy_(product)

    def linear_to_float32(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x.float()
        if scale is not None:
            return self.linear(x, weight, None, scale, out)
        if weight.dtype == torch.float32:
            return torch.mm(x, weight.t(), out=out)
        if out is None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
        num_rows = max(1, _MAX_WIDENED_ELEMENTS // weight.shape[1])
        for first in range(0, weight.shape[0], num_rows):
            part = weight[first : first + num_rows].float()
            out[:, first : first + part.shape[0]] = torch.mm(x, part.t())
        return out

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Attend over the paged cache, a request at a time."""
        num_blocks, block_size, num_kv_heads = kv_cache.shape[1:4]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts = query_starts.tolist()
        for request, seq_len in enumerate(seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            positions = torch.arange(seq_len - (rows.stop - rows.start), seq_len, device=query.device)
            if len(positions) == 0:
                continue
            lowest = 0 if sliding_window is None else max(0, int(positions[0]) - sliding_window + 1)
            keys_at = torch.arange(lowest, seq_len, device=query.device)
            blocks = block_tables[request].long()[keys_at // block_size]
            if ((blocks < 0) | (blocks >= num_blocks)).any():
                raise IndexError(f"request {request} needs a block outside the cache of {num_blocks}")
            key, value = kv_cache[:, blocks, keys_at % block_size].float()  # [num_keys, num_kv_heads, head_dim] each
            hidden = keys_at[None, :] > positions[:, None]
            if sliding_window is not None:
                hidden |= keys_at[None, :] <= positions[:, None] - sliding_window
            grouped = query[rows].float().unflatten(1, (num_kv_heads, -1))
            scores = torch.einsum("tkgd,skd->tkgs", grouped, key).mul_(scale)
            weights = scores.masked_fill_(hidden[:, None, None], -torch.inf).softmax(-1)
            output[rows] = torch.einsum("tkgs,skd->tkgd", weights, value).flatten(1, 2).to(query.dtype)
        return output

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Copy keys and values to their slots."""
        slots = kv_cache.flatten(1, 2)
        if slot_mapping.device.type == "cpu" and ((slot_mapping < 0) | (slot_mapping >= slots.shape[1])).any():
            raise IndexError(f"slots must lie in a cache of {slots.shape[1]}")
        slots[0].index_copy_(0, slot_mapping, key.to(kv_cache.dtype))
        slots[1].index_copy_(0, slot_mapping, value.to(kv_cache.dtype))

    def rotate_and_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Norm, rotate and store a layer's heads."""
        num_kv_heads = kv_cache.shape[3]
        query, key, value = qkv.split((qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        if query_norm is not None:
            query = self.rms_norm(query, query_norm, eps)
        if key_norm is not None:
            key = self.rms_norm(key, key_norm, eps)
        self.write_kv(self.rotate(key, cos, sin), value, kv_cache, slot_mapping)
        return self.rotate(query, cos, sin)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate every head by its token's angles."""
        rotary_dim = cos.shape[-1]
        cos, sin = cos.view(-1, 1, rotary_dim), sin.view(-1, 1, rotary_dim)
        wide, kept = heads[..., :rotary_dim].float(), heads[..., rotary_dim:]
        rotated = (wide * cos + wide.roll(rotary_dim // 2, -1) * sin).to(heads.dtype)
        return torch.cat((rotated, kept), -1) if kept.shape[-1] > 0 else rotated

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalise rows, after adding them to a residual."""
        if residual is not None:
            residual += x.view_as(residual)
            x = residual.view_as(x)
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * inverse * weight).to(x.dtype)

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return ACTIVATIONS[activation](x)

    def gate_and_multiply(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)
