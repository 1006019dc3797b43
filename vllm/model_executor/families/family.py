"""What a model family is: from config.json or GGUF metadata to a `TransformerConfig`, and the names of weights."""

import pathlib
import re
from abc import ABC, abstractmethod
from typing import Any

from vllm.checkpoints.fields import Fields
from vllm.checkpoints.gguf_file import GgufFile
from vllm.config import TransformerConfig

# GGUF names of the parts of a layer and of a decoder → Hugging Face's names of the same parts in Llama.
GGUF_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


class Family(ABC):
    """One family of decoders.

    A family is added by a file with a subclass and a line in vllm/model_executor/models/registry.py; outside of this
    package by `ModelRegistry.register_model`. What a subclass does not override is Llama's.
    """

    architecture: str  # as config.json's `architectures` names it
    model_type: str  # as config.json's `model_type` names it
    gguf_architecture: str | None = None  # as general.architecture names it; None: .gguf files of it are not served
    has_paired_gguf_rows = False  # .gguf files hold rows of q and k in pairs (0, 1), (2, 3), … of a head
    model = "vllm.model_executor.models.decoder:DecoderForCausalLM"  # "module:Class" of what computes it
    gguf_layer_names: dict[str, str] = GGUF_LAYER_NAMES

    @abstractmethod
    def read_hf_config(self, fields: Fields, folder: pathlib.Path) -> TransformerConfig:
        """Return the decoder's shape from config.json.

        Raises:
            ModelLoadError: a feature that is not served, or a value that can't be; names the field.
        """

    @abstractmethod
    def read_gguf_config(self, gguf: GgufFile, fields: Fields) -> TransformerConfig:
        """Return the decoder's shape from metadata (`fields`: those of this architecture), and from the tensors.

        Raises:
            ModelLoadError: a feature that is not served, or a value that can't be; names the field.
        """

    @abstractmethod
    def make_hf_config(self, config: TransformerConfig) -> dict[str, Any]:
        """Return what config.json says of `config`, its own kind of fields only."""

    def name_gguf_weight(self, name: str) -> str | None:
        """Return the Hugging Face name of a GGUF tensor; None for one that is no weight of this family."""
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None:
            return GGUF_TOP_NAMES.get(name)
        layer, part, kind = match.groups()
        names = self.gguf_layer_names
        return f"model.layers.{int(layer)}.{names[part]}.{kind}" if part in names else None
