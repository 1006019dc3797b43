"""Norms, rotation, activation and cache writes against float64."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from vllm.ops import api


def make(*shape: int, seed: int = 0, factor: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * factor


def judge_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def judge_rotation(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    first, second = heads.double().split(half, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat(
        [first * cos[..., :half] + second * sin[..., :half], second * cos[..., half:] + first * sin[..., half:]], -1
    )


def make_rotation(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = make(num_tokens, head_dim // 2, seed=9)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)


@pytest.mark.parametrize("factor", [1e-25, 1.0, 1e15])
@pytest.mark.parametrize("size", [1, 7, 64, 576, 4100])
def test_norms_of_any_size_and_magnitude(ops: ModuleType, size: int, factor: float) -> None:
    x, weight = make(5, size, factor=factor), make(size, seed=1)
    found = ops.rms_norm(x, weight, 1e-6)
    assert torch.allclose(found.double(), judge_norm(x, weight, 1e-6), rtol=2e-6, atol=1e-30)


def test_norms_add_to_the_residual_in_place(ops: ModuleType) -> None:
    x, weight, residual = make(33, 576), make(576, seed=1), make(33, 576, seed=2)
    expected = x + residual
    found = ops.rms_norm(x, weight, 1e-5, residual)
    assert torch.equal(residual, expected)
    assert torch.allclose(found.double(), judge_norm(expected, weight, 1e-5), rtol=2e-6, atol=1e-7)


def test_norms_of_heads_inside_a_wider_tensor(ops: ModuleType) -> None:
    wide, weight = make(6, 5, 32), make(32, seed=1)
    found = ops.rms_norm(wide[:, 1:3], weight, 1e-6)
    assert found.shape == (6, 2, 32)
    assert torch.allclose(found.double(), judge_norm(wide[:, 1:3], weight, 1e-6), rtol=2e-6, atol=1e-7)


def test_a_norm_keeps_nan_and_zero(ops: ModuleType) -> None:
    x = torch.zeros(2, 40)
    x[1, 39] = float("nan")
    found = ops.rms_norm(x, torch.ones(40), 1e-6)
    assert torch.equal(found[0], torch.zeros(40)) and found[1].isnan().all()


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128])
def test_rotation_turns_pairs_half_a_head_apart(ops: ModuleType, head_dim: int) -> None:
    wide = make(11, 7, head_dim)
    cos, sin = make_rotation(11, head_dim)
    found = ops.rotate(wide[:, 2:5], cos, sin)
    assert torch.allclose(found.double(), judge_rotation(wide[:, 2:5], cos, sin), atol=1e-6, rtol=0)
    assert torch.equal(found, ops.rotate(wide[:, 2:5], cos[:, None], sin[:, None]))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(6, 2), (64, 32), (80, 24), (128, 126)])
def test_partial_rotation_leaves_the_rest_of_a_head(ops: ModuleType, head_dim: int, rotary_dim: int) -> None:
    heads, (cos, sin) = make(11, 3, head_dim), make_rotation(11, rotary_dim)
    found = ops.rotate(heads, cos, sin)
    assert torch.equal(found[..., :rotary_dim], ops.rotate(heads[..., :rotary_dim].contiguous(), cos, sin))
    assert torch.equal(found[..., rotary_dim:], heads[..., rotary_dim:])
    cache, slots = torch.zeros(2, 2, 8, 1, head_dim), torch.arange(11)
    query = ops.rotate_and_write_kv(heads, cos, sin, cache, slots)
    assert torch.equal(query, found[:, :1]) and torch.equal(cache.flatten(1, 2)[0, :11], found[:, 1:2])


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [6, 64])
def test_one_pass_from_qkv_to_the_cache(ops: ModuleType, head_dim: int, has_norms: bool) -> None:
    qkv = make(9, 8 + 2, 4 + 2 + 2, head_dim)[4, :9]
    num_tokens = qkv.shape[0]
    cos, sin = make_rotation(num_tokens, head_dim)
    norms = (make(head_dim, seed=3), make(head_dim, seed=4)) if has_norms else (None, None)
    cache = torch.full((2, 5, 4, 2, head_dim), 7.0)
    slots = torch.tensor([3, 0, 19, 8, 9, 10, 11, 4, 5])
    query = ops.rotate_and_write_kv(qkv, cos, sin, cache, slots, *norms, 1e-6)
    raw_query, raw_key, value = qkv.split((4, 2, 2), dim=1)
    if has_norms:
        raw_query, raw_key = judge_norm(raw_query, norms[0], 1e-6), judge_norm(raw_key, norms[1], 1e-6)
    assert torch.allclose(query.double(), judge_rotation(raw_query, cos, sin), atol=2e-6, rtol=0)
    flat = cache.flatten(1, 2)
    assert torch.allclose(flat[0, slots].double(), judge_rotation(raw_key, cos, sin), atol=2e-6, rtol=0)
    assert torch.equal(flat[1, slots], value)
    others = [slot for slot in range(20) if slot not in slots.tolist()]
    assert (flat[:, others] == 7.0).all()


def test_keys_and_values_go_to_their_slots_and_nowhere_else(ops: ModuleType) -> None:
    wide = make(300, 9, 16)
    key, value = wide[:, 3:6], wide[:, 6:9]
    cache = torch.zeros(2, 50, 8, 3, 16)
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:300]
    ops.write_kv(key, value, cache, slots)
    expected = torch.zeros(2, 400, 3, 16)
    expected[0, slots], expected[1, slots] = key, value
    assert torch.equal(cache.flatten(1, 2), expected)


def test_a_bfloat16_cache_gets_the_nearest_numbers(ops: ModuleType) -> None:
    """Ties to even, overflow to infinity, NaN stays NaN whatever its bits: torch's own rounding."""
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64)  # every exponent, many mantissas
    ties = torch.tensor([0x3F808000, 0x3F818000, 0xBF808000, 0x00008000, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF])
    numbers = torch.cat([bits, ties]).to(torch.int32).view(torch.float32)[-64 * 1024 :].view(-1, 2, 32)
    key, value = numbers, numbers.flip(0)
    cache = torch.zeros(2, len(key), 1, 2, 32, dtype=torch.bfloat16)
    slots = torch.arange(len(key))
    ops.write_kv(key, value, cache, slots)
    for found, wide in zip(cache.flatten(1, 2), (key, value), strict=True):
        expected = wide.to(torch.bfloat16)
        assert torch.equal(found.isnan(), wide.isnan())
        found, expected = found.nan_to_num(0.0).view(torch.int16), expected.nan_to_num(0.0).view(torch.int16)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("has_norms", [False, True])
def test_one_pass_writes_a_bfloat16_cache_as_two_do(ops: ModuleType, has_norms: bool) -> None:
    qkv, (cos, sin) = make(9, 8, 64), make_rotation(9, 64)
    norms = (make(64, seed=3), make(64, seed=4)) if has_norms else (None, None)
    slots = torch.tensor([3, 0, 19, 8, 9, 10, 11, 4, 5])
    wide, narrow = torch.zeros(2, 5, 4, 2, 64), torch.zeros(2, 5, 4, 2, 64, dtype=torch.bfloat16)
    query = ops.rotate_and_write_kv(qkv, cos, sin, wide, slots, *norms, 1e-6)
    assert torch.equal(query, ops.rotate_and_write_kv(qkv, cos, sin, narrow, slots, *norms, 1e-6))
    assert torch.equal(narrow, wide.to(torch.bfloat16))


@pytest.mark.parametrize("slot", [-1, 400])
def test_a_slot_outside_the_cache_is_refused(ops: ModuleType, slot: int) -> None:
    cache, heads = torch.zeros(2, 50, 8, 1, 4), torch.ones(2, 1, 4)
    with pytest.raises(IndexError):
        ops.write_kv(heads, heads, cache, torch.tensor([0, slot]))
    cos, sin = make_rotation(2, 4)
    with pytest.raises(IndexError):
        ops.rotate_and_write_kv(torch.ones(2, 3, 4), cos, sin, cache, torch.tensor([0, slot]))
    assert (cache == 0).all()


@pytest.mark.parametrize("size", [1, 7, 1536])
def test_the_gate_is_silu_at_every_magnitude(ops: ModuleType, size: int) -> None:
    gate_up = make(7, 2 * size)
    gate_up[:, :size] *= torch.tensor([1e-40, 1e-3, 1.0, 10.0, 50.0, 1e4, 1e30])[:, None]
    gate, up = gate_up.double().chunk(2, -1)
    expected = gate * torch.where(gate > -700, 1 / (1 + torch.exp(-gate.clamp(min=-700))), 0) * up
    assert torch.allclose(ops.gate_and_multiply(gate_up, "silu").double(), expected, rtol=2e-6, atol=1e-35)


def test_the_gate_passes_nan_and_infinity(ops: ModuleType) -> None:
    found = ops.gate_and_multiply(torch.tensor([[float("nan"), float("inf"), 0.0, 1.0, 2.0, 3.0]]), "silu")
    assert found[0, 0].isnan() and found[0, 1] == float("inf") and found[0, 2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_every_activation_gates(ops: ModuleType, activation: str, dtype: torch.dtype) -> None:
    gate, up = torch.linspace(-4, 4, 33), torch.randn(33)
    found = ops.gate_and_multiply(torch.cat([gate, up])[None].to(dtype), activation)
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    expected = {
        "silu": gate * gate.sigmoid(),
        "swish": gate * gate.sigmoid(),
        "gelu": gate * (1 + torch.erf(gate / 2**0.5)) / 2,
        "relu": gate.clamp(min=0),
    }.get(activation, gate * (1 + tanh) / 2)
    assert found.dtype == dtype and found.shape == (1, 33)
    torch.testing.assert_close(
        found[0].float(),
        expected * up,
        rtol=0.03 if dtype != torch.float32 else 1e-5,
        atol=1e-2 if dtype != torch.float32 else 1e-6,
    )


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations_at_every_magnitude(ops: ModuleType, activation: str) -> None:
    x = torch.cat([make(4, 333) * factor for factor in (1e-30, 1e-3, 1.0, 3.0, 50.0, 1e6)])
    wide = x.double()
    u = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    expected = {
        "silu": wide * wide.sigmoid(),
        "gelu": wide * torch.special.erfc(-wide / 2**0.5) / 2,
        "gelu_pytorch_tanh": wide * (2 * u).sigmoid(),
        "relu": wide.clamp(min=0),
    }[activation]
    found = ops.activate(x, activation)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=1e-6)
    gated = ops.gate_and_multiply(torch.cat([x, torch.ones_like(x)], -1), activation)
    torch.testing.assert_close(gated, found, rtol=3e-6, atol=1e-6)
    edges = ops.activate(torch.tensor([[torch.nan, 1e30, -1e30, 0.0]]), activation)[0]
    assert edges[0].isnan() and edges[1] == edges.new_tensor(1e30) and (edges[2:] == 0).all()


def test_layer_ops_do_not_depend_on_threads_or_row_mates() -> None:
    x, weight, gate_up = make(200, 576), make(576, seed=1), make(200, 2 * 1000, seed=2)

    def compute(rows: slice) -> list[torch.Tensor]:
        return [api.rms_norm(x[rows], weight, 1e-6), api.gate_and_multiply(gate_up[rows], "silu")]

    torch.set_num_threads(1)
    alone = compute(slice(0, 200))
    for num_threads in (2, 8):
        torch.set_num_threads(num_threads)
        assert all(map(torch.equal, alone, compute(slice(0, 200))))
    assert all(torch.equal(whole[17:18], single) for whole, single in zip(alone, compute(slice(17, 18)), strict=True))


def test_instruction_sets_give_the_same_bits_in_layer_ops(
    on_each_variant: Callable[[Callable[[], Any]], list[Any]],
) -> None:
    x, weight = make(4, 583), make(583, seed=1)
    cos, sin = make_rotation(4, 22)

    def compute() -> list[np.ndarray]:
        turned = api.rotate(x[:, :110].reshape(4, 5, 22), cos, sin)
        gated = [api.gate_and_multiply(x[:, :582], name) for name in ("silu", "gelu", "gelu_new", "relu")]
        outputs = api.rms_norm(x, weight, 1e-6), *gated, turned
        return [output.numpy() for output in outputs]

    first, *others = on_each_variant(compute)
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other, strict=True))
