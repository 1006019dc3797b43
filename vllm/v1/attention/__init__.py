"""Attention over the paged KV cache."""

from vllm.v1.attention.backend import Attend, AttentionBackend, get_attention_backend
from vllm.v1.attention.kv_cache import kv_bytes_per_block, make_kv_caches
from vllm.v1.attention.metadata import (
    AttentionMetadata,
    HostMetadata,
    compute_positions,
    make_attention_metadata,
)

__all__ = [
    "Attend",
    "AttentionBackend",
    "AttentionMetadata",
    "HostMetadata",
    "compute_positions",
    "get_attention_backend",
    "kv_bytes_per_block",
    "make_attention_metadata",
    "make_kv_caches",
]
