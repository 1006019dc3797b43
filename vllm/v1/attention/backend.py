"""Which attention serves a device."""

from typing import NamedTuple, Protocol

import torch

from vllm import _custom_ops as ops
from vllm._ops_library import KV_KINDS
from vllm.v1.attention import torch_reference
from vllm.v1.attention.metadata import AttentionMetadata


class Attend(Protocol):
    """Attends over the cache, which holds the step's keys and values already; see torch_reference.attend."""

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        attn: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        ...


class AttentionBackend(NamedTuple):
    """A backend under the name that start-up logs."""

    name: str
    attend: Attend


def get_attention_backend(device: torch.device | str) -> AttentionBackend:
    """Return the fastest backend for `device`: the compiled kernels on a CPU, else the torch reference."""
    if torch.device(device).type == "cpu" and ops.is_compiled():
        return AttentionBackend("cpu_kernels", _attend_on_cpu)
    return AttentionBackend("torch_reference", torch_reference.attend)


def _attend_on_cpu(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    attn: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    if kv_cache.dtype not in KV_KINDS or query.dtype != torch.float32:
        return torch_reference.attend(query, kv_cache, attn, scale, sliding_window)
    return ops.paged_attention(
        query, kv_cache, attn.block_tables, attn.query_starts, attn.seq_lens, scale, sliding_window
    )
