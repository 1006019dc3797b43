"""The one door to the kernels: torch tensors in, torch tensors out.

On the CPU an op runs the compiled library (vllm/_ops_library.py, csrc/); elsewhere, and where the library is missing,
its torch reference of the same contract (`*_reference`).

Order of tokens, everywhere: by (logit falling, id rising), on the float32 logits given. rank = 1 + the tokens before.
"""

import ctypes

import torch

from vllm._ops_filter import filter_rows, filter_rows_reference
from vllm._ops_library import KV_KINDS, check_status, get_simd_variant, is_compiled, load_library, set_simd_variant
from vllm._ops_linear import (
    FACTOR_BLOCK,
    ROW_GROUP,
    get_scale_shape,
    get_stored_shape,
    has_factor_blocks,
    linear,
    linear_reference,
    store_int8,
    take_int8_rows,
    widen_rows,
    write_int8_rows,
)
from vllm._ops_model_reference import (
    paged_attention_reference,
    rms_norm_reference,
    rotate_and_write_kv_reference,
    rotate_reference,
    silu_and_multiply_reference,
    write_kv_reference,
)
from vllm._ops_reference import (
    ScoredEntries,
    argmax_rows_reference,
    draw_rows_reference,
    philox_bits_reference,
    score_full_rows_reference,
    score_given_ids_reference,
    score_rows_reference,
)

__all__ = [
    "FACTOR_BLOCK",
    "ROW_GROUP",
    "ScoredEntries",
    "argmax_rows",
    "argmax_rows_reference",
    "draw_rows",
    "draw_rows_reference",
    "filter_rows",
    "filter_rows_reference",
    "get_scale_shape",
    "get_simd_variant",
    "get_stored_shape",
    "has_factor_blocks",
    "is_compiled",
    "linear",
    "linear_reference",
    "paged_attention",
    "paged_attention_reference",
    "philox_bits",
    "philox_bits_reference",
    "rms_norm",
    "rms_norm_reference",
    "rotate",
    "rotate_and_write_kv",
    "rotate_and_write_kv_reference",
    "rotate_reference",
    "score_full_rows",
    "score_full_rows_reference",
    "score_given_ids",
    "score_given_ids_reference",
    "score_rows",
    "score_rows_reference",
    "set_simd_variant",
    "silu_and_multiply",
    "silu_and_multiply_reference",
    "store_int8",
    "take_int8_rows",
    "widen_rows",
    "write_int8_rows",
    "write_kv",
    "write_kv_reference",
]


def _get_library_for(logits: torch.Tensor) -> ctypes.CDLL | None:
    """Return the library if it serves this tensor, after checking what every op takes for granted."""
    assert logits.dtype == torch.float32 and logits.dim() == 2, f"logits must be float32 rows; got {logits.dtype}"
    assert logits.shape[1] > 0, "logits must have a vocabulary"
    assert logits.stride(1) == 1 or logits.shape[1] == 1, "the vocabulary must be contiguous"
    return load_library() if logits.is_cpu else None


def _describe(logits: torch.Tensor) -> tuple[int, int, int, int]:
    return logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1]


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def _make_entries(num_rows: int, width: int) -> ScoredEntries:
    return ScoredEntries(
        torch.empty(num_rows, width, dtype=torch.int32),
        torch.empty(num_rows, width, dtype=torch.float32),
        torch.empty(num_rows, width, dtype=torch.int32),
        torch.empty(num_rows, dtype=torch.int32),
        torch.empty(num_rows, dtype=torch.bool),
    )


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
    library = _get_library_for(logits)
    if library is None:
        return score_rows_reference(logits, chosen, num_top, max_top, as_logits)
    chosen, num_top = _convert(chosen, torch.int64), _convert(num_top, torch.int32)
    assert chosen.shape == num_top.shape == logits.shape[:1], "one chosen token and one num_top a row"
    entries = _make_entries(logits.shape[0], 1 + max_top)
    status = library.vllm_score_rows(
        *_describe(logits),
        chosen.data_ptr(),
        num_top.data_ptr(),
        max_top,
        as_logits,
        torch.get_num_threads(),
        *(field.data_ptr() for field in entries),
    )
    check_status(status)
    return entries


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
    library = _get_library_for(logits)
    if library is None:
        return score_given_ids_reference(logits, chosen, given, as_logits)
    chosen, given = _convert(chosen, torch.int64), _convert(given, torch.int32)
    assert chosen.shape == given.shape[:1] == logits.shape[:1], "one chosen token and one list of ids a row"
    entries = _make_entries(logits.shape[0], 1 + given.shape[1])
    status = library.vllm_score_given_ids(
        *_describe(logits),
        chosen.data_ptr(),
        given.data_ptr(),
        given.shape[1],
        as_logits,
        torch.get_num_threads(),
        *(field.data_ptr() for field in entries),
    )
    check_status(status)
    return entries


def score_full_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
    as_logits: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score every token: values [num_rows, vocab_size] float32, ranks likewise int32, is_finite [num_rows] bool."""
    library = _get_library_for(logits)
    if library is None:
        return score_full_rows_reference(logits, as_logits)
    values = torch.empty(logits.shape, dtype=torch.float32)
    ranks = torch.empty(logits.shape, dtype=torch.int32)
    is_finite = torch.empty(logits.shape[0], dtype=torch.bool)
    status = library.vllm_score_full_rows(
        *_describe(logits),
        as_logits,
        torch.get_num_threads(),
        values.data_ptr(),
        ranks.data_ptr(),
        is_finite.data_ptr(),
    )
    check_status(status)
    return values, ranks, is_finite


def argmax_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the id of each row's largest logit (lowest on ties; NaN left aside), [num_rows] int32, and is_finite.

    is_finite is False for a row that holds NaN or +inf, or −inf throughout.
    """
    library = _get_library_for(logits)
    if library is None:
        return argmax_rows_reference(logits)
    token_ids = torch.empty(logits.shape[0], dtype=torch.int32)
    is_finite = torch.empty(logits.shape[0], dtype=torch.bool)
    status = library.vllm_argmax_rows(
        *_describe(logits), torch.get_num_threads(), token_ids.data_ptr(), is_finite.data_ptr()
    )
    check_status(status)
    return token_ids, is_finite


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
    library = _get_library_for(logits)
    if library is None:
        return draw_rows_reference(logits, row_of_draw, seeds, positions)
    row_of_draw = _convert(row_of_draw, torch.int32)
    seeds, positions = _convert(seeds, torch.int64), _convert(positions, torch.int64)
    assert row_of_draw.shape == seeds.shape == positions.shape, "one row, seed and position a draw"
    token_ids = torch.empty(row_of_draw.shape[0], dtype=torch.int32)
    status = library.vllm_draw_rows(
        *_describe(logits),
        row_of_draw.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        row_of_draw.shape[0],
        torch.get_num_threads(),
        token_ids.data_ptr(),
    )
    check_status(status)
    return token_ids


def philox_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the 32 random bits of each token that `draw_rows` draws from: [num_draws, vocab_size] int64."""
    library = load_library()
    if library is None or seeds.device.type != "cpu":
        return philox_bits_reference(seeds, positions, vocab_size)
    seeds, positions = _convert(seeds, torch.int64), _convert(positions, torch.int64)
    bits = torch.empty(seeds.shape[0], vocab_size, dtype=torch.int64)
    status = library.vllm_philox_bits(
        seeds.data_ptr(), positions.data_ptr(), seeds.shape[0], vocab_size, bits.data_ptr()
    )
    check_status(status)
    return bits


def _get_library_for_model(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """Return the library if it serves a layer of these tensors: all float32, all on the CPU."""
    for tensor in tensors:  # a loop: a generator costs more than the smallest kernels
        if not tensor.is_cpu or tensor.dtype != torch.float32:
            return None
    return load_library()


def _get_library_for_cache(kv_cache: torch.Tensor, *tensors: torch.Tensor) -> ctypes.CDLL | None:
    """Return the library if it serves float32 tensors beside this cache."""
    return _get_library_for_model(*tensors) if kv_cache.is_cpu and kv_cache.dtype in KV_KINDS else None


def _as_heads(heads: torch.Tensor) -> torch.Tensor:
    """Return [num_tokens, num_heads, head_dim] with the heads of a token side by side; copies only where it must."""
    _, num_heads, head_dim = heads.shape
    side_by_side = (heads.stride(2) == 1 or head_dim == 1) and (heads.stride(1) == head_dim or num_heads == 1)
    return heads if side_by_side else heads.contiguous()


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()


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
    library = _get_library_for_cache(kv_cache, query)
    if library is None:
        return paged_attention_reference(query, kv_cache, block_tables, query_starts, seq_lens, scale, sliding_window)
    query = _as_heads(query)
    block_tables = _convert(block_tables, torch.int32)
    query_starts, seq_lens = _convert(query_starts, torch.int32), _convert(seq_lens, torch.int32)
    assert kv_cache.is_contiguous(), "the cache must be contiguous"
    assert query.shape[2] == kv_cache.shape[4] and query.shape[1] % kv_cache.shape[3] == 0, "heads must match the cache"
    output = torch.empty(query.shape, dtype=torch.float32)
    status = library.vllm_paged_attention(
        query.data_ptr(),
        query.stride(0),
        query.shape[1],
        kv_cache.data_ptr(),
        KV_KINDS[kv_cache.dtype],
        *kv_cache.shape[1:],
        block_tables.data_ptr(),
        block_tables.shape[1],
        query_starts.data_ptr(),
        seq_lens.data_ptr(),
        seq_lens.shape[0],
        scale,
        sliding_window or 0,
        torch.get_num_threads(),
        output.data_ptr(),
    )
    check_status(status)
    return output


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
    library = _get_library_for_cache(kv_cache, key, value)
    if library is None:
        return write_kv_reference(key, value, kv_cache, slot_mapping)
    key, value, slot_mapping = _as_heads(key), _as_heads(value), _convert(slot_mapping, torch.int64)
    assert kv_cache.is_contiguous() and key.shape == value.shape and key.shape[1:] == kv_cache.shape[3:]
    status = library.vllm_write_kv(
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        key.shape[0],
        key.shape[1] * key.shape[2],
        slot_mapping.data_ptr(),
        kv_cache.data_ptr(),
        KV_KINDS[kv_cache.dtype],
        kv_cache.shape[1] * kv_cache.shape[2],
        torch.get_num_threads(),
    )
    check_status(status)


def rotate_and_write_kv(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 · num_kv_heads, head_dim]: query, key, value heads
    cos: torch.Tensor,  # [num_tokens, head_dim] float32 (or [num_tokens, 1, head_dim])
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
    norms = [norm for norm in (query_norm, key_norm) if norm is not None]
    library = _get_library_for_cache(kv_cache, qkv, *norms)
    if library is None:
        return rotate_and_write_kv_reference(qkv, cos, sin, kv_cache, slot_mapping, query_norm, key_norm, eps)
    qkv, slot_mapping = _as_heads(qkv), _convert(slot_mapping, torch.int64)
    cos, sin = _convert(cos, torch.float32), _convert(sin, torch.float32)
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = kv_cache.shape[3]
    num_heads = num_all_heads - 2 * num_kv_heads
    assert kv_cache.is_contiguous() and head_dim == kv_cache.shape[4] and head_dim % 2 == 0
    assert cos.numel() == sin.numel() == num_tokens * head_dim and slot_mapping.shape == (num_tokens,)
    query = torch.empty(num_tokens, num_heads, head_dim)
    status = library.vllm_rotate_and_write_kv(
        qkv.data_ptr(),
        qkv.stride(0),
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        cos.data_ptr(),
        sin.data_ptr(),
        None if query_norm is None else query_norm.data_ptr(),
        None if key_norm is None else key_norm.data_ptr(),
        eps,
        slot_mapping.data_ptr(),
        kv_cache.data_ptr(),
        KV_KINDS[kv_cache.dtype],
        kv_cache.shape[1] * kv_cache.shape[2],
        torch.get_num_threads(),
        query.data_ptr(),
    )
    check_status(status)
    return query


def rotate(
    heads: torch.Tensor,  # [num_tokens, num_heads, head_dim], token stride free
    cos: torch.Tensor,  # [num_tokens, head_dim] float32 (or [num_tokens, 1, head_dim])
    sin: torch.Tensor,  # the same shape; its first half is negated
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Turn every head by its token's rotation: x · cos + (x with its halves swapped) · sin."""
    library = _get_library_for_model(heads)
    if library is None:
        return rotate_reference(heads, cos, sin)
    heads = _as_heads(heads)
    cos, sin = _convert(cos, torch.float32), _convert(sin, torch.float32)
    assert heads.shape[2] % 2 == 0 and cos.numel() == sin.numel() == heads.shape[0] * heads.shape[2]
    output = torch.empty(heads.shape)
    status = library.vllm_rotate(
        heads.data_ptr(),
        heads.stride(0),
        *heads.shape,
        cos.data_ptr(),
        sin.data_ptr(),
        torch.get_num_threads(),
        output.data_ptr(),
    )
    check_status(status)
    return output


def rms_norm(
    x: torch.Tensor,  # [..., size]
    weight: torch.Tensor,  # [size]
    eps: float,
    residual: torch.Tensor | None = None,  # [num_rows, size], changed in place
) -> torch.Tensor:  # the shape of x
    """Return x / √(mean(x²) + eps) · weight by rows; with a residual, add x to it first and norm that."""
    library = _get_library_for_model(x, weight, *([] if residual is None else [residual]))
    if library is None:
        return rms_norm_reference(x, weight, eps, residual)
    rows = _as_rows(x)
    assert weight.is_contiguous() and weight.shape == x.shape[-1:]
    assert residual is None or (residual.shape == rows.shape and residual.stride(1) == 1), "the residual must be rows"
    output = torch.empty(x.shape)
    status = library.vllm_rms_norm(
        rows.data_ptr(),
        rows.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        *rows.shape,
        weight.data_ptr(),
        eps,
        torch.get_num_threads(),
        output.data_ptr(),
    )
    check_status(status)
    return output


def silu_and_multiply(
    gate_up: torch.Tensor,  # [num_rows, 2 · size]: gate columns, then up columns; row stride free
) -> torch.Tensor:  # [num_rows, size]
    """Return silu(gate) · up."""
    library = _get_library_for_model(gate_up)
    if library is None:
        return silu_and_multiply_reference(gate_up)
    rows = _as_rows(gate_up)
    output = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    status = library.vllm_silu_and_multiply(
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        rows.shape[1] // 2,
        torch.get_num_threads(),
        output.data_ptr(),
    )
    check_status(status)
    return output
