"""Paged attention in plain torch, on any device: what serves until a kernel does, and what kernels are tested against.

Everything is computed in float32, whatever the inputs and the cache are. Keys and values are copied out of their blocks
and only what has been written is read, so garbage in a fresh cache never reaches a sum.

Requests with one token in the step (decodes) are computed together, in groups of similar length whose copies stay
within `_MAX_GROUP_BYTES`: one pair of batched products a KV head. A request with more tokens (a prefill, or a chunk of
one) is computed by itself in tiles of `_TILE_ROWS` query rows, so memory stays bounded however long the context is.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from vllm.v1.attention.metadata import AttentionMetadata

_MAX_GROUP_BYTES = 32 << 20  # of keys and values copied at once; a larger group gains nothing
_TILE_ROWS = 256


class _DecodeGroup(NamedTuple):
    """Decodes that are computed together, and the blocks that hold what they may see."""

    rows: torch.Tensor  # [group] int64, the tokens' rows
    blocks: torch.Tensor  # [group · num_blocks] int64, padded with a block of the request's own
    hidden_slots: torch.Tensor  # [num_hidden] int64 into [group · num_blocks · block_size]: not to be read
    bias: torch.Tensor  # [group, 1, num_blocks · block_size] float32: 0 where visible, −inf elsewhere


class _Prefill(NamedTuple):
    """A tile of one request's query rows and the keys that its rows may see."""

    first_row: int
    end_row: int
    blocks: torch.Tensor  # [num_blocks] int64
    first_key: int  # among the slots of `blocks`
    end_key: int
    key_offset: int  # absolute position of the first key, counted from that of the first row (≤ 0)


class _Work(NamedTuple):
    groups: list[_DecodeGroup]
    prefills: list[_Prefill]


def attend(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]; the step's own are in it already
    attn: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    *,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads] float32
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim], the query's dtype
    """Attend causally, over each request's own blocks.

    Position i sees positions j ≤ i; with a sliding window only those with j > i − sliding_window. With a soft cap a
    score s becomes soft_cap · tanh(s / soft_cap). A head's sink takes part in each of its softmaxes, without a value.
    """
    work = attn.kept.get(sliding_window)
    if work is None:
        work = attn.kept[sliding_window] = _make_work(attn, kv_cache, sliding_window)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_kv_heads = kv_cache.shape[3]
    weights = _Weights(soft_cap, None if sinks is None else sinks.float().view(num_kv_heads, -1))
    for group in work.groups:
        output[group.rows] = _attend_decodes(query[group.rows], kv_cache, group, scale, weights).to(query.dtype)
    for prefill in work.prefills:
        rows = slice(prefill.first_row, prefill.end_row)
        output[rows] = _attend_tile(query[rows], kv_cache, prefill, scale, sliding_window, weights).to(query.dtype)
    return output


class _Weights(NamedTuple):
    """From scores to the weights of values."""

    soft_cap: float | None
    sinks: torch.Tensor | None  # [num_kv_heads, heads a kv head] float32

    @property
    def is_plain(self) -> bool:
        return self.soft_cap is None and self.sinks is None

    def compute(
        self,
        scores: torch.Tensor,  # [..., heads a kv head or more rows of each, num_keys]
        bias: torch.Tensor,  # broadcast to scores: 0 where visible, −inf elsewhere
        sinks: torch.Tensor | None,  # [..., rows of scores, 1]
    ) -> torch.Tensor:  # the shape of scores
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        scores = scores + bias
        if sinks is None:
            return scores.softmax(-1)
        with_sinks = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        return with_sinks.softmax(-1)[..., :-1]


def _attend_decodes(
    query: torch.Tensor,  # [group, num_heads, head_dim]
    kv_cache: torch.Tensor,
    group: _DecodeGroup,
    scale: float,
    weights: _Weights,
) -> torch.Tensor:  # [group, num_heads, head_dim] float32
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[3]
    keys, values = (
        _copy_blocks(cache, group.blocks, group.hidden_slots).view(num_rows, -1, num_kv_heads, head_dim)
        for cache in kv_cache
    )
    # [group, num_kv_heads, heads a kv head, head_dim]
    by_kv_head = (query.float() * scale).view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = torch.empty_like(by_kv_head)
    for head in range(num_kv_heads):
        if weights.is_plain:
            shares = torch.baddbmm(group.bias, by_kv_head[:, head], keys[:, :, head].transpose(1, 2)).softmax(-1)
        else:
            sinks = None if weights.sinks is None else weights.sinks[head][:, None]
            scores = torch.bmm(by_kv_head[:, head], keys[:, :, head].transpose(1, 2))
            shares = weights.compute(scores, group.bias, sinks)
        output[:, head] = torch.bmm(shares, values[:, :, head])
    return output.view(num_rows, num_heads, head_dim)


def _copy_blocks(
    cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], keys or values
    blocks: torch.Tensor,  # [num_copied] int64
    hidden_slots: torch.Tensor,  # [num_hidden] int64
) -> torch.Tensor:  # [num_copied · block_size, num_kv_heads · head_dim] float32
    copied = cache.flatten(1).index_select(0, blocks).view(-1, cache.shape[2] * cache.shape[3]).float()
    return copied.index_fill_(0, hidden_slots, 0.0)


def _attend_tile(
    query: torch.Tensor,  # [num_rows, num_heads, head_dim]
    kv_cache: torch.Tensor,
    tile: _Prefill,
    scale: float,
    sliding_window: int | None,
    weights: _Weights,
) -> torch.Tensor:  # [num_rows, num_heads, head_dim] float32
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[3]
    group = num_heads // num_kv_heads
    keys, values = (
        cache.flatten(1)
        .index_select(0, tile.blocks)
        .view(-1, num_kv_heads, head_dim)[tile.first_key : tile.end_key]
        .float()
        .transpose(0, 1)[None]
        for cache in kv_cache
    )  # [1, num_kv_heads, num_keys, head_dim]
    # The heads that share a KV head become further query rows of it: [1, num_kv_heads, num_rows · group, head_dim]
    rows = (
        query.float()
        .view(num_rows, num_kv_heads, group, head_dim)
        .transpose(0, 1)
        .reshape(1, num_kv_heads, -1, head_dim)
    )
    row_positions = torch.arange(num_rows, device=query.device).repeat_interleave(group)[:, None]
    key_positions = torch.arange(tile.end_key - tile.first_key, device=query.device)[None] + tile.key_offset
    visible = key_positions <= row_positions
    if sliding_window is not None:
        visible &= key_positions > row_positions - sliding_window
    if weights.is_plain:
        attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=visible, scale=scale)
    else:
        bias = torch.zeros(visible.shape, device=query.device).masked_fill_(~visible, -torch.inf)
        sinks = None if weights.sinks is None else weights.sinks.repeat(1, num_rows)[None, :, :, None]
        attended = weights.compute(rows @ keys.transpose(2, 3) * scale, bias, sinks) @ values
    return attended[0].view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1).reshape(query.shape)


# ---- work: found from the host's numbers at the step's first layer


def _make_work(attn: AttentionMetadata, kv_cache: torch.Tensor, sliding_window: int | None) -> _Work:
    query_lens = np.diff(attn.host.query_starts)
    prefills: list[_Prefill] = []
    for request in np.flatnonzero(query_lens > 1):
        prefills += _make_tiles(attn, int(request), sliding_window, kv_cache.device)
    width = kv_cache.shape[3] * kv_cache.shape[4]
    groups = [
        _make_group(attn, requests, sliding_window, kv_cache.device)
        for requests in _split_decodes(attn, np.flatnonzero(query_lens == 1), sliding_window, 8 * width)
    ]
    return _Work(groups, prefills)


def _first_blocks(attn: AttentionMetadata, requests: np.ndarray, sliding_window: int | None) -> np.ndarray:
    """Return for each decode the index in its table of the first block that it may see."""
    if sliding_window is None:
        return np.zeros(len(requests), np.int64)
    return np.maximum(attn.host.seq_lens[requests] - sliding_window, 0) // attn.block_size


def _split_decodes(
    attn: AttentionMetadata, requests: np.ndarray, sliding_window: int | None, bytes_per_slot: int
) -> list[np.ndarray]:
    """Split the decodes into groups of similar length, each within the bound on copied bytes."""
    num_blocks = -(-attn.host.seq_lens[requests] // attn.block_size) - _first_blocks(attn, requests, sliding_window)
    order = np.argsort(num_blocks, kind="stable")
    bytes_per_block = attn.block_size * bytes_per_slot
    groups: list[list[int]] = []
    shortest = 0
    for index in order:
        blocks = int(num_blocks[index])
        fits = groups and (len(groups[-1]) + 1) * blocks * bytes_per_block <= _MAX_GROUP_BYTES
        if not fits or blocks > 2 * shortest + 4:  # a long one would pad all the others
            groups.append([])
            shortest = blocks
        groups[-1].append(int(requests[index]))
    return [np.array(group) for group in groups]


def _make_group(
    attn: AttentionMetadata, requests: np.ndarray, sliding_window: int | None, device: torch.device
) -> _DecodeGroup:
    block_size, seq_lens = attn.block_size, attn.host.seq_lens[requests]
    first_blocks = _first_blocks(attn, requests, sliding_window)
    num_blocks = int((-(-seq_lens // block_size) - first_blocks).max())
    columns = first_blocks[:, None] + np.arange(num_blocks)
    # Past a request's end its last block is repeated: surely its own, and hidden below.
    columns = np.minimum(columns, (seq_lens[:, None] - 1) // block_size)
    blocks = attn.host.block_tables[requests[:, None], columns].astype(np.int64)
    positions = first_blocks[:, None] * block_size + np.arange(num_blocks * block_size)
    hidden = positions >= seq_lens[:, None]
    if sliding_window is not None:
        hidden |= positions < seq_lens[:, None] - sliding_window
    bias = np.where(hidden, np.float32(-np.inf), np.float32(0))[:, None]
    return _DecodeGroup(
        rows=torch.from_numpy(attn.host.query_starts[requests]).to(device),
        blocks=torch.from_numpy(blocks.reshape(-1)).to(device),
        hidden_slots=torch.from_numpy(np.flatnonzero(hidden)).to(device),
        bias=torch.from_numpy(bias).to(device),
    )


def _make_tiles(
    attn: AttentionMetadata, request: int, sliding_window: int | None, device: torch.device
) -> list[_Prefill]:
    first_row, end_row = (int(row) for row in attn.host.query_starts[request : request + 2])
    first_position = int(attn.host.seq_lens[request]) - (end_row - first_row)
    block_size = attn.block_size
    tiles: list[_Prefill] = []
    for row in range(first_row, end_row, _TILE_ROWS):
        end = min(row + _TILE_ROWS, end_row)
        position = first_position + row - first_row  # of the tile's first row
        end_position = position + end - row
        first_seen = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        first_block = first_seen // block_size
        blocks = attn.host.block_tables[request, first_block : -(-end_position // block_size)].astype(np.int64)
        tiles.append(
            _Prefill(
                first_row=row,
                end_row=end,
                blocks=torch.from_numpy(blocks).to(device),
                first_key=first_seen - first_block * block_size,
                end_key=end_position - first_block * block_size,
                key_offset=first_seen - position,
            )
        )
    return tiles
