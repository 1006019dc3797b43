"""Tiny .gguf files from tiny Hugging Face folders, by the gguf package's writer, as llama.cpp's converter does."""

import json
import pathlib
from typing import Any

import gguf
import gguf.quants
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def write_tiny_gguf(
    folder: pathlib.Path,
    path: pathlib.Path,
    quantization: str = "F32",
    extra: dict[str, np.ndarray] | None = None,
    numbers: dict[str, Any] | None = None,
    others: dict[str, str] | None = None,
) -> pathlib.Path:
    """Write the model of `folder` (one safetensors file) as `path`; matrices in `quantization`, vectors in F32.

    others: part of a matrix's name → its own quantization;
    extra: further F32 tensors; numbers: further metadata (int, float or str), without the architecture's prefix.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = {"llama": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3"}[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"t{i}" for i in range(4)])
    for key, value in (numbers or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    for name, weight in load_file(folder / "model.safetensors").items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weight = _to_pairs(weight, heads)
        if weight.ndim == 1:
            writer.add_tensor(to_gguf_name(name), weight.astype(np.float32))
        else:
            own = [other for part, other in (others or {}).items() if part in name]
            kind = gguf.GGMLQuantizationType[[quantization, *own][-1]]
            writer.add_tensor(to_gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _to_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: components i and i + half of a head become neighbours."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))
