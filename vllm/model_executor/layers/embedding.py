"""Token embedding and language-model head; tied models hold one matrix for both."""

import torch

from vllm.distributed.parallel_state import Share, take_vocabulary_share
from vllm.model_executor.dtypes import ModelDtypes
from vllm.model_executor.layers.linear import WeightMatrix
from vllm.ops import api as ops


class Embedding(WeightMatrix):
    """Token id → row of the matrix; tensor-parallel ranks share the vocabulary, and their results are summed."""

    def __init__(self, vocab_size: int, hidden_size: int, dtypes: ModelDtypes) -> None:
        super().__init__({"": (take_vocabulary_share(vocab_size),)}, Share.whole(hidden_size), dtypes)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:  # [num_tokens] int64 → [num_tokens, hidden_size]
        ((share,),) = self.tensors.values()
        if share.size == share.total:
            return ops.embed(token_ids, self.weight, self.weight_scale, self.compute_dtype)
        is_elsewhere = (token_ids < share.start) | (token_ids >= share.stop)
        rows = (token_ids - share.start).masked_fill_(is_elsewhere, 0)
        embedded = ops.embed(rows, self.weight, self.weight_scale, self.compute_dtype)
        return embedded.masked_fill_(is_elsewhere[:, None], 0)


def compute_float32_product(
    hidden: torch.Tensor,  # [num_rows, hidden_size]
    head: WeightMatrix,  # [vocab_size, hidden_size]
    out: torch.Tensor | None = None,  # [num_rows, vocab_size] float32
) -> torch.Tensor:  # [num_rows, vocab_size] float32
    """Return hidden · weightᵀ with float32 results: logits are never rounded to the weights' narrower type."""
    return ops.linear_to_float32(hidden, head.weight, head.weight_scale, out)
