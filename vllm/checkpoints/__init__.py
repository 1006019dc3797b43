"""Checkpoints on disk: finding them, their configuration and their file formats. No torch, no transformers."""

from vllm.checkpoints.architectures import SERVED_ARCHITECTURES
from vllm.checkpoints.checkpoint import Checkpoint, read_generation_eos_token_ids, resolve_checkpoint
from vllm.checkpoints.gguf_file import GgmlType, GgufFile, GgufTensor, open_gguf
from vllm.checkpoints.transformer_config import ModelLenLimits, derive_model_len_limits, read_transformer_config

__all__ = [
    "SERVED_ARCHITECTURES",
    "Checkpoint",
    "GgmlType",
    "GgufFile",
    "GgufTensor",
    "ModelLenLimits",
    "derive_model_len_limits",
    "open_gguf",
    "read_generation_eos_token_ids",
    "read_transformer_config",
    "resolve_checkpoint",
]
