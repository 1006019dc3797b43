"""Attention over the paged KV cache."""

from vllm.v1.attention.backend import AttentionBackend, AttentionShape, CacheSpec, get_attention_backend
from vllm.v1.attention.layer import Attention
from vllm.v1.attention.metadata import AttentionMetadata, HostMetadata, make_attention_metadata

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionShape",
    "CacheSpec",
    "HostMetadata",
    "get_attention_backend",
    "make_attention_metadata",
]
