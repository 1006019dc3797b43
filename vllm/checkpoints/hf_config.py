"""What config.json says of any model, whatever its family."""

import pathlib

from vllm.checkpoints.fields import Fields
from vllm.checkpoints.safetensors_header import DTYPE_NAMES, read_safetensors_header
from vllm.exceptions import ModelLoadError

_SERVED_DTYPES = ("float32", "bfloat16", "float16")


def refuse_quantization(fields: Fields) -> None:
    """Raise where the weights are quantised in a way that config.json describes."""
    quantization = fields.values.get("quantization_config") or fields.values.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", quantization) if isinstance(quantization, dict) else quantization
        raise fields.error(
            "quantization_config", method, "is not served: give the unquantised checkpoint or a .gguf file"
        )


def read_hf_dtype(fields: Fields, folder: pathlib.Path) -> str:
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
