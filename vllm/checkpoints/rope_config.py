"""Rotary parameters: `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old), normalised and checked."""

import math
from typing import Any, NamedTuple

import numpy as np

from vllm.checkpoints.fields import MAX_LENGTH, Fields
from vllm.checkpoints.gguf_file import GgmlType, GgufFile
from vllm.config import RopeConfig, TransformerConfig
from vllm.exceptions import ModelLoadError

FREQUENCY_FACTORS = "rope_freqs.weight"  # one divisor a rotary frequency: Llama 3's scaling, already worked out
_DEFAULT_THETA = 10000.0
# rope_type → the numbers it needs, each above zero.
_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}


class ModelLenLimits(NamedTuple):
    """How long a sequence may get: what max_model_len=None means, and what may be asked for."""

    default: int
    largest: int


def read_rope(fields: Fields, max_position_embeddings: int, head_dim: int, *, allows_part: bool = False) -> RopeConfig:
    """Return the rotary parameters; where both spellings stand, `rope_scaling` wins, as in transformers.

    allows_part: the family may rotate a part of each head (partial_rotary_factor).

    Raises:
        ModelLoadError: a kind of scaling that is not served, or a parameter that is missing or out of range.
    """
    given = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise fields.error("rope_parameters", given, "must be an object")
    own = Fields(given, f"{fields.where}: rope_parameters")
    theta = own.read_float("rope_theta", fields.read_float("rope_theta", _DEFAULT_THETA))
    partial = own.read_float("partial_rotary_factor", fields.read_float("partial_rotary_factor", 1.0))
    if partial != 1.0 and not allows_part:
        raise own.error("partial_rotary_factor", partial, "must be 1 (rotating a part of each head is not served)")
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim:
        raise own.error("partial_rotary_factor", partial, "must be above 0, and at most 1")
    kind = own.values.get("rope_type") or own.values.get("type") or "default"
    if kind == "default":
        if any(isinstance(value, dict) for value in given.values()):
            raise own.error("rope_type", sorted(given), "per kind of layer is not served")
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if kind not in _NEEDED:
        raise own.error("rope_type", kind, f"must be one of default, {', '.join(_NEEDED)}")

    numbers = dict(given)
    if kind in ("yarn", "llama3"):
        # A length beside the rope parameters counts more than the one among them; without either, the model's own.
        outside = fields.values.get("original_max_position_embeddings")
        numbers["original_max_position_embeddings"] = (
            outside or given.get("original_max_position_embeddings") or max_position_embeddings
        )
    if kind == "yarn" and numbers.get("factor") is None:
        numbers["factor"] = max_position_embeddings / numbers["original_max_position_embeddings"]
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in _NEEDED[kind]:
        scaling[name] = _check_positive(own, name, numbers.get(name))
    for name in _OPTIONAL.get(kind, ()):
        if numbers.get(name) is not None:
            scaling[name] = _check_positive(own, name, numbers[name], low=0.0)
    if kind == "yarn":
        scaling["truncate"] = own.read_bool("truncate", True)
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=scaling)


def _check_positive(fields: Fields, name: str, value: Any, low: float = 1e-9) -> float | int:
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= 1e12:
        raise fields.error(name, value, "must be a finite number above 0")
    return float(value) if isinstance(value, float) else int(value)


def read_gguf_rope(gguf: GgufFile, fields: Fields, rotary_dim: int) -> RopeConfig:
    """Return the rotary parameters that a .gguf file's metadata, or its table of factors, says.

    Raises:
        ModelLoadError: a kind of scaling that is not served, or a value that can't be.
    """
    theta = fields.read_float("rope.freq_base", _DEFAULT_THETA)
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=_read_gguf_scaling(gguf, fields, rotary_dim))


def _read_gguf_scaling(gguf: GgufFile, fields: Fields, rotary_dim: int) -> dict[str, Any] | None:
    if FREQUENCY_FACTORS in gguf.tensors:
        tensor = gguf.tensors[FREQUENCY_FACTORS]
        if tensor.type != GgmlType.F32 or tensor.shape != (rotary_dim // 2,):
            got = f"{tensor.type.name} {list(tensor.shape)}"
            raise ModelLoadError(f"{fields.where}: {FREQUENCY_FACTORS} must be F32 [{rotary_dim // 2}]; got {got}")
        factors = gguf.read_tensor_bytes(FREQUENCY_FACTORS).view("<f4")
        if not np.all(np.isfinite(factors) & (factors > 0)):
            raise ModelLoadError(f"{fields.where}: {FREQUENCY_FACTORS} must hold finite numbers above 0")
        return {"rope_type": "frequency_factors", "factors": factors.tolist()}
    kind = fields.read_str("rope.scaling.type", "none")
    if kind == "none":
        factor = fields.read_float("rope.scale_linear", 1.0)  # what old files wrote
        return {"rope_type": "linear", "factor": factor} if factor > 1.0 else None
    factor = fields.read_float("rope.scaling.factor", 1.0)
    if factor < 1.0:
        raise fields.error("rope.scaling.factor", factor, "must be a number from 1")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise fields.error("rope.scaling.type", kind, "must be one of none, linear, yarn")
    trained = fields.read_int("context_length", high=MAX_LENGTH)
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.read_int(
            "rope.scaling.original_context_length", trained, high=MAX_LENGTH
        ),
        "truncate": True,
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if fields.has(f"rope.scaling.{key}"):
            scaling[name] = fields.read_float(f"rope.scaling.{key}")
    return scaling


def derive_model_len_limits(transformer: TransformerConfig) -> ModelLenLimits:
    """Return the default and the largest model length.

    Yarn states how far it reaches: original length × factor. Dynamic scaling leaves lengths up to
    max_position_embeddings exactly as trained and is meant for more, so more is allowed but must be asked for. Linear
    scaling is baked into what the checkpoint calls max_position_embeddings by some authors and not by others: likewise.
    """
    trained = transformer.max_position_embeddings
    scaling = (transformer.ropes[0].scaling if transformer.ropes else None) or {}
    factor = max(1.0, float(scaling.get("factor", 1.0)))
    match scaling.get("rope_type"):
        case "yarn":
            reach = max(trained, int(scaling["original_max_position_embeddings"] * factor))
            return ModelLenLimits(reach, reach)
        case "dynamic" | "linear":
            return ModelLenLimits(trained, int(trained * factor))
        case _:
            return ModelLenLimits(trained, trained)
