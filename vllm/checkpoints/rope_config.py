"""Rotary parameters: `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old), normalised and checked."""

import math
from typing import Any, NamedTuple

from vllm.checkpoints.fields import Fields

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


class Rope(NamedTuple):
    """What `TransformerConfig` holds of it; scaling has rope_type and that type's own parameters only."""

    theta: float
    scaling: dict[str, Any] | None


def read_rope(fields: Fields, max_position_embeddings: int) -> Rope:
    """Return the rotary parameters; where both spellings stand, `rope_scaling` wins, as in transformers.

    Raises:
        ModelLoadError: a kind of scaling that is not served, or a parameter that is missing or out of range.
    """
    given = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise fields.error("rope_parameters", given, "must be an object")
    own = Fields(given, f"{fields.where}: rope_parameters")
    theta = own.read_float("rope_theta", fields.read_float("rope_theta", _DEFAULT_THETA))
    partial = own.read_float("partial_rotary_factor", fields.read_float("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise own.error("partial_rotary_factor", partial, "must be 1 (rotating a part of each head is not served)")
    kind = own.values.get("rope_type") or own.values.get("type") or "default"
    if kind == "default":
        if any(isinstance(value, dict) for value in given.values()):
            raise own.error("rope_type", sorted(given), "per kind of layer is not served")
        return Rope(theta, None)
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
    return Rope(theta, scaling)


def _check_positive(fields: Fields, name: str, value: Any, low: float = 1e-9) -> float | int:
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= 1e12:
        raise fields.error(name, value, "must be a finite number above 0")
    return float(value) if isinstance(value, float) else int(value)
