"""Weights of a .gguf file under their Hugging Face names, as floating-point numbers."""

import math
import re
from collections.abc import Iterator

import numpy as np
import torch

from vllm.checkpoints.gguf_config import FREQUENCY_FACTORS, to_hf_name
from vllm.checkpoints.gguf_file import GgufFile
from vllm.config import TransformerConfig
from vllm.exceptions import ModelLoadError
from vllm.model_executor.model_loader.dequantize import UnservedTypeError, dequantize
from vllm.model_executor.model_loader.weight_source import NamedWeight

_TURNED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
# What files carry beside weights: read into the configuration, or worked out by the model.
_NOT_WEIGHTS = (FREQUENCY_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")


class GgufSource:
    """A file's tensors. Llama files hold the rows of q and k in another order, which is undone here."""

    def __init__(self, gguf: GgufFile, config: TransformerConfig) -> None:
        self.gguf = gguf
        self.config = config
        self.where = str(gguf.path)
        # Files of the llama family turn neighbouring components (0, 1), (2, 3), …; this engine turns (i, i + half).
        self.has_paired_rows = gguf.metadata["general.architecture"] == "llama"
        # A name that is none of ours stays as it is, and is then listed as unexpected.
        self.names = {name: to_hf_name(name) or name for name in gguf.tensors if name not in _NOT_WEIGHTS}

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {hf_name: self.gguf.tensors[name].shape for name, hf_name in self.names.items()}

    def iterate(self) -> Iterator[NamedWeight]:
        memory = np.empty(max((math.prod(shape) for shape in self.read_shapes().values()), default=0), np.float32)
        for name, hf_name in self.names.items():
            try:
                tensor = dequantize(self.gguf.tensors[name], self.gguf.read_tensor_bytes(name), memory)
            except UnservedTypeError as error:
                raise ModelLoadError(f"{self.where}: {error}") from error
            turned = _TURNED.fullmatch(name) if self.has_paired_rows else None
            if turned is not None:
                heads = self.config.num_attention_heads if turned[1] == "q" else self.config.num_key_value_heads
                tensor = _to_split_halves(tensor, heads)
            yield NamedWeight(hf_name, tensor)


def _to_split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:  # [num_heads · head_dim, …]
    """Return the rows with each head's even ones first and its odd ones after them."""
    pairs = weight.view(num_heads, -1, 2, weight[0].numel())
    return pairs.transpose(1, 2).reshape(weight.shape)
