"""GGUF metadata (`llama.*`, `qwen2.*`, `qwen3.*`) as a `TransformerConfig`, and GGUF tensor names as Hugging Face's."""

import re
from typing import Any

import numpy as np

from vllm.checkpoints.architectures import GGUF_ARCHITECTURES, SERVED_ARCHITECTURES, describe_served
from vllm.checkpoints.fields import MAX_HEADS, MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, Fields
from vllm.checkpoints.gguf_file import GgmlType, GgufFile
from vllm.config import TransformerConfig
from vllm.exceptions import ModelLoadError

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
FREQUENCY_FACTORS = "rope_freqs.weight"  # one divisor a rotary frequency: Llama 3's scaling, already worked out


def to_hf_name(name: str) -> str | None:
    """Return the Hugging Face name of GGUF tensor `name`; None for one that is no weight of a served decoder."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return _TOP_NAMES.get(name)
    layer, part, kind = match.groups()
    return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else None


def make_generation_config(gguf: GgufFile) -> dict[str, Any]:
    """Return what generation_config.json would say: the special ids in the tokenizer's metadata."""
    found: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        value = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int:
            found[name] = value
    ends = [gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(end for end in ends if type(end) is int))
    if ids:
        found["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return found


def read_gguf_config(gguf: GgufFile) -> TransformerConfig:
    """Return the decoder's shape from the metadata, and from the tensors what only they say.

    Raises:
        ModelLoadError: an architecture or a feature that is not served, or a value that can't be.
    """
    where, metadata, tensors = str(gguf.path), gguf.metadata, gguf.tensors
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in GGUF_ARCHITECTURES:
        raise ModelLoadError(f"{where}: general.architecture {kind!r} is not served ({describe_served()})")
    architecture = GGUF_ARCHITECTURES[kind]
    fields = Fields(metadata, where, prefix=f"{kind}.")
    if fields.read_int("expert_count", 0, low=0, high=1 << 20):
        raise fields.error("expert_count", metadata[f"{kind}.expert_count"], "is not served (mixture of experts)")
    num_heads = fields.read_int("attention.head_count", high=MAX_HEADS)
    hidden_size = fields.read_int("embedding_length", high=MAX_WIDTH)
    head_dim = _read_head_dim(fields, hidden_size, num_heads)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{where}: tensor 'token_embd.weight' is missing or not a matrix")
    if embedding.shape[0] > MAX_VOCAB_SIZE:
        raise ModelLoadError(
            f"{where}: token_embd.weight has {embedding.shape[0]} rows; at most {MAX_VOCAB_SIZE} are served"
        )
    window = metadata.get(f"{kind}.attention.sliding_window")
    return TransformerConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.read_int("feed_forward_length", high=MAX_WIDTH),
        num_hidden_layers=fields.read_int("block_count", high=MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=fields.read_int("attention.head_count_kv", num_heads, high=MAX_HEADS),
        head_dim=head_dim,
        max_position_embeddings=fields.read_int("context_length", high=1 << 40),
        rms_norm_eps=fields.read_float("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=fields.read_float("rope.freq_base", 10000.0),
        rope_scaling=_read_scaling(gguf, fields, head_dim),
        tie_word_embeddings="output.weight" not in tensors,
        sliding_window=fields.read_int("attention.sliding_window", high=1 << 40) if window else None,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=SERVED_ARCHITECTURES[architecture].has_qk_norm,
        bos_token_id=Fields(metadata, where).read_token_id("tokenizer.ggml.bos_token_id"),
        eos_token_id=Fields(metadata, where).read_token_id("tokenizer.ggml.eos_token_id"),
        dtype=_find_dtype(gguf),
    )


def _read_head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.read_int("attention.key_length", max(1, hidden_size // num_heads), high=MAX_WIDTH)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = fields.read_int(name, head_dim, high=MAX_WIDTH)
        if other != head_dim:
            raise fields.error(name, other, f"must equal the head dimension {head_dim}")
    return head_dim


def _read_scaling(gguf: GgufFile, fields: Fields, head_dim: int) -> dict[str, Any] | None:
    if FREQUENCY_FACTORS in gguf.tensors:
        tensor = gguf.tensors[FREQUENCY_FACTORS]
        if tensor.type != GgmlType.F32 or tensor.shape != (head_dim // 2,):
            got = f"{tensor.type.name} {list(tensor.shape)}"
            raise ModelLoadError(f"{fields.where}: {FREQUENCY_FACTORS} must be F32 [{head_dim // 2}]; got {got}")
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
    trained = fields.read_int("context_length", high=1 << 40)
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.read_int(
            "rope.scaling.original_context_length", trained, high=1 << 40
        ),
        "truncate": True,
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if fields.has(f"rope.scaling.{key}"):
            scaling[name] = fields.read_float(f"rope.scaling.{key}")
    return scaling


def _find_dtype(gguf: GgufFile) -> str:
    """Return the type of most of the weights' bytes; quantised ones are computed in float32, which loses nothing."""
    sizes: dict[GgmlType, int] = {}
    for tensor in gguf.tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    most = max(sizes, key=lambda kind: sizes[kind])
    return {GgmlType.BF16: "bfloat16", GgmlType.F16: "float16"}.get(most, "float32")
