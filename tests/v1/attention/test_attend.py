"""The attention backends against dense attention in float64, over a cache full of NaN."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from vllm.ops import api as ops
from vllm.v1.attention import AttentionBackend, AttentionMetadata, AttentionShape, CacheSpec, torch_reference
from vllm.v1.attention.backend import CpuBackend, TorchReferenceBackend

BACKENDS: list[AttentionBackend] = [TorchReferenceBackend(), CpuBackend()]


@pytest.fixture(autouse=True, params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Every test runs on the reference and on the CPU's kernels."""
    Batch.backend = request.param
    return Batch.backend


class Batch:
    """Random requests whose contexts are in a cache already, and a step's queries, keys and values."""

    backend: AttentionBackend

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
        self.attn: AttentionMetadata = self.backend.make_metadata(
            self.query_lens, self.seq_lens, tables, block_size, "cpu"
        )

    def attend(
        self,
        scale: float = 0.3,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ops.write_kv(self.key, self.value, self.cache, self.attn.slot_mapping)
        shape = AttentionShape(scale, window, soft_cap)
        return self.backend.attend(self.query, self.cache, self.attn, shape, sinks)

    def attend_densely(
        self,
        scale: float = 0.3,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
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
            if soft_cap is not None:
                scores = soft_cap * (scores / soft_cap).tanh()
            scores = scores.masked_fill(~visible, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, query_len, 1)), -1)
            outputs.append((scores.softmax(-1)[..., :seq_len] @ values).transpose(0, 1))
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


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_caps_and_sinks_equal_dense_float64(window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    batch = Batch(MIXED)
    sinks = torch.linspace(-3, 4, batch.num_heads) if has_sinks else None
    got = batch.attend(window=window, soft_cap=soft_cap, sinks=sinks)
    wanted = batch.attend_densely(window=window, soft_cap=soft_cap, sinks=sinks)
    torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=1e-5)


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
    monkeypatch.setattr(Batch, "backend", TorchReferenceBackend())
    monkeypatch.setattr(torch_reference, "_TILE_ROWS", 7)
    monkeypatch.setattr(torch_reference, "_MAX_GROUP_BYTES", 2048)
    batch = Batch(MIXED + [(1, 12)] * 20)
    for window in (None, 10):
        torch.testing.assert_close(
            batch.attend(window=window).double(), batch.attend_densely(window=window), atol=2e-6, rtol=1e-5
        )
    groups = batch.attn.kept[None].groups
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
    attn = Batch.backend.make_metadata(query_lens, seq_lens, tables, 4, "cpu")
    assert attn.host.positions.tolist() == [3, 4, 0, 0, 1, 2]
    assert attn.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4, 0, 16, 17, 18]
    assert attn.query_starts.tolist() == [0, 2, 3, 6]
    assert (attn.max_query_len, attn.max_seq_len) == (3, 5)


def test_a_token_each_stands_at_the_end_of_its_sequence_and_the_next_step_follows() -> None:
    query_lens, seq_lens = np.ones(3, np.int64), np.array([5, 1, 7])
    tables = np.array([[7, 2, 99], [0, 99, 99], [4, 6, 99]], np.int32)
    attn = Batch.backend.make_metadata(query_lens, seq_lens, tables, 4, "cpu")
    assert attn.host.positions.tolist() == [4, 0, 6]
    assert attn.slot_mapping.tolist() == [2 * 4, 0, 6 * 4 + 2]
    assert attn.query_starts.tolist() == [0, 1, 2, 3]
    advanced = Batch.backend.advance_metadata(attn, "cpu")
    anew = Batch.backend.make_metadata(query_lens, seq_lens + 1, tables, 4, "cpu")
    for name in ("query_starts", "seq_lens", "block_tables", "slot_mapping"):
        assert torch.equal(getattr(advanced, name), getattr(anew, name)), name
    assert (advanced.max_query_len, advanced.max_seq_len) == (anew.max_query_len, anew.max_seq_len)
    for mine, theirs in zip(advanced.host, anew.host, strict=True):
        assert np.array_equal(mine, theirs)
    assert attn.host.positions.tolist() == [4, 0, 6], "the step before keeps its own"


def test_the_cache_takes_the_bytes_that_sizing_counts() -> None:
    cache = Batch.backend.make_cache(CacheSpec(2, 8), 10, 16, torch.bfloat16, "cpu")
    assert tuple(cache.shape) == (2, 10, 16, 2, 8)
    assert cache.nbytes == 10 * Batch.backend.count_block_bytes(CacheSpec(2, 8), 16, torch.bfloat16)
