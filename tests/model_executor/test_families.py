"""Families read config.json and GGUF metadata as transformers does; refusals by name."""

import json
import pathlib
from typing import Any

import pytest
import transformers

from tests.checkpoints.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_tiny_model
from vllm.checkpoints import (
    Checkpoint,
    derive_model_len_limits,
    read_generation_eos_token_ids,
    resolve_checkpoint,
)
from vllm.config import TransformerConfig
from vllm.exceptions import ModelLoadError
from vllm.model_executor.models.registry import read_transformer_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def read(**changes: Any) -> TransformerConfig:
    """Read BASE with changes; a value of `...` takes the key out."""
    config = {key: value for key, value in (BASE | changes).items() if value is not ...}
    return read_transformer_config(Checkpoint(kind="hf", path="/nowhere", config=config))


ARCHITECTURES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Phi3ForCausalLM": transformers.Phi3Config,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
}


SILENT_FIELDS: list[dict[str, Any]] = [
    {},
    {"head_dim": 16, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    {"sliding_window": None},
    {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    {"eos_token_id": [7, 8], "bos_token_id": 5, "max_position_embeddings": 99},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 3e4}},
]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (architecture, changes)
        for architecture in ARCHITECTURES
        for changes in SILENT_FIELDS
        # transformers itself makes no Phi-3 with these
        if architecture != "Phi3ForCausalLM" or not {"rope_scaling", "rope_parameters"} & set(changes)
    ],
    ids=str,
)
def test_silent_fields_mean_what_transformers_takes_them_to_mean(architecture: str, changes: dict[str, Any]) -> None:
    config = {key: value for key, value in (BASE | changes | {"architectures": [architecture]}).items()}
    theirs = ARCHITECTURES[architecture](
        **{k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    )
    ours = read(**config)
    for name in ("hidden_size", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    attention, rope = ours.layers[0].attention, ours.ropes[0]
    assert ours.norm_eps == theirs.rms_norm_eps
    assert len(ours.layers) == theirs.num_hidden_layers
    assert attention.num_kv_heads == theirs.num_key_value_heads
    assert attention.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert rope.theta == theirs.rope_parameters["rope_theta"] and rope.rotary_dim == attention.head_dim
    assert (rope.scaling or {"rope_type": "default"})["rope_type"] == theirs.rope_parameters["rope_type"]
    assert ours.bos_token_id == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert ours.eos_token_id == (eos[0] if isinstance(eos, list) else eos)
    window = getattr(theirs, "sliding_window", None) if architecture != "LlamaForCausalLM" else None
    layers = getattr(theirs, "layer_types", None)
    is_windowed = [
        window is not None and (layers is None or kind == "sliding_attention") for kind in layers or [""] * 4
    ]
    assert [layer.attention.sliding_window for layer in ours.layers] == [window if w else None for w in is_windowed]


def test_null_kv_heads_mean_as_many_as_heads() -> None:
    for architecture in ARCHITECTURES:
        assert read(architectures=[architecture], num_key_value_heads=None).layers[0].attention.num_kv_heads == 6


def test_biases_and_norms_follow_the_architecture() -> None:
    def flags(**changes: Any) -> tuple[bool, bool, bool, bool]:
        layer = read(**changes).layers[0]
        return layer.attention.qkv_bias, layer.attention.out_bias, layer.mlp.bias, layer.attention.has_qk_norm

    assert flags() == (False, False, False, False)
    assert flags(attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags(architectures=["MistralForCausalLM"], attention_bias=True) == (False, False, False, False)
    assert flags(architectures=["Qwen2ForCausalLM"]) == (True, False, False, False)
    assert flags(architectures=["Qwen3ForCausalLM"], attention_bias=True) == (True, True, False, True)


def test_the_dtype_is_read_in_either_spelling_or_from_the_weights(tmp_path: pathlib.Path) -> None:
    assert read().dtype == "bfloat16"
    assert read(torch_dtype=..., dtype="float16").dtype == "float16"
    assert read(torch_dtype="torch.float32").dtype == "float32"
    folder = write_tiny_model(tmp_path, dtype="bfloat16", tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_transformer_config(resolve_checkpoint(str(folder))).dtype == "bfloat16"


def test_rope_parameters_are_found_in_every_spelling() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted = {"rope_type": "llama3", **llama3, "original_max_position_embeddings": 8192}
    length = {"original_max_position_embeddings": 8192}
    assert read(rope_scaling={"rope_type": "llama3", **llama3, **length}).ropes[0].scaling == wanted
    assert read(rope_scaling={"type": "llama3", **llama3}, **length).ropes[0].scaling == wanted
    assert read(rope_parameters={"rope_type": "llama3", "rope_theta": 7.0, **llama3, **length}).ropes[0].theta == 7.0
    assert (
        read(rope_parameters={"rope_type": "llama3", **llama3}, max_position_embeddings=8192).ropes[0].scaling == wanted
    )
    yarn = read(
        rope_scaling={"rope_type": "yarn", "factor": None},
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
    )
    scaling = yarn.ropes[0].scaling
    assert scaling is not None and scaling["factor"] == 4.0
    assert read(rope_scaling={"rope_type": "default"}).ropes[0].scaling is None


def test_the_model_length_follows_the_kind_of_scaling() -> None:
    def limits(**scaling: Any) -> tuple[int, int]:
        return tuple(derive_model_len_limits(read(max_position_embeddings=1000, rope_scaling=scaling or None)))

    assert limits() == (1000, 1000)
    assert limits(rope_type="linear", factor=2.0) == (1000, 2000)
    assert limits(rope_type="dynamic", factor=3.0) == (1000, 3000)
    assert limits(rope_type="yarn", factor=4.0, original_max_position_embeddings=500) == (2000, 2000)
    assert limits(rope_type="yarn", factor=2.0, original_max_position_embeddings=500) == (1000, 1000)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["GPT2LMHeadModel"]},
        r"GPT2LMHeadModel.*served: LlamaForCausalLM|served: Llama",
    ),
    "no architecture": ({"architectures": ..., "model_type": "bert"}, "served: Llama.*bert"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not served.*gptq"),
    "missing size": ({"hidden_size": ...}, "hidden_size is missing"),
    "size of text": ({"hidden_size": "48"}, "hidden_size must be a whole number.*'48'"),
    "negative size": ({"vocab_size": -1}, "vocab_size must be a whole number from 1"),
    "absurd size": ({"num_hidden_layers": 1 << 40}, "num_hidden_layers must be a whole number from 1 to 4096"),
    "true as a size": ({"vocab_size": True}, "vocab_size"),
    "heads that don't divide": ({"num_key_value_heads": 4}, "multiple of num_key_value_heads; got 6 and 4"),
    "odd head": ({"head_dim": 7}, "head_dim must be even"),
    "activation": ({"hidden_act": "mish"}, "hidden_act must be one of.*mish"),
    "eps": ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a finite number from 0"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type must be one of default, linear.*longrope"),
    "rope factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a finite number above 0; got None"),
    "rope factor of nan": ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
    "rope of text": ({"rope_scaling": "linear"}, "rope_parameters must be an object"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    "window": ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be a whole number"),
    "layer types": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
        "layer_types must name",
    ),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, "dtype must be one of"),
    "eos": ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_not_served_is_refused_by_field_and_value(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ModelLoadError, match=message) as caught:
        read(**changes)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_gguf_metadata_says_the_same_as_config_json(tmp_path: pathlib.Path, architecture: str) -> None:
    folder = write_tiny_model(
        tmp_path / "hf", architecture, tokenizer=False, tie_word_embeddings=architecture[0] == "Q"
    )
    gguf = write_tiny_gguf(folder, tmp_path / "m.gguf")
    checkpoint = resolve_checkpoint(str(gguf))
    assert read_transformer_config(checkpoint) == read_transformer_config(resolve_checkpoint(str(folder)))
    assert read_generation_eos_token_ids(checkpoint.generation_config) == (2,)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count is not served"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type must be one of none, linear, yarn"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count must equal the head dimension 8"),
    ],
    ids=str,
)
def test_gguf_features_that_are_not_served_are_refused(
    tmp_path: pathlib.Path, numbers: dict[str, Any], message: str
) -> None:
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    checkpoint = resolve_checkpoint(str(write_tiny_gguf(folder, tmp_path / "m.gguf", numbers=numbers)))
    with pytest.raises(ModelLoadError, match=message):
        read_transformer_config(checkpoint)
