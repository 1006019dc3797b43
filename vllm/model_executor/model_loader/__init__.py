"""Reading weights: safetensors, .bin and .gguf files, or random ones."""

from vllm.model_executor.model_loader.loader import load_model, resolve_dtype

__all__ = ["load_model", "resolve_dtype"]
