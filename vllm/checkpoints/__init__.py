"""Checkpoints on disk: finding them, what any of them says of itself, and their file formats. No torch."""

from vllm.checkpoints.checkpoint import Checkpoint, read_generation_eos_token_ids, resolve_checkpoint
from vllm.checkpoints.fields import Fields
from vllm.checkpoints.gguf_file import GgmlType, GgufFile, GgufTensor, open_gguf
from vllm.checkpoints.rope_config import ModelLenLimits, derive_model_len_limits

__all__ = [
    "Checkpoint",
    "Fields",
    "GgmlType",
    "GgufFile",
    "GgufTensor",
    "ModelLenLimits",
    "derive_model_len_limits",
    "open_gguf",
    "read_generation_eos_token_ids",
    "resolve_checkpoint",
]
