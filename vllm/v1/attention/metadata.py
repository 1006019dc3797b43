"""What attention must know of a step: who the tokens belong to and where their keys and values lie."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch


class HostMetadata(NamedTuple):
    """The same numbers on the host: loops never wait for the device."""

    query_starts: np.ndarray  # [num_reqs + 1] int64
    seq_lens: np.ndarray  # [num_reqs] int64
    block_tables: np.ndarray  # [num_reqs, max_blocks] int32
    slot_mapping: np.ndarray  # [num_tokens] int64
    positions: np.ndarray  # [num_tokens] int64, the absolute place of each token in its sequence


@dataclass(slots=True)
class AttentionMetadata:
    """One step's requests in the order of their rows; decodes and prefills may stand in any order.

    A request's tokens of this step are the last `query_len` positions of its `seq_len`; their keys and values are
    written to `slot_mapping` before anything is read. Slot = block id · block_size + place in the block.
    """

    query_starts: torch.Tensor  # [num_reqs + 1] int32, device; the first row of each request, then num_tokens
    seq_lens: torch.Tensor  # [num_reqs] int32, device; context, this step's tokens included
    block_tables: torch.Tensor  # [num_reqs, max_blocks] int32, device; entries beyond a request's need are undefined
    slot_mapping: torch.Tensor  # [num_tokens] int64, device; no slot stands twice
    block_size: int
    max_query_len: int
    max_seq_len: int
    host: HostMetadata
    # What a backend works out at the step's first layer and keeps for the others; its own business.
    kept: dict[Any, Any] = field(default_factory=dict)


def make_attention_metadata(
    query_lens: np.ndarray,  # [num_reqs] int, each from 1
    seq_lens: np.ndarray,  # [num_reqs] int, each from query_len
    block_tables: np.ndarray,  # [num_reqs, max_blocks] int32
    block_size: int,
    device: torch.device | str,
) -> AttentionMetadata:
    """Make a step's metadata from the host's arrays.

    On a CPU block_tables is not copied: don't change it before the step's forward pass is over.
    """
    query_starts = np.zeros(len(query_lens) + 1, np.int64)
    np.cumsum(query_lens, out=query_starts[1:])
    seq_lens = np.asarray(seq_lens, np.int64)
    block_tables = np.ascontiguousarray(block_tables, np.int32)
    positions = _compute_positions(query_starts, seq_lens)
    slots = _compute_slots(query_starts, positions, block_tables, block_size)
    return AttentionMetadata(
        query_starts=torch.from_numpy(query_starts.astype(np.int32)).to(device),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(device),
        block_tables=torch.from_numpy(block_tables).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        block_size=block_size,
        max_query_len=int(np.max(query_lens, initial=0)),
        max_seq_len=int(np.max(seq_lens, initial=0)),
        host=HostMetadata(query_starts, seq_lens, block_tables, slots, positions),
    )


def advance_attention_metadata(attn: AttentionMetadata, device: torch.device | str) -> AttentionMetadata:
    """Return the metadata of the step after `attn`: one position more each, in the block of the last one."""
    before = attn.host
    host = before._replace(
        seq_lens=before.seq_lens + 1, slot_mapping=before.slot_mapping + 1, positions=before.positions + 1
    )
    return AttentionMetadata(
        query_starts=attn.query_starts,
        seq_lens=torch.from_numpy(host.seq_lens.astype(np.int32)).to(device),
        block_tables=attn.block_tables,
        slot_mapping=torch.from_numpy(host.slot_mapping).to(device),
        block_size=attn.block_size,
        max_query_len=attn.max_query_len,
        max_seq_len=attn.max_seq_len + 1,
        host=host,
    )


def _compute_positions(query_starts: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    if query_starts[-1] == len(seq_lens):  # a token each
        return seq_lens - 1
    query_lens = np.diff(query_starts)
    firsts = seq_lens - query_lens - query_starts[:-1]
    return np.arange(query_starts[-1], dtype=np.int64) + np.repeat(firsts, query_lens)


def _compute_slots(
    query_starts: np.ndarray, positions: np.ndarray, block_tables: np.ndarray, block_size: int
) -> np.ndarray:  # [num_tokens] int64
    rows = np.arange(len(query_starts) - 1)
    if len(positions) != len(rows):
        rows = np.repeat(rows, np.diff(query_starts))
    blocks, places = np.divmod(positions, block_size)
    return block_tables[rows, blocks].astype(np.int64) * block_size + places
