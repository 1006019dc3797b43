"""Phi-3 and Phi-4: Llama with q, k and v, and gate and up, fused in the checkpoint, and a part of each head rotated."""

from typing import Any

from vllm.checkpoints.fields import MAX_LENGTH, Fields
from vllm.checkpoints.gguf_file import GgufFile
from vllm.config import TransformerConfig
from vllm.model_executor.families.family import GGUF_LAYER_NAMES
from vllm.model_executor.families.llama import Llama

_LONG_FACTORS = "rope_factors_long.weight"


class Phi3(Llama):
    """Long-context checkpoints (rope type longrope) are refused by name."""

    architecture = "Phi3ForCausalLM"
    model_type = "phi3"
    gguf_architecture = "phi3"
    gguf_layer_names = GGUF_LAYER_NAMES | {"ffn_up": "mlp.gate_up_proj"}
    has_paired_gguf_rows = False
    default_max_position_embeddings = 4096
    default_rms_norm_eps = 1e-5
    default_eos_token_id = 32000
    is_fused = True
    rotates_part = True

    def read_biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        return False, False, False

    def read_windows(self, fields: Fields, num_layers: int) -> list[int | None]:
        if fields.values.get("sliding_window") is None:
            return [None] * num_layers
        return [fields.read_int("sliding_window", high=MAX_LENGTH)] * num_layers

    def read_gguf_config(self, gguf: GgufFile, fields: Fields) -> TransformerConfig:
        if _LONG_FACTORS in gguf.tensors:
            raise fields.error("rope.scaling", _LONG_FACTORS, "of type longrope is not served")
        return super().read_gguf_config(gguf, fields)

    def make_hf_config(self, config: TransformerConfig) -> dict[str, Any]:
        attention = config.layers[0].attention
        return super().make_hf_config(config) | {
            "sliding_window": attention.sliding_window,
            "partial_rotary_factor": config.ropes[0].rotary_dim / attention.head_dim,
        }
