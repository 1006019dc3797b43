"""Which attention serves a device."""

from typing import NamedTuple, Protocol

import torch

from vllm.v1.attention import torch_reference
from vllm.v1.attention.metadata import AttentionMetadata


class PagedAttention(Protocol):
    """Writes the step's keys and values, then attends; see torch_reference.paged_attention for the contract."""

    def __call__(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
        attn: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        ...


class AttentionBackend(NamedTuple):
    """A backend under the name that start-up logs."""

    name: str
    paged_attention: PagedAttention


def get_attention_backend(device: torch.device | str) -> AttentionBackend:
    """Return the fastest backend for `device`: so far the torch reference, on every device."""
    del device
    return AttentionBackend("torch_reference", torch_reference.paged_attention)
