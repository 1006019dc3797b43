"""Qwen3: Qwen2 without its biases, with a norm on each head's q and k."""

from vllm.checkpoints.fields import Fields
from vllm.model_executor.families.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Heads are 128 wide unless config.json says otherwise."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    gguf_architecture = "qwen3"
    default_head_dim = 128
    has_qk_norm = True

    def read_biases(self, fields: Fields) -> tuple[bool, bool, bool]:
        attention_bias = fields.read_bool("attention_bias", False)
        return attention_bias, attention_bias, False
