"""config.json (old and new spellings) and GGUF metadata, both into one `TransformerConfig`."""

import pathlib
from typing import NamedTuple

from vllm.checkpoints.architectures import SERVED_ARCHITECTURES, ArchitectureTraits, describe_served
from vllm.checkpoints.checkpoint import Checkpoint
from vllm.checkpoints.fields import MAX_HEADS, MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, Fields, check_transformer_config
from vllm.checkpoints.gguf_config import read_gguf_config
from vllm.checkpoints.gguf_file import open_gguf
from vllm.checkpoints.rope_config import read_rope
from vllm.checkpoints.safetensors_header import DTYPE_NAMES, read_safetensors_header
from vllm.config import TransformerConfig
from vllm.exceptions import ModelLoadError

_SERVED_DTYPES = ("float32", "bfloat16", "float16")


class ModelLenLimits(NamedTuple):
    """How long a sequence may get: what max_model_len=None means, and what may be asked for."""

    default: int
    largest: int


def read_transformer_config(checkpoint: Checkpoint) -> TransformerConfig:
    """Return the decoder's shape.

    Raises:
        ModelLoadError: an architecture or a feature that is not served, or a value that can't be; names the field.
    """
    if checkpoint.kind == "gguf":
        return check_transformer_config(read_gguf_config(open_gguf(checkpoint.path)), checkpoint.path)
    folder = pathlib.Path(checkpoint.path)
    fields = Fields(checkpoint.config, str(folder / "config.json"))
    return check_transformer_config(_read_hf_config(fields, folder), fields.where)


def derive_model_len_limits(transformer: TransformerConfig) -> ModelLenLimits:
    """Return the default and the largest model length.

    Yarn states how far it reaches: original length × factor. Dynamic scaling leaves lengths up to
    max_position_embeddings exactly as trained and is meant for more, so more is allowed but must be asked for. Linear
    scaling is baked into what the checkpoint calls max_position_embeddings by some authors and not by others: likewise.
    """
    trained = transformer.max_position_embeddings
    scaling = transformer.rope_scaling or {}
    factor = max(1.0, float(scaling.get("factor", 1.0)))
    match scaling.get("rope_type"):
        case "yarn":
            reach = max(trained, int(scaling["original_max_position_embeddings"] * factor))
            return ModelLenLimits(reach, reach)
        case "dynamic" | "linear":
            return ModelLenLimits(trained, int(trained * factor))
        case _:
            return ModelLenLimits(trained, trained)


def _read_hf_config(fields: Fields, folder: pathlib.Path) -> TransformerConfig:
    architecture = _read_architecture(fields)
    traits = SERVED_ARCHITECTURES[architecture]
    _refuse_quantization(fields)
    num_layers = fields.read_int("num_hidden_layers", high=MAX_LAYERS)
    num_heads = fields.read_int("num_attention_heads", high=MAX_HEADS)
    hidden_size = fields.read_int("hidden_size", high=MAX_WIDTH)
    max_position_embeddings = fields.read_int(
        "max_position_embeddings", traits.default_max_position_embeddings, high=1 << 40
    )
    rope = read_rope(fields, max_position_embeddings)
    window, window_layers = _read_window(fields, traits, num_layers)
    attention_bias = fields.read_bool("attention_bias", False)
    # Null means as many as heads; an absent field the architecture's own default.
    default_kv_heads = (
        num_heads if fields.has("num_key_value_heads") else traits.default_num_key_value_heads or num_heads
    )
    return TransformerConfig(
        architecture=architecture,
        vocab_size=fields.read_int("vocab_size", high=MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.read_int("intermediate_size", high=MAX_WIDTH),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=fields.read_int("num_key_value_heads", default_kv_heads, high=MAX_HEADS),
        head_dim=fields.read_int(
            "head_dim", traits.default_head_dim or max(1, hidden_size // num_heads), high=MAX_WIDTH
        ),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.read_float("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=fields.read_bool("tie_word_embeddings", False),
        sliding_window=window,
        sliding_window_layers=window_layers,
        attention_bias=attention_bias if traits.has_qkv_bias is None else traits.has_qkv_bias,
        attention_out_bias=attention_bias if traits.has_out_bias is None else traits.has_out_bias,
        mlp_bias=fields.read_bool("mlp_bias", False) if traits.reads_mlp_bias else False,
        qk_norm=traits.has_qk_norm,
        hidden_act=fields.read_str("hidden_act", "silu"),
        bos_token_id=fields.read_token_id("bos_token_id", traits.default_bos_token_id),
        eos_token_id=fields.read_token_id("eos_token_id", traits.default_eos_token_id),
        dtype=_read_dtype(fields, folder),
    )


def _read_architecture(fields: Fields) -> str:
    named = fields.values.get("architectures")
    if not named:  # written by hand or by old tools: the model type then says
        model_type = fields.values.get("model_type")
        named = [name for name, traits in SERVED_ARCHITECTURES.items() if traits.model_type == model_type] or [
            model_type
        ]
    if not isinstance(named, list):
        raise fields.error("architectures", named, "must be a list of names")
    for name in named:
        if isinstance(name, str) and name in SERVED_ARCHITECTURES:
            return name
    raise fields.error("architectures", named, f"is not served ({describe_served()})")


def _refuse_quantization(fields: Fields) -> None:
    quantization = fields.values.get("quantization_config") or fields.values.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", quantization) if isinstance(quantization, dict) else quantization
        raise fields.error(
            "quantization_config", method, "is not served: give the unquantised checkpoint or a .gguf file"
        )


def _read_window(
    fields: Fields, traits: ArchitectureTraits, num_layers: int
) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the sliding window and the layers that have it (None: all)."""
    if traits.window_rule == "none":
        return None, None
    if fields.values.get("sliding_window", traits.default_sliding_window) is None:
        return None, None
    window = fields.read_int("sliding_window", traits.default_sliding_window, high=1 << 40)
    if traits.window_rule == "always":
        return window, None
    if not fields.read_bool("use_sliding_window", False):
        return None, None
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        first = fields.read_int("max_window_layers", 28, low=0, high=1 << 40)
        layers = tuple(range(min(first, num_layers), num_layers))
    else:
        kinds = {"full_attention", "sliding_attention"}
        if (
            not isinstance(layer_types, list)
            or len(layer_types) != num_layers
            or not all(isinstance(kind, str) and kind in kinds for kind in layer_types)
        ):
            raise fields.error(
                "layer_types", layer_types, f"must name one of {sorted(kinds)} for each of {num_layers} layers"
            )
        layers = tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")
    return (window, layers) if layers else (None, None)


def _read_dtype(fields: Fields, folder: pathlib.Path) -> str:
    """Return the checkpoint's dtype: what config.json says, else what most of the weights' bytes are."""
    stated = fields.values.get("dtype") or fields.values.get("torch_dtype")
    if stated is None or stated == "auto":
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return "float32"
        entries = read_safetensors_header(files[0]).values()
        sizes: dict[str, int] = {}
        for entry in entries:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.end - entry.first
        most = max(sizes, key=lambda dtype: sizes[dtype], default="F32")
        stated = DTYPE_NAMES.get(most, most)
    name = str(stated).removeprefix("torch.")
    if name == "float64":
        return "float32"
    if name not in _SERVED_DTYPES:
        raise ModelLoadError(f"{fields.where}: dtype must be one of {', '.join(_SERVED_DTYPES)}; got {name!r}")
    return name
