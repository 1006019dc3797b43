"""Llama, and what its relatives (Mistral, Qwen2, Qwen3, Phi-3) share with it."""

import pathlib
from typing import Any

from vllm.checkpoints.fields import MAX_HEADS, MAX_LAYERS, MAX_LENGTH, MAX_VOCAB_SIZE, MAX_WIDTH, Fields
from vllm.checkpoints.gguf_file import GgufFile, find_gguf_dtype
from vllm.checkpoints.hf_config import read_hf_dtype
from vllm.checkpoints.rope_config import read_gguf_rope, read_rope
from vllm.config import AttentionConfig, LayerConfig, MlpConfig, RopeConfig, TransformerConfig
from vllm.exceptions import ModelLoadError
from vllm.model_executor.families.family import Family

_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


class Llama(Family):
    """Grouped-query attention with rotation, a gated feed-forward part, RMS norms before both.

    The attributes are what transformers takes a silent config.json to mean.
    """

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    gguf_architecture: str | None = "llama"
    has_paired_gguf_rows = True
    default_max_position_embeddings = 2048
    default_num_key_value_heads: int | None = None  # None: as many as heads
    default_head_dim: int | None = None  # None: hidden_size // num_attention_heads
    default_rms_norm_eps = 1e-6
    default_bos_token_id: int | None = 1
    default_eos_token_id: int | None = 2
    has_qk_norm = False
    is_fused = False  # the checkpoint holds q, k and v, and gate and up, as one matrix each
    rotates_part = False  # partial_rotary_factor is read

    def read_biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        """Return whether q, k and v, the attention's output, and the feed-forward part have biases."""
        attention_bias = fields.read_bool("attention_bias", False)
        return attention_bias, attention_bias, fields.read_bool("mlp_bias", False)

    def read_windows(self, fields: Fields, num_layers: int) -> list[int | None]:
        """Return each layer's sliding window."""
        return [None] * num_layers

    def read_hf_config(self, fields: Fields, folder: pathlib.Path) -> TransformerConfig:
        num_layers = fields.read_int("num_hidden_layers", high=MAX_LAYERS)
        num_heads = fields.read_int("num_attention_heads", high=MAX_HEADS)
        hidden_size = fields.read_int("hidden_size", high=MAX_WIDTH)
        trained = fields.read_int("max_position_embeddings", self.default_max_position_embeddings, high=MAX_LENGTH)
        # Null means as many as heads; an absent field the family's own default.
        is_stated = fields.has("num_key_value_heads")
        default_kv_heads = num_heads if is_stated else self.default_num_key_value_heads or num_heads
        default_head_dim = self.default_head_dim or max(1, hidden_size // num_heads)
        head_dim = fields.read_int("head_dim", default_head_dim, high=MAX_WIDTH)
        qkv_bias, out_bias, mlp_bias = self.read_biases(fields)
        attention = {
            "num_heads": num_heads,
            "num_kv_heads": fields.read_int("num_key_value_heads", default_kv_heads, high=MAX_HEADS),
            "head_dim": head_dim,
            "qkv_bias": qkv_bias,
            "out_bias": out_bias,
            "has_qk_norm": self.has_qk_norm,
            "is_fused": self.is_fused,
        }
        mlp = MlpConfig(
            size=fields.read_int("intermediate_size", high=MAX_WIDTH),
            activation=fields.read_str("hidden_act", "silu"),
            bias=mlp_bias,
            is_fused=self.is_fused,
        )
        config = TransformerConfig(
            architecture=self.architecture,
            model=self.model,
            vocab_size=fields.read_int("vocab_size", high=MAX_VOCAB_SIZE),
            hidden_size=hidden_size,
            max_position_embeddings=trained,
            layers=make_layers(attention, mlp, self.read_windows(fields, num_layers)),
            ropes=(read_rope(fields, trained, head_dim, allows_part=self.rotates_part),),
            norm_eps=fields.read_float("rms_norm_eps", self.default_rms_norm_eps),
            tie_word_embeddings=fields.read_bool("tie_word_embeddings", False),
            bos_token_id=fields.read_token_id("bos_token_id", self.default_bos_token_id),
            eos_token_id=fields.read_token_id("eos_token_id", self.default_eos_token_id),
            dtype=read_hf_dtype(fields, folder),
        )
        return check_config(config, fields.where)

    def read_gguf_config(self, gguf: GgufFile, fields: Fields) -> TransformerConfig:
        where, tensors = fields.where, gguf.tensors
        if experts := fields.read_int("expert_count", 0, low=0, high=1 << 20):
            raise fields.error("expert_count", experts, "is not served (mixture of experts)")
        num_heads = fields.read_int("attention.head_count", high=MAX_HEADS)
        hidden_size = fields.read_int("embedding_length", high=MAX_WIDTH)
        head_dim = self._read_gguf_head_dim(fields, max(1, hidden_size // num_heads))
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelLoadError(f"{where}: tensor 'token_embd.weight' is missing or not a matrix")
        if embedding.shape[0] > MAX_VOCAB_SIZE:
            raise ModelLoadError(
                f"{where}: token_embd.weight has {embedding.shape[0]} rows; at most {MAX_VOCAB_SIZE} are served"
            )
        has_window = fields.has("attention.sliding_window") and fields.read_int(
            "attention.sliding_window", 0, low=0, high=MAX_LENGTH
        )
        attention = {
            "num_heads": num_heads,
            "num_kv_heads": fields.read_int("attention.head_count_kv", num_heads, high=MAX_HEADS),
            "head_dim": head_dim,
            "qkv_bias": "blk.0.attn_q.bias" in tensors,
            "out_bias": "blk.0.attn_output.bias" in tensors,
            "has_qk_norm": self.has_qk_norm,
            "is_fused": self.is_fused,
        }
        mlp = MlpConfig(
            size=fields.read_int("feed_forward_length", high=MAX_WIDTH),
            bias="blk.0.ffn_down.bias" in tensors,
            is_fused=self.is_fused,
        )
        window = fields.read_int("attention.sliding_window", high=MAX_LENGTH) if has_window else None
        num_layers = fields.read_int("block_count", high=MAX_LAYERS)
        tokens = Fields(gguf.metadata, where)
        config = TransformerConfig(
            architecture=self.architecture,
            model=self.model,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            max_position_embeddings=fields.read_int("context_length", high=MAX_LENGTH),
            layers=make_layers(attention, mlp, [window] * num_layers),
            ropes=(read_gguf_rope(gguf, fields, self._read_gguf_rotary_dim(fields, head_dim)),),
            norm_eps=fields.read_float("attention.layer_norm_rms_epsilon", 1e-6),
            tie_word_embeddings="output.weight" not in tensors,
            bos_token_id=tokens.read_token_id("tokenizer.ggml.bos_token_id"),
            eos_token_id=tokens.read_token_id("tokenizer.ggml.eos_token_id"),
            dtype=find_gguf_dtype(gguf),
        )
        return check_config(config, where)

    @staticmethod
    def _read_gguf_head_dim(fields: Fields, default: int) -> int:
        head_dim = fields.read_int("attention.key_length", default, high=MAX_WIDTH)
        value_dim = fields.read_int("attention.value_length", head_dim, high=MAX_WIDTH)
        if value_dim != head_dim:
            raise fields.error("attention.value_length", value_dim, f"must equal the head dimension {head_dim}")
        return head_dim

    def _read_gguf_rotary_dim(self, fields: Fields, head_dim: int) -> int:
        rotary_dim = fields.read_int("rope.dimension_count", head_dim, high=MAX_WIDTH)
        if rotary_dim != head_dim and not self.rotates_part:
            raise fields.error("rope.dimension_count", rotary_dim, f"must equal the head dimension {head_dim}")
        return rotary_dim

    def make_hf_config(self, config: TransformerConfig) -> dict[str, Any]:
        layer, rope = config.layers[0], config.ropes[0]
        return {
            "intermediate_size": layer.mlp.size,
            "num_hidden_layers": len(config.layers),
            "num_attention_heads": layer.attention.num_heads,
            "num_key_value_heads": layer.attention.num_kv_heads,
            "head_dim": layer.attention.head_dim,
            "hidden_act": layer.mlp.activation,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "attention_bias": layer.attention.qkv_bias,
            "mlp_bias": layer.mlp.bias,
        }


def make_layers(attention: dict[str, Any], mlp: MlpConfig, windows: list[int | None]) -> tuple[LayerConfig, ...]:
    """Return layers that differ in their sliding windows only."""
    kinds = {
        window: LayerConfig(attention=AttentionConfig(**attention, sliding_window=window), mlp=mlp)
        for window in set(windows)
    }
    return tuple(kinds[window] for window in windows)


def check_config(config: TransformerConfig, where: str) -> TransformerConfig:
    """Return `config` when its numbers fit each other.

    Raises:
        ModelLoadError: they don't; names the fields and their values.
    """
    for rope in config.ropes:
        _check_rope(rope, where)
    for layer in dict.fromkeys(config.layers):
        heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
        if heads % kv_heads:
            raise ModelLoadError(
                f"{where}: num_attention_heads must be a multiple of num_key_value_heads; got {heads} and {kv_heads}"
            )
        if layer.attention.head_dim % 2:
            raise ModelLoadError(f"{where}: head_dim must be even; got {layer.attention.head_dim}")
        if layer.mlp.activation not in _ACTIVATIONS:
            raise ModelLoadError(
                f"{where}: hidden_act must be one of {', '.join(_ACTIVATIONS)}; got {layer.mlp.activation!r}"
            )
    return config


def _check_rope(rope: RopeConfig, where: str) -> None:
    if rope.rotary_dim % 2:
        raise ModelLoadError(f"{where}: head_dim must be even (rotation turns pairs); got {rope.rotary_dim}")
    if not 1 < rope.theta <= 1e30:
        raise ModelLoadError(f"{where}: rope_theta must be above 1 (and at most 1e30); got {rope.theta}")
    if rope.rotary_dim == 2 and (rope.scaling or {}).get("rope_type") == "dynamic":
        raise ModelLoadError(f"{where}: dynamic rope scaling needs a head_dim above 2")
