"""The entry point to the kernels: tensors in, tensors out, by the table of the first tensor's device.

A table is an object with a method for each op. A CPU's is the compiled library's (cpu.py, csrc/) or, where that is
missing, plain torch (torch_reference.py); a device without a table of its own has the reference, too.

Under an op's name stand its oracle in torch_reference.py, its tests in tests/kernels and its timing in
benchmarks/bench_kernels.py (tests/house/test_ops.py).

Order of tokens, everywhere: by (logit falling, id rising), on the float32 logits given. rank = 1 + the tokens before.
"""

from typing import Any

import torch

from vllm.ops.cpu import CpuOps
from vllm.ops.cuda import CudaOps
from vllm.ops.library import CACHE_KINDS, get_simd_variant, is_compiled, load_library, set_simd_variant
from vllm.ops.stored_weights import (
    GROUP_SIZE,
    INTERLEAVED_ROWS,
    get_scale_shape,
    get_stored_shape,
    has_group_scales,
    store_int8,
    write_int8_rows,
)
from vllm.ops.torch_reference import TorchReference
from vllm.ops.torch_sampling import ScoredEntries

OPS = (
    "score_rows",
    "score_given_ids",
    "score_full_rows",
    "argmax_rows",
    "draw_rows",
    "philox_bits",
    "filter_rows",
    "embed",
    "linear",
    "linear_to_float32",
    "rms_norm",
    "rotate",
    "write_kv",
    "rotate_and_write_kv",
    "paged_attention",
    "activate",
    "gate_and_multiply",
)
__all__ = [
    "CACHE_KINDS",
    "GROUP_SIZE",
    "INTERLEAVED_ROWS",
    "OPS",
    "ScoredEntries",
    "get_scale_shape",
    "get_simd_variant",
    "get_stored_shape",
    "has_group_scales",
    "is_compiled",
    "register_table",
    "set_simd_variant",
    "store_int8",
    "write_int8_rows",
    *OPS,
]


_REGISTERED: dict[str, TorchReference] = {"cuda": CudaOps()}  # device type → its ops


class _Tables(dict[torch.device, TorchReference]):
    """Device → its ops, chosen when its first tensor comes (asking a device for its type costs as much as an op)."""

    def __missing__(self, device: torch.device) -> TorchReference:
        library = load_library() if device.type == "cpu" else None
        table = CpuOps(library) if library is not None else _REGISTERED.get(device.type, TorchReference())
        self[device] = table
        return table


_TABLES = _Tables()


def register_table(device_type: str, table: Any) -> None:
    """Let `table`, with methods named as those of `TorchReference`, serve what has such a `device` (hashable)."""
    _REGISTERED[device_type] = table
    _TABLES.clear()


def _check_rows(logits: torch.Tensor) -> None:
    assert logits.dtype == torch.float32 and logits.dim() == 2, f"logits must be float32 rows; got {logits.dtype}"
    assert logits.shape[1] > 0, "logits must have a vocabulary"
    assert logits.stride(1) == 1 or logits.shape[1] == 1, "the vocabulary must be contiguous"


def score_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
    chosen: torch.Tensor,  # [num_rows] int64 or int32
    num_top: torch.Tensor,  # [num_rows] int32; vocab_size or more means all
    max_top: int,
    as_logits: bool,
) -> ScoredEntries:
    """Score each row's chosen token and its `num_top` most likely ones, the chosen one left out of those.

    Values are logit − log-sum-exp, or the logit itself with `as_logits`. The width is 1 + max_top.

    Raises:
        IndexError: a chosen id is outside the vocabulary.
        ValueError: num_top is negative, or larger than max_top.
    """
    _check_rows(logits)
    return _TABLES[logits.device].score_rows(logits, chosen, num_top, max_top, as_logits)


def score_given_ids(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
    chosen: torch.Tensor,  # [num_rows] int64 or int32
    given: torch.Tensor,  # [num_rows, max_given] int32, padded with −1
    as_logits: bool,
) -> ScoredEntries:
    """Score each row's chosen token and the ids given, in their order, with their true ranks.

    A given id that equals the chosen one, or repeats, is left out. The width is 1 + max_given.

    Raises:
        IndexError: an id is outside the vocabulary.
    """
    _check_rows(logits)
    return _TABLES[logits.device].score_given_ids(logits, chosen, given, as_logits)


def score_full_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
    as_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score every token: values [num_rows, vocab_size] float32, ranks likewise int32, is_finite [num_rows] bool."""
    _check_rows(logits)
    return _TABLES[logits.device].score_full_rows(logits, as_logits)


def argmax_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the id of each row's largest logit (lowest on ties; NaN left aside), [num_rows] int32, and is_finite.

    is_finite is False for a row that holds NaN or +inf, or −inf throughout.
    """
    _check_rows(logits)
    return _TABLES[logits.device].argmax_rows(logits)


def draw_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free; −inf: the token is removed
    row_of_draw: torch.Tensor,  # [num_draws] int32: several draws may share a row
    seeds: torch.Tensor,  # [num_draws] int64, the bit pattern of a uint64
    positions: torch.Tensor,  # [num_draws] int64, absolute place of the token drawn
) -> torch.Tensor:
    """Draw a token a draw by Gumbel-max, [num_draws] int32: the noise is a pure function of (seed, position, token).

    Lowest id on ties; a NaN is never drawn; 0 when no token is left.

    Raises:
        IndexError: row_of_draw names a row that isn't there.
    """
    _check_rows(logits)
    return _TABLES[logits.device].draw_rows(logits, row_of_draw, seeds, positions)


def philox_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the 32 random bits of each token that `draw_rows` draws from: [num_draws, vocab_size] int64."""
    return _TABLES[seeds.device].philox_bits(seeds, positions, vocab_size)


def filter_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free, before temperature; changed in place
    rows: torch.Tensor,  # [num_filtered] int64, each once: the rows that ask
    temperature: torch.Tensor,  # [num_filtered] float32, above 0
    top_k: torch.Tensor,  # [num_filtered] int64, vocab_size or more: off
    top_p: torch.Tensor,  # [num_filtered] float32, 1: off
    min_p: torch.Tensor,  # [num_filtered] float32, 0: off
) -> None:
    """Set to −inf what min-p, then top-k, then top-p (of what the others left, renormalised) remove.

    What stays is a prefix of the row's falling order (ties: lowest id first) of one token or more:
    those with logit − max ≥ temperature · log(min_p), in float64; of these the top_k first; of these the fewest whose
    weights exp((logit − max) / temperature), float32 added up in float64, reach top_p of the sum of all of them.
    A row that is not finite stays as it is. What stays depends on nothing but the row and its settings.

    Raises:
        IndexError: a row isn't there.
    """
    _check_rows(logits)
    assert rows.dtype == top_k.dtype == torch.int64, "rows and top_k must be int64"
    assert temperature.dtype == top_p.dtype == min_p.dtype == torch.float32, "the settings must be float32"
    assert rows.shape == temperature.shape == top_k.shape == top_p.shape == min_p.shape, "one setting a row"
    _TABLES[logits.device].filter_rows(logits, rows, temperature, top_k, top_p, min_p)


def embed(
    token_ids: torch.Tensor,  # [num_tokens] int64
    weight: torch.Tensor,  # [vocab_size, hidden_size]; int8: as of `store_int8`
    scale: torch.Tensor | None,  # [vocab_size] float32, or [hidden_size / 32, vocab_size]
    dtype: torch.dtype,
) -> torch.Tensor:  # [num_tokens, hidden_size] in dtype; float32 with scales
    """Return the rows of `weight` at these ids, times their scales."""
    return _TABLES[token_ids.device].embed(token_ids, weight, scale, dtype)


def linear(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor,  # [num_columns, size], of x's dtype; for float32 x also bfloat16, and int8 as of `store_int8`
    bias: torch.Tensor | None = None,  # [num_columns] of x's dtype
    scale: torch.Tensor | None = None,  # [num_columns] float32, or [size / 32, num_columns]: the weights' scales
    out: torch.Tensor | None = None,  # [..., num_columns] float32, row stride free; filled and returned when given
) -> torch.Tensor:  # [..., num_columns] of x's dtype
    """Return x · weightᵀ · scale + bias; the kernels sum in float32 whatever the weights' dtype.

    Of int8 weights a row has a scale, or each 32 elements of a row have one: those are multiplied by it before anything
    else, so the result is to the bit that of the products as float32 weights. No copy of the weights is kept, so they
    may change between calls. An output's bits depend on its own row of x and row of weights (and the
    instruction set) alone: not on how many rows there are, nor on the threads.
    """
    return _TABLES[x.device].linear(x, weight, bias, scale, out)


def linear_to_float32(
    x: torch.Tensor,  # [num_rows, size]
    weight: torch.Tensor,  # [num_columns, size]; int8: as `store_int8` makes it
    scale: torch.Tensor | None = None,  # [num_columns] float32, or [size / 32, num_columns]
    out: torch.Tensor | None = None,  # [num_rows, num_columns] float32; filled and returned when given
) -> torch.Tensor:  # [num_rows, num_columns] float32
    """Return x · weightᵀ · scale in float32: logits are never rounded to the weights' narrower type."""
    return _TABLES[x.device].linear_to_float32(x, weight, scale, out)


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # [num_rows, size], changed in place
) -> torch.Tensor:  # the shape of x
    """Return x / √(mean(x²) + eps) · weight by rows; with a residual, add x to it first and norm that."""
    return _TABLES[x.device].rms_norm(x, weight, eps, residual)


def rotate(
    heads: torch.Tensor,  # [num_tokens, num_heads, head_dim], token stride free
    cos: torch.Tensor,  # [num_tokens, rotary_dim] float32 (or [num_tokens, 1, rotary_dim])
    sin: torch.Tensor,  # the same shape; its first half is negated
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Rotate the first rotary_dim elements x of every head by its token's angles; the others stay.

    x becomes x · cos + (x with its halves swapped) · sin.
    """
    return _TABLES[heads.device].rotate(heads, cos, sin)


def write_kv(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], token stride free
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim], token stride free
    kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim], written in place
    slot_mapping: torch.Tensor,  # [num_tokens] int64: block id · block_size + place in the block
) -> None:
    """Copy a step's keys and values into their slots, rounded to nearest even where the cache is bfloat16.

    Raises:
        IndexError: a slot is not in the cache; nothing was written.
    """
    _TABLES[key.device].write_kv(key, value, kv_cache, slot_mapping)


def rotate_and_write_kv(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 · num_kv_heads, head_dim]: query, key, value heads
    cos: torch.Tensor,  # [num_tokens, rotary_dim] float32 (or [num_tokens, 1, rotary_dim])
    sin: torch.Tensor,  # the same shape; its first half is negated
    kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim], written in place
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    query_norm: torch.Tensor | None = None,  # [head_dim]: weight of the norm of each query head, if the model has one
    key_norm: torch.Tensor | None = None,  # [head_dim]
    eps: float = 0.0,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Go from a layer's qkv product to what attention needs in one pass: norms, rotation, cache; return the query.

    Raises:
        IndexError: a slot is not in the cache; nothing was written.
    """
    return _TABLES[qkv.device].rotate_and_write_kv(qkv, cos, sin, kv_cache, slot_mapping, query_norm, key_norm, eps)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim], token stride free
    kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim] keys, then values; float32, bfloat16
    block_tables: torch.Tensor,  # [num_requests, max_blocks] int32; entries beyond a request's need are not read
    query_starts: torch.Tensor,  # [num_requests + 1] int32: the first row of each request, then num_tokens
    seq_lens: torch.Tensor,  # [num_requests] int32: positions in the cache, this step's tokens included
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Attend causally over each request's own blocks; the step's keys and values must be in the cache already.

    Position i sees positions j ≤ i, with a sliding window only those with j > i − sliding_window; no other slot is
    read. A row's result is the same to the bit for any batch, chunking, block size and number of threads.

    Raises:
        IndexError: a block that a request needs is not in the cache.
    """
    return _TABLES[query.device].paged_attention(
        query, kv_cache, block_tables, query_starts, seq_lens, scale, sliding_window
    )


def activate(
    x: torch.Tensor,  # [..., size], row stride free
    activation: str,  # as config.json names it
) -> torch.Tensor:  # the shape of x
    """Return activation(x)."""
    return _TABLES[x.device].activate(x, activation)


def gate_and_multiply(
    gate_up: torch.Tensor,  # [..., 2 · size]: gate columns, then up columns; row stride free
    activation: str,  # as config.json names it
) -> torch.Tensor:  # [..., size]
    """Return activation(gate) · up."""
    return _TABLES[gate_up.device].gate_and_multiply(gate_up, activation)
