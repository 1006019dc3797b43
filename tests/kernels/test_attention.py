"""Paged attention against a float64 oracle; unwritten slots are NaN and unused table entries point nowhere."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from vllm.ops import api
from vllm.v1.attention import make_attention_metadata, torch_reference

NOWHERE = 1 << 30


class Case(NamedTuple):
    """A step's arguments, and the keys and values of each request in order."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[np.ndarray]  # a request: [seq_len, num_kv_heads, head_dim]
    values: list[np.ndarray]

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self[:5]


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int, int] = (6, 2, 32),  # num_heads, num_kv_heads, head_dim
    block_size: int = 16,
    sliding_window: int | None = None,
    sharpness: float = 1.0,
    cache_dtype: torch.dtype = torch.float32,
) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    random = np.random.default_rng(sum(seq_lens) * 31 + len(seq_lens))
    num_blocks = sum(-(-n // block_size) for n in seq_lens) + 3
    cache = np.full((2, num_blocks, block_size, num_kv_heads, head_dim), np.nan, np.float32)
    max_blocks = max(-(-n // block_size) for n in seq_lens) + 2
    tables = np.full((len(seq_lens), max_blocks), NOWHERE, np.int32)
    free = iter(random.permutation(num_blocks))
    keys, values = [], []
    for r, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        pair = random.standard_normal((2, seq_len, num_kv_heads, head_dim)).astype(np.float32)
        pair = torch.from_numpy(pair).to(cache_dtype).float().numpy()  # what the cache can hold
        lowest = 0 if sliding_window is None else max(0, seq_len - query_len - sliding_window + 1)
        for position in range(lowest, seq_len):  # what no row sees has no block: it may have been given back
            if tables[r, position // block_size] == NOWHERE:
                tables[r, position // block_size] = next(free)
            cache[:, tables[r, position // block_size], position % block_size] = pair[:, position]
        keys.append(pair[0])
        values.append(pair[1])
    query = random.standard_normal((sum(query_lens), num_heads, head_dim)).astype(np.float32) * sharpness
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    query, cache, *requests = map(torch.from_numpy, (query, cache, tables, starts, np.array(seq_lens, np.int32)))
    return Case(query, cache.to(cache_dtype), *requests, keys, values)


def judge(case: Case, scale: float, sliding_window: int | None) -> np.ndarray:
    rows = []
    for r, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        first, end = case.query_starts[r : r + 2].tolist()
        for row in range(first, end):
            position = len(keys) - (end - row)
            lowest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = slice(lowest, position + 1)
            group = case.query.shape[1] // keys.shape[1]
            scores = np.einsum(
                "hd,shd->hs",
                case.query[row].numpy().astype(np.float64) * scale,
                np.repeat(keys[seen], group, axis=1).astype(np.float64),
            )
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            rows.append(np.einsum("hs,shd->hd", weights, np.repeat(values[seen], group, axis=1)))
    return np.stack(rows)


@pytest.mark.parametrize("sliding_window", [None, 1, 5, 64, 100])
@pytest.mark.parametrize("block_size", [1, 7, 16, 96])
def test_mixed_batches_match_the_oracle(ops: ModuleType, block_size: int, sliding_window: int | None) -> None:
    # decodes short and long, a whole prompt, a chunk at the end of a long context, lengths around tiles and spans
    query_lens = [1, 1, 40, 20, 1, 65, 1, 1]
    seq_lens = [1, 300, 40, 290, 64, 65, 256, 257]
    case = make_case(query_lens, seq_lens, block_size=block_size, sliding_window=sliding_window)
    found = ops.paged_attention(*case.arguments, 0.2, sliding_window)
    np.testing.assert_allclose(found.numpy(), judge(case, 0.2, sliding_window), atol=3e-6, rtol=0)


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 16), (8, 1, 80), (3, 3, 5), (2, 1, 128), (160, 1, 8), (7, 7, 20)])
def test_any_number_of_heads_and_dimensions(ops: ModuleType, heads: tuple[int, int, int]) -> None:
    case = make_case([1, 70, 3], [33, 70, 80], heads=heads)
    found = ops.paged_attention(*case.arguments, heads[2] ** -0.5)
    np.testing.assert_allclose(found.numpy(), judge(case, heads[2] ** -0.5, None), atol=3e-6, rtol=0)


@pytest.mark.parametrize("sliding_window", [None, 5, 100])
@pytest.mark.parametrize("heads", [(9, 3, 64), (6, 2, 32), (8, 1, 80), (3, 3, 5), (2, 1, 24), (32, 1, 8)])
def test_a_bfloat16_cache_is_read_exactly(
    ops: ModuleType, heads: tuple[int, int, int], sliding_window: int | None
) -> None:
    case = make_case(
        [1, 70, 3, 1], [33, 70, 280, 300], heads, sliding_window=sliding_window, cache_dtype=torch.bfloat16
    )
    found = ops.paged_attention(*case.arguments, 0.2, sliding_window)
    np.testing.assert_allclose(found.numpy(), judge(case, 0.2, sliding_window), atol=3e-6, rtol=0)


@pytest.mark.parametrize("sharpness", [1e-30, 1e3, 1e30])
def test_extreme_scores_neither_overflow_nor_vanish(ops: ModuleType, sharpness: float) -> None:
    case = make_case([1, 30], [200, 30], sharpness=sharpness)
    found = ops.paged_attention(*case.arguments, 0.2)
    expected = judge(case, 0.2, None)
    # Scores of 1e30 leave the largest key alone; where two nearly tie, float32 may prefer the other.
    agree = np.isclose(found.numpy(), expected, atol=1e-3).mean()
    assert np.isfinite(found.numpy()).all() and agree > 0.99


def test_a_query_of_nan_spoils_its_own_row_only(ops: ModuleType) -> None:
    case = make_case([1, 20], [50, 20])
    case.query[5, 0] = float("nan")
    found = ops.paged_attention(*case.arguments, 0.2)
    assert found[5, 0].isnan().all()
    found[5, 0] = 0
    assert not found.isnan().any()


def test_the_query_may_lie_inside_a_wider_tensor(ops: ModuleType) -> None:
    case = make_case([1, 20], [50, 20])
    wide = torch.full((21, 10, 32), float("nan"))
    wide[:, :6] = case.query
    found = ops.paged_attention(wide[:, :6], *case.arguments[1:], 0.2)
    assert torch.equal(found, ops.paged_attention(*case.arguments, 0.2))


@pytest.mark.parametrize("block", [-1, 10_000])
def test_a_block_outside_the_cache_is_refused(ops: ModuleType, block: int) -> None:
    case = make_case([1, 20], [50, 20])
    case.block_tables[0, 2] = block
    with pytest.raises(IndexError):
        ops.paged_attention(*case.arguments, 0.2)


def test_the_kernel_and_the_reference_backend_agree() -> None:
    query_lens, seq_lens = np.array([1, 40, 9, 1]), np.array([70, 40, 300, 1])
    case = make_case(query_lens.tolist(), seq_lens.tolist())
    attn = make_attention_metadata(query_lens, seq_lens, case.block_tables.numpy(), 16, "cpu")
    key, value = torch.randn(2, 51, 2, 32, generator=torch.Generator().manual_seed(0))
    api.write_kv(key, value, case.kv_cache, attn.slot_mapping)
    expected = torch_reference.attend(case.query, case.kv_cache, attn, 0.2)
    found = api.paged_attention(case.query, case.kv_cache, attn.block_tables, attn.query_starts, attn.seq_lens, 0.2)
    assert torch.allclose(found, expected, atol=3e-6, rtol=0)


VARIANTS = ["portable", "avx2", pytest.param("avx512", marks=pytest.mark.avx512)]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    if not api.set_simd_variant(request.param):
        pytest.skip(f"this CPU or build has no {request.param}")
    return request.param


CACHE_DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "sliding_window"), [((6, 2, 32), None), ((6, 2, 32), 50), ((9, 3, 24), 7)])
def test_chunks_of_any_size_give_the_same_bits(
    heads: tuple[int, int, int], sliding_window: int | None, cache_dtype: torch.dtype
) -> None:
    length = 333
    case = make_case([length], [length], heads, cache_dtype=cache_dtype)

    def compute(chunk: int) -> torch.Tensor:
        parts = []
        for first in range(0, length, chunk):
            end = min(first + chunk, length)
            starts, seq_lens = torch.tensor([0, end - first]), torch.tensor([end])
            parts.append(
                api.paged_attention(
                    case.query[first:end], case.kv_cache, case.block_tables, starts, seq_lens, 0.2, sliding_window
                )
            )
        return torch.cat(parts)

    whole = compute(length)
    for chunk in (1, 2, 5, 17, 64, 100):
        assert torch.equal(whole, compute(chunk)), chunk


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_batch_mates_and_block_sizes_do_not_change_a_bit(cache_dtype: torch.dtype) -> None:
    query_lens, seq_lens = [1, 30, 1, 1], [600, 40, 5, 300]
    case = make_case(query_lens, seq_lens, cache_dtype=cache_dtype)
    together = api.paged_attention(*case.arguments, 0.2)
    for r in range(4):
        first, end = case.query_starts[r : r + 2].tolist()
        alone = api.paged_attention(
            case.query[first:end],
            case.kv_cache,
            case.block_tables[r : r + 1],
            torch.tensor([0, end - first]),
            case.seq_lens[r : r + 1],
            0.2,
        )
        assert torch.equal(alone, together[first:end])
    for block_size in (1, 7, 64):
        other = make_case(query_lens, seq_lens, block_size=block_size, cache_dtype=cache_dtype)
        other = other._replace(query=case.query)
        for r in range(4):  # the same numbers in other blocks
            for position in range(seq_lens[r]):
                block = int(other.block_tables[r, position // block_size])
                pair = np.stack([case.keys[r][position], case.values[r][position]])
                other.kv_cache[:, block, position % block_size] = torch.from_numpy(pair)
        assert torch.equal(api.paged_attention(*other.arguments, 0.2), together), block_size


@pytest.mark.parametrize("query_lens", [[1], [1, 1], [200], [1] * 40, [1] * 9 + [80]])
def test_attention_does_not_depend_on_the_number_of_threads(query_lens: list[int]) -> None:
    case = make_case(query_lens, [700 - 11 * r for r in range(len(query_lens))])
    torch.set_num_threads(1)
    alone = api.paged_attention(*case.arguments, 0.2)
    for num_threads in (2, 3, 8):
        torch.set_num_threads(num_threads)
        assert torch.equal(alone, api.paged_attention(*case.arguments, 0.2)), num_threads


def test_instruction_sets_agree_on_attention(on_each_variant: Callable[[Callable[[], Any]], list[Any]]) -> None:
    case = make_case([1, 90], [500, 90], heads=(9, 3, 64))
    found = on_each_variant(lambda: api.paged_attention(*case.arguments, 0.125))
    assert all(torch.allclose(found[0], other, atol=2e-6, rtol=0) for other in found[1:])


def test_no_tokens_give_no_rows(ops: ModuleType) -> None:
    case = make_case([1], [5])
    nobody = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert ops.paged_attention(case.query[:0], case.kv_cache, case.block_tables[:0], *nobody, 0.2).shape == (0, 6, 32)
