"""Mistral: Llama with a sliding window on every layer, where the checkpoint has one."""

from typing import Any

from vllm.checkpoints.fields import MAX_LENGTH, Fields
from vllm.config import TransformerConfig
from vllm.model_executor.families.llama import Llama

_DEFAULT_WINDOW = 4096


class Mistral(Llama):
    """Null as sliding_window means none; a silent config.json means 4,096."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    gguf_architecture = None  # llama.cpp writes them as "llama"
    default_max_position_embeddings = 131072
    default_num_key_value_heads = 8

    def read_biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        return False, False, False

    def read_windows(self, fields: Fields, num_layers: int) -> list[int | None]:
        if fields.values.get("sliding_window", _DEFAULT_WINDOW) is None:
            return [None] * num_layers
        return [fields.read_int("sliding_window", _DEFAULT_WINDOW, high=MAX_LENGTH)] * num_layers

    def make_hf_config(self, config: TransformerConfig) -> dict[str, Any]:
        return super().make_hf_config(config) | {"sliding_window": config.layers[0].attention.sliding_window}
