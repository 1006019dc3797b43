"""The decoders that this engine serves, and where each differs from Llama when its config.json is silent."""

from typing import NamedTuple


class ArchitectureTraits(NamedTuple):
    """What an architecture's name implies; None in a default means "as many as the attention heads" or "derived"."""

    model_type: str  # in config.json
    default_max_position_embeddings: int
    default_num_key_value_heads: int | None = None
    default_head_dim: int | None = None
    default_bos_token_id: int | None = None
    default_eos_token_id: int | None = None
    has_qkv_bias: bool | None = None  # None: config.json's attention_bias says
    has_out_bias: bool | None = None  # None: attention_bias says
    reads_mlp_bias: bool = False
    has_qk_norm: bool = False
    window_rule: str = "none"  # "none", "always" (Mistral), "by_layer" (Qwen)
    default_sliding_window: int | None = None


SERVED_ARCHITECTURES: dict[str, ArchitectureTraits] = {
    "LlamaForCausalLM": ArchitectureTraits(
        model_type="llama",
        default_max_position_embeddings=2048,
        default_bos_token_id=1,
        default_eos_token_id=2,
        reads_mlp_bias=True,
    ),
    "MistralForCausalLM": ArchitectureTraits(
        model_type="mistral",
        default_max_position_embeddings=131072,
        default_num_key_value_heads=8,
        default_bos_token_id=1,
        default_eos_token_id=2,
        has_qkv_bias=False,
        has_out_bias=False,
        window_rule="always",
        default_sliding_window=4096,
    ),
    "Qwen2ForCausalLM": ArchitectureTraits(
        model_type="qwen2",
        default_max_position_embeddings=32768,
        default_num_key_value_heads=32,
        has_qkv_bias=True,
        has_out_bias=False,
        window_rule="by_layer",
        default_sliding_window=4096,
    ),
    "Qwen3ForCausalLM": ArchitectureTraits(
        model_type="qwen3",
        default_max_position_embeddings=32768,
        default_num_key_value_heads=32,
        default_head_dim=128,
        has_qk_norm=True,
        window_rule="by_layer",
        default_sliding_window=4096,
    ),
}

# general.architecture in a .gguf file → the architecture that computes it.
GGUF_ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def describe_served() -> str:
    """Return the list that error messages end with."""
    return f"served: {', '.join(SERVED_ARCHITECTURES)}; in .gguf files: {', '.join(GGUF_ARCHITECTURES)}"
