"""The layer kernels in plain torch: what runs without the compiled library or off the CPU, and their tests' oracle.

Every function here has the contract of its namesake in `vllm._custom_ops`; all compute in float32 and round once.
"""

import torch
import torch.nn.functional as F


def paged_attention_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend over the paged cache, a request at a time; see `vllm._custom_ops.paged_attention`."""
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


def write_kv_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Copy keys and values to their slots; see `vllm._custom_ops.write_kv`."""
    slots = kv_cache.flatten(1, 2)
    if slot_mapping.device.type == "cpu" and ((slot_mapping < 0) | (slot_mapping >= slots.shape[1])).any():
        raise IndexError(f"slots must lie in a cache of {slots.shape[1]}")
    slots[0].index_copy_(0, slot_mapping, key.to(kv_cache.dtype))
    slots[1].index_copy_(0, slot_mapping, value.to(kv_cache.dtype))


def rotate_and_write_kv_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Norm, turn and store a layer's heads; see `vllm._custom_ops.rotate_and_write_kv`."""
    num_kv_heads = kv_cache.shape[3]
    query, key, value = qkv.split((qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    if query_norm is not None:
        query = rms_norm_reference(query, query_norm, eps)
    if key_norm is not None:
        key = rms_norm_reference(key, key_norm, eps)
    write_kv_reference(rotate_reference(key, cos, sin), value, kv_cache, slot_mapping)
    return rotate_reference(query, cos, sin)


def rotate_reference(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head by its token's rotation; see `vllm._custom_ops.rotate`."""
    num_tokens, _, head_dim = heads.shape
    wide = heads.float()
    swapped = wide.roll(head_dim // 2, -1)
    cos, sin = cos.view(num_tokens, 1, head_dim), sin.view(num_tokens, 1, head_dim)
    return (wide * cos + swapped * sin).to(heads.dtype)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise rows, after adding them to a residual; see `vllm._custom_ops.rms_norm`."""
    if residual is not None:
        residual += x.view_as(residual)
        x = residual.view_as(x)
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight).to(x.dtype)


def silu_and_multiply_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate rows; see `vllm._custom_ops.silu_and_multiply`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
