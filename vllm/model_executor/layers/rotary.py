"""Rotary position embedding and the ways to stretch it: linear, dynamic, yarn, llama3, given factors.

Component pairs (i, i + rotary_dim/2) of each head's query and key are turned by position · inverse_frequency[i].
The turn is a function of the position alone, so cached keys stay valid for every request that shares them.
"""

import math
from typing import Any, NamedTuple

import torch

from vllm.config import RopeConfig
from vllm.ops.program import RotationTable
from vllm.ops.program_recorder import StepInput

_MIN_TABLE_POSITIONS = 1024


class RotaryFrequencies(NamedTuple):
    """inverse [rotary_dim / 2] float32 (radians a position), and what cosine and sine are multiplied by."""

    inverse: torch.Tensor
    attention_factor: float


class Rotation(NamedTuple):
    """Cosine and sine of a step's positions, laid out so that a rotation is x · cos + swap_halves(x) · sin."""

    cos: torch.Tensor  # [num_tokens, 1, rotary_dim] float32
    sin: torch.Tensor  # [num_tokens, 1, rotary_dim] float32; the first half is negated


class RotaryEmbedding:
    """Makes each step's `Rotation` once; all layers share it. Holds no weights: sleeping and loading pass it by."""

    def __init__(self, rope: RopeConfig, trained_len: int, max_model_len: int) -> None:
        frequencies = compute_frequencies(rope, trained_len, max_model_len)
        self.inverse = frequencies.inverse  # follows the positions' device
        self.attention_factor = frequencies.attention_factor
        self._max_positions = max_model_len
        self._table = torch.empty(0, 2 * rope.rotary_dim, device="cpu")  # models are built on the meta device

    @property
    def max_table_bytes(self) -> int:
        return self._max_positions * self._table.shape[1] * self._table.itemsize

    def get_table(self, num_positions: int) -> torch.Tensor:  # [num_positions or more, 2 · rotary_dim] float32, CPU
        """Return the cosines and sines of each position from 0 on, as `make_rotation` gives them; kept, and grown."""
        first = self._table.shape[0]
        if num_positions > first:
            end = max(num_positions, min(2 * first, self._max_positions), _MIN_TABLE_POSITIONS)
            rotation = self.make_rotation(torch.arange(first, end, device="cpu"))
            self._table = torch.cat((self._table, torch.cat(rotation, -1)[:, 0]))
        return self._table

    def make_rotation(self, positions: torch.Tensor) -> Rotation:  # [num_tokens] int64
        if isinstance(positions, StepInput):
            table = RotationTable(self.get_table, self._table.shape[1] // 2)
            return Rotation(*positions.recorder.get_rotation(positions, table))
        if self.inverse.device != positions.device:
            self.inverse = self.inverse.to(positions.device)
        angles = positions.float()[:, None] * self.inverse  # float32 like the checkpoints' own training code
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def compute_frequencies(rope: RopeConfig, trained_len: int, max_model_len: int) -> RotaryFrequencies:
    """Return the frequencies that `rope.scaling` asks for; trained_len is the checkpoint's max_position_embeddings.

    Dynamic scaling depends on a length: here on the engine's max_model_len, fixed for its life. Up to
    max_position_embeddings that is no scaling at all; beyond it, every sequence is computed as transformers computes
    one of max_model_len tokens.
    """
    scaling = rope.scaling or {}
    match scaling.get("rope_type", "default"):
        case "default":
            return RotaryFrequencies(_default_inverse(rope.theta, rope.rotary_dim), 1.0)
        case "linear":
            inverse = _default_inverse(rope.theta, rope.rotary_dim) / scaling["factor"]
            return RotaryFrequencies(inverse, 1.0)
        case "dynamic":
            base = _stretch_base(rope, scaling["factor"], trained_len, max_model_len)
            return RotaryFrequencies(_default_inverse(base, rope.rotary_dim), 1.0)
        case "llama3":
            return RotaryFrequencies(_llama3_inverse(rope, scaling), 1.0)
        case "yarn":
            return RotaryFrequencies(_yarn_inverse(rope, scaling), _yarn_attention_factor(scaling))
        case "frequency_factors":
            factors = torch.tensor(scaling["factors"], dtype=torch.float32, device="cpu")
            return RotaryFrequencies(_default_inverse(rope.theta, rope.rotary_dim) / factors, 1.0)
        case other:
            raise AssertionError(f"read_rope let rope_type {other!r} through")


def _default_inverse(base: float, head_dim: int) -> torch.Tensor:  # [rotary_dim / 2] float32
    """base^(−2i / head_dim), in float32 step by step: a rounding here is multiplied by the position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / (base**exponents)


def _stretch_base(rope: RopeConfig, factor: float, trained: int, max_model_len: int) -> float:
    """NTK-aware scaling: a larger base lets the slowest pair cover the longer sequence; fast pairs hardly change."""
    dim = rope.rotary_dim
    length = max(max_model_len, trained)
    growth: float = (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    return rope.theta * growth


def _llama3_inverse(rope: RopeConfig, scaling: dict[str, Any]) -> torch.Tensor:  # [rotary_dim / 2] float32
    """Long waves are slowed by the factor, short ones left, those between blended by how many turns they make."""
    inverse = _default_inverse(rope.theta, rope.rotary_dim)
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    width = (high - low) or 1e-6  # a step where both are one
    kept = ((turns - low) / width).clamp(0.0, 1.0)
    return torch.lerp(inverse / scaling["factor"], inverse, kept)


def _yarn_inverse(rope: RopeConfig, scaling: dict[str, Any]) -> torch.Tensor:  # [rotary_dim / 2] float32
    """YaRN (arXiv 2309.00071, §3.2): pairs of more than beta_fast turns keep their speed, below beta_slow they slow."""
    base, dim = rope.theta, rope.rotary_dim
    trained = scaling["original_max_position_embeddings"]

    def find_pair(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = find_pair(scaling.get("beta_fast") or 32), find_pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001  # a step where both fall on one pair
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    slowed = ((pairs - first) / width).clamp(0.0, 1.0)
    inverse = _default_inverse(base, dim)
    return torch.lerp(inverse, inverse / scaling["factor"], slowed)


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    """Attention sharpens with the stretch: 0.1 · ln(factor) + 1 unless the checkpoint states it."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def sharpen(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return sharpen(scaling["mscale"]) / sharpen(scaling["mscale_all_dim"])
    return sharpen(1.0)
