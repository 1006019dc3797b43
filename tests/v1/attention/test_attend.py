"""The attention backends against dense attention in float64, over a cache full of NaN."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from vllm import _custom_ops as ops
from vllm.config import TransformerConfig
from vllm.v1.attention import (
    Attend,
    AttentionMetadata,
    compute_positions,
    get_attention_backend,
    kv_bytes_per_block,
    make_attention_metadata,
    make_kv_caches,
    torch_reference,
)

BACKENDS = {"torch_reference": torch_reference.attend, "cpu_kernels": get_attention_backend("cpu").attend}


@pytest.fixture(autouse=True, params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    """Every test runs on the reference and on the CPU's kernels."""
    Batch.attend_by = staticmethod(BACKENDS[request.param])
    return str(request.param)


class Batch:
    """Random requests whose contexts are in a cache already, and a step's queries, keys and values."""

    attend_by: Attend

    def __init__(
        self,
        lens: list[tuple[int, int]],  # (query_len, seq_len) a request
        *,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 8,
        block_size: int = 4,
        cache_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.lens, self.block_size, self.head_dim = lens, block_size, head_dim
        self.num_heads, self.num_kv_heads = heads
        generator = torch.Generator().manual_seed(seed)
        num_blocks = sum(-(-seq // block_size) for _, seq in lens) + 5
        shape = (num_blocks, block_size, self.num_kv_heads, head_dim)
        self.cache = torch.full((2, *shape), float("nan"), dtype=cache_dtype)
        free = list(torch.randperm(num_blocks, generator=generator))
        width = max(-(-seq // block_size) for _, seq in lens)
        tables = np.full((len(lens), width), -1, np.int32)
        self.contexts, queries, keys, values = [], [], [], []
        for row, (query_len, seq_len) in enumerate(lens):
            tables[row, : -(-seq_len // block_size)] = [int(free.pop()) for _ in range(-(-seq_len // block_size))]
            kv = torch.randn(2, seq_len, self.num_kv_heads, head_dim, generator=generator).to(cache_dtype)
            self.contexts.append(kv)
            for position in range(seq_len - query_len):
                self.cache[:, tables[row, position // block_size], position % block_size] = kv[:, position]
            queries.append(2 * torch.randn(query_len, self.num_heads, head_dim, generator=generator))
            keys.append(kv[0, seq_len - query_len :])
            values.append(kv[1, seq_len - query_len :])
        self.query, self.key, self.value = (torch.cat(x).to(dtype) for x in (queries, keys, values))
        self.query_lens, self.seq_lens = (np.array([pair[i] for pair in lens]) for i in (0, 1))
        self.attn: AttentionMetadata = make_attention_metadata(
            self.query_lens, self.seq_lens, tables, block_size, "cpu"
        )

    def attend(self, scale: float = 0.3, window: int | None = None) -> torch.Tensor:
        ops.write_kv(self.key, self.value, self.cache, self.attn.slot_mapping)
        return self.attend_by(self.query, self.cache, self.attn, scale, window)

    def attend_densely(self, scale: float = 0.3, window: int | None = None) -> torch.Tensor:
        """float64, one request after the other, the whole score matrix."""
        outputs = []
        for query, kv, (query_len, seq_len) in zip(
            self.query.split(list(self.query_lens)), self.contexts, self.lens, strict=True
        ):
            group = self.num_heads // self.num_kv_heads
            keys, values = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in kv)
            scores = query.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
            i = torch.arange(seq_len - query_len, seq_len)[:, None]
            j = torch.arange(seq_len)[None]
            visible = (j <= i) if window is None else (j <= i) & (j > i - window)
            outputs.append((scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values).transpose(0, 1))
        return torch.cat(outputs)


MIXED = [(1, 1), (1, 17), (5, 5), (9, 30), (1, 64), (2, 3), (1, 5), (33, 33)]


@pytest.mark.parametrize("window", [None, 1, 6, 16, 1000])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size": 1},
        {"block_size": 16, "heads": (4, 4)},
        {"block_size": 3, "heads": (8, 1), "head_dim": 16},
    ],
    ids=str,
)
def test_mixed_batches_equal_dense_float64(settings: dict[str, Any], window: int | None) -> None:
    batch = Batch(MIXED, **settings)
    torch.testing.assert_close(
        batch.attend(window=window).double(), batch.attend_densely(window=window), atol=2e-6, rtol=1e-5
    )


def test_random_batches_equal_dense_float64() -> None:
    rng = random.Random(3)
    for seed in range(25):
        lens = []
        for _ in range(rng.randint(1, 9)):
            seq_len = rng.randint(1, 40)
            lens.append((rng.choice([1, 1, rng.randint(1, seq_len)]), seq_len))
        window = rng.choice([None, None, rng.randint(1, 50)])
        batch = Batch(lens, block_size=rng.randint(1, 9), seed=seed)
        got, wanted = batch.attend(window=window).double(), batch.attend_densely(window=window)
        assert torch.allclose(got, wanted, atol=2e-6, rtol=1e-5), (lens, window)


def test_the_references_tiles_and_groups_equal_dense_float64_and_keep_their_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Batch, "attend_by", staticmethod(torch_reference.attend))
    monkeypatch.setattr(torch_reference, "_TILE_ROWS", 7)
    monkeypatch.setattr(torch_reference, "_MAX_GROUP_BYTES", 2048)
    batch = Batch(MIXED + [(1, 12)] * 20)
    for window in (None, 10):
        torch.testing.assert_close(
            batch.attend(window=window).double(), batch.attend_densely(window=window), atol=2e-6, rtol=1e-5
        )
    groups = batch.attn.plans[None].groups
    assert len(groups) > 3
    row_bytes = 2 * 4 * 2 * 8
    assert all(len(g.rows) == 1 or g.bias.numel() * row_bytes <= 2048 for g in groups), (
        "a group passes the memory bound"
    )


def test_a_narrow_cache_is_widened_and_the_output_keeps_the_querys_type() -> None:
    batch = Batch(MIXED, cache_dtype=torch.bfloat16)
    got = batch.attend()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), batch.attend_densely(), atol=2e-6, rtol=1e-5)
    batch = Batch(MIXED, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    got = batch.attend()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), batch.attend_densely(), atol=1e-2, rtol=1e-2)


def test_only_the_steps_own_slots_are_written() -> None:
    batch = Batch(MIXED)
    before = batch.cache.clone()
    batch.attend()
    written = torch.zeros(before.shape[1] * before.shape[2], dtype=torch.bool)
    written[batch.attn.slot_mapping] = True
    flat_before, flat_after = before.flatten(1, 2), batch.cache.flatten(1, 2)
    assert torch.equal(flat_after[:, ~written].nan_to_num(7), flat_before[:, ~written].nan_to_num(7))
    assert torch.equal(flat_after[0, batch.attn.slot_mapping], batch.key)
    assert torch.equal(flat_after[1, batch.attn.slot_mapping], batch.value)


def test_a_request_of_nan_spoils_only_itself() -> None:
    batch = Batch(MIXED)
    wanted = batch.attend_densely()
    batch.key[1] = batch.query[1] = float("nan")  # the second request's only token
    got = batch.attend()
    assert got[1].isnan().all()
    others = torch.arange(len(got)) != 1
    torch.testing.assert_close(got[others].double(), wanted[others], atol=2e-6, rtol=1e-5)


def test_huge_scores_do_not_overflow() -> None:
    batch = Batch([(1, 9), (6, 9)])
    batch.query *= 1e4
    got = batch.attend()
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), batch.attend_densely(), atol=1e-4, rtol=1e-4)


def test_positions_and_slots_follow_the_block_tables() -> None:
    query_lens, seq_lens = np.array([2, 1, 3]), np.array([5, 1, 3])
    tables = np.array([[7, 2, 99], [0, 99, 99], [4, 99, 99]], np.int32)
    assert compute_positions(query_lens, seq_lens).tolist() == [3, 4, 0, 0, 1, 2]
    attn = make_attention_metadata(query_lens, seq_lens, tables, 4, "cpu")
    assert attn.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4, 0, 16, 17, 18]
    assert attn.query_starts.tolist() == [0, 2, 3, 6]
    assert (attn.max_query_len, attn.max_seq_len) == (3, 5)


def test_a_token_each_stands_at_the_end_of_its_sequence() -> None:
    query_lens, seq_lens = np.ones(3, np.int64), np.array([5, 1, 8])
    tables = np.array([[7, 2, 99], [0, 99, 99], [4, 6, 99]], np.int32)
    positions = compute_positions(query_lens, seq_lens)
    assert positions.tolist() == [4, 0, 7]
    for known in (None, positions):
        attn = make_attention_metadata(query_lens, seq_lens, tables, 4, "cpu", known)
        assert attn.slot_mapping.tolist() == [2 * 4, 0, 6 * 4 + 3]
        assert attn.query_starts.tolist() == [0, 1, 2, 3]


def test_the_cache_takes_the_bytes_that_sizing_counts() -> None:
    config = TransformerConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=48,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    caches = make_kv_caches(config, 10, 16, torch.bfloat16, "cpu")
    assert [tuple(cache.shape) for cache in caches] == [(2, 10, 16, 2, 8)] * 3
    assert sum(cache.nbytes for cache in caches) == 10 * kv_bytes_per_block(config, 16, torch.bfloat16)
