"""Qwen2: Llama with biases on q, k and v, and a sliding window on some layers where the checkpoint asks for it."""

from typing import Any

from vllm.checkpoints.fields import MAX_LENGTH, Fields
from vllm.config import TransformerConfig
from vllm.model_executor.families.llama import Llama

_DEFAULT_WINDOW = 4096
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class Qwen2(Llama):
    """The window is used only with use_sliding_window; layer_types, or max_window_layers, say where."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    gguf_architecture = "qwen2"
    has_paired_gguf_rows = False
    default_max_position_embeddings = 32768
    default_num_key_value_heads = 32
    default_bos_token_id = None
    default_eos_token_id = None

    def read_biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        return True, False, False

    def read_windows(self, fields: Fields, num_layers: int) -> list[int | None]:
        none: list[int | None] = [None] * num_layers
        if fields.values.get("sliding_window", _DEFAULT_WINDOW) is None:
            return none
        window = fields.read_int("sliding_window", _DEFAULT_WINDOW, high=MAX_LENGTH)
        if not fields.read_bool("use_sliding_window", False):
            return none
        layer_types = fields.values.get("layer_types")
        if layer_types is None:
            first = fields.read_int("max_window_layers", 28, low=0, high=MAX_LENGTH)
            return [window if layer >= first else None for layer in range(num_layers)]
        if (
            not isinstance(layer_types, list)
            or len(layer_types) != num_layers
            or not all(isinstance(kind, str) and kind in _LAYER_TYPES for kind in layer_types)
        ):
            raise fields.error(
                "layer_types", layer_types, f"must name one of {sorted(_LAYER_TYPES)} for each of {num_layers} layers"
            )
        return [window if kind == "sliding_attention" else None for kind in layer_types]

    def make_hf_config(self, config: TransformerConfig) -> dict[str, Any]:
        windows = [layer.attention.sliding_window for layer in config.layers]
        used = [window for window in windows if window is not None]
        values = super().make_hf_config(config) | {"sliding_window": used[0] if used else None}
        if used:
            values["use_sliding_window"] = True
            values["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
        return values
