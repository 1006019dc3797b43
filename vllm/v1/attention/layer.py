"""What a layer does between its qkv product and its output product, in terms of a backend."""

import torch

from vllm.model_executor.layers.module import Module
from vllm.model_executor.layers.rotary import Rotation
from vllm.v1.attention.backend import AttentionBackend, AttentionShape, CacheSpec
from vllm.v1.attention.metadata import AttentionMetadata


class Attention(Module):
    """Grouped-query attention over the layer's paged cache, which only the backend knows the layout of."""

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,  # None: head_dim^(−1/2)
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.shape = AttentionShape(head_dim**-0.5 if scale is None else scale, sliding_window, soft_cap)

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec(self.num_kv_heads, self.head_dim, self.shape.sliding_window)

    def forward(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 · num_kv_heads) · head_dim]
        rotation: Rotation,
        kv_cache: torch.Tensor,  # as backend.make_cache made it
        attn: AttentionMetadata,
        query_norm: torch.Tensor | None = None,  # [head_dim]: weight of the norm of each query head
        key_norm: torch.Tensor | None = None,  # [head_dim]
        norm_eps: float = 0.0,
        sinks: torch.Tensor | None = None,  # [num_heads] float32
    ) -> torch.Tensor:  # [num_tokens, num_heads · head_dim]
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        query = self.backend.rotate_and_write(
            heads, rotation.cos, rotation.sin, kv_cache, attn, query_norm, key_norm, norm_eps
        )
        return self.backend.attend(query, kv_cache, attn, self.shape, sinks).flatten(1)
