"""Attention backends: each owns a layer's cache, a step's metadata, the write and the attention itself."""

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch

from vllm import host_memory
from vllm.ops import api as ops
from vllm.v1.attention import torch_reference
from vllm.v1.attention.metadata import AttentionMetadata, advance_attention_metadata, make_attention_metadata


class CacheSpec(NamedTuple):
    """What one layer keeps in the KV cache, a key and a value of each position."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None  # positions that are ever read again; None: all


class AttentionShape(NamedTuple):
    """How one layer attends."""

    scale: float
    sliding_window: int | None = None  # position i sees positions j > i − sliding_window only
    soft_cap: float | None = None  # scores become soft_cap · tanh(score / soft_cap)


class AttentionBackend(ABC):
    """One way to attend over a paged cache. A layer's cache is made, written, copied and read through here only."""

    name: str  # as start-up logs it

    def count_block_bytes(self, spec: CacheSpec, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes that one block of one layer takes."""
        return 2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize

    def make_cache(
        self, spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:  # [2, num_blocks, block_size, num_kv_heads, head_dim], keys then values
        """Make a layer's cache, uninitialised: pages are touched when they are first written.

        A slot that was never written may hold anything, NaN included, so it must not be read (0 · NaN is NaN).
        """
        shape = (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        cache = torch.empty(shape, dtype=dtype, device=device)
        if cache.is_cpu:  # decodes read it 6 to 10 % faster
            host_memory.advise_huge_pages(cache.data_ptr(), cache.nbytes)
        return cache

    def copy_blocks(self, kv_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks ([num_copies] int64 each), all sources read before any target is written."""
        kv_cache[:, targets] = kv_cache[:, sources]

    def make_metadata(
        self,
        query_lens: np.ndarray,  # [num_reqs] int, each from 1
        seq_lens: np.ndarray,  # [num_reqs] int, each from query_len
        block_tables: np.ndarray,  # [num_reqs, max_blocks] int32
        block_size: int,
        device: torch.device | str,
    ) -> AttentionMetadata:
        """Make a step's metadata from the host's arrays."""
        return make_attention_metadata(query_lens, seq_lens, block_tables, block_size, device)

    def advance_metadata(self, attn: AttentionMetadata, device: torch.device | str) -> AttentionMetadata:
        """Return the metadata of the step in which each request of `attn` runs the one position that follows.

        All requests ran one position, and none comes to another block.
        """
        return advance_attention_metadata(attn, device)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,  # [num_tokens, num_heads + 2 · num_kv_heads, head_dim]
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
        attn: AttentionMetadata,
        query_norm: torch.Tensor | None,  # [head_dim]
        key_norm: torch.Tensor | None,  # [head_dim]
        eps: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Norm and rotate a step's query and key heads, write keys and values to their slots, return the query."""
        return ops.rotate_and_write_kv(qkv, cos, sin, kv_cache, attn.slot_mapping, query_norm, key_norm, eps)

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,  # holds the step's keys and values already
        attn: AttentionMetadata,
        shape: AttentionShape,
        sinks: torch.Tensor | None = None,  # [num_heads] float32: logits without a value in each softmax
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Attend causally, over each request's own blocks."""


class TorchReferenceBackend(AttentionBackend):
    """Plain torch on any device."""

    name = "torch_reference"

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn: AttentionMetadata,
        shape: AttentionShape,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch_reference.attend(
            query, kv_cache, attn, shape.scale, shape.sliding_window, soft_cap=shape.soft_cap, sinks=sinks
        )


class CpuBackend(TorchReferenceBackend):
    """The compiled kernels; what they have no form for goes the reference's way."""

    name = "cpu_kernels"

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn: AttentionMetadata,
        shape: AttentionShape,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        is_plain = shape.soft_cap is None and sinks is None
        if not is_plain or kv_cache.dtype not in ops.CACHE_KINDS or query.dtype != torch.float32:
            return super().attend(query, kv_cache, attn, shape, sinks)
        return ops.paged_attention(
            query, kv_cache, attn.block_tables, attn.query_starts, attn.seq_lens, shape.scale, shape.sliding_window
        )


# A device type → the backends that serve it, the best one first.
BACKENDS: dict[str, list[type[AttentionBackend]]] = {"cpu": [CpuBackend]}


def get_attention_backend(device: torch.device | str) -> AttentionBackend:
    """Return the fastest backend for `device`: the compiled kernels on a CPU, else the torch reference."""
    return _get_backend(torch.device(device).type, ops.is_compiled())


@functools.cache
def _get_backend(device_type: str, is_compiled: bool) -> AttentionBackend:
    if device_type == "cpu" and not is_compiled:
        return TorchReferenceBackend()
    return BACKENDS.get(device_type, [TorchReferenceBackend])[0]()
