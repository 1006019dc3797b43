"""What the engine asks of a model, whatever it is made of."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from vllm.config import TransformerConfig
from vllm.model_executor.dtypes import ModelDtypes
from vllm.model_executor.layers.linear import WeightMatrix
from vllm.model_executor.weights import WeightSlot
from vllm.v1.attention import AttentionBackend, AttentionMetadata, CacheSpec


class CausalLM(Protocol):
    """A causal language model over a paged cache: an `nn.Module` with these members.

    It is constructed on the meta device; the loader then gives its parameters memory and fills its slots.

    on_weights_changed: called after each `load_weights`, whether it succeeded or stopped half-way: what was computed
    with the old weights (cached keys and values) is no longer true.
    """

    config: TransformerConfig
    dtype: torch.dtype  # of activations
    on_weights_changed: list[Callable[[], None]]

    def __init__(
        self, config: TransformerConfig, dtypes: ModelDtypes, max_model_len: int, backend: AttentionBackend
    ) -> None: ...

    def __call__(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        kv_caches: list[torch.Tensor],  # one a `CacheSpec`, as the backend made it
        attn: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size], what the head reads
        """Run a step's tokens; their keys and values are in the cache afterwards."""

    def compute_logits(
        self,
        hidden: torch.Tensor,  # [num_rows, hidden_size]
        out: torch.Tensor | None = None,  # [num_rows, vocab_size] float32, filled and returned when given
    ) -> torch.Tensor:  # [num_rows, vocab_size] float32
        """Return the logits of the checkpoint's whole vocabulary, products and results in float32."""

    @property
    def head(self) -> WeightMatrix:
        """The matrix whose rows are the vocabulary's."""

    def get_cache_specs(self) -> list[CacheSpec]:
        """Return what each layer that attends keeps in the KV cache."""

    def get_slots(self) -> dict[str, WeightSlot]:
        """Return canonical name → place of each weight."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy weights in, one at a time, by the checkpoint's names: any order, any subset; return the names."""

    def count_step_bytes(self, num_tokens: int) -> int:
        """Return what a step of `num_tokens` takes and keeps on a CPU, its result and what longer sequences add."""

    def weights_bytes(self) -> int:
        """Return the bytes that all weights take."""

    def invalidate(self) -> None:
        """Take note that code which is not the engine's may have changed modules, hooks or where weights lie."""

    def modules(self) -> Iterable[torch.nn.Module]: ...
    def named_modules(self) -> Iterable[tuple[str, torch.nn.Module]]: ...
    def parameters(self) -> Iterable[torch.nn.Parameter]: ...
    def eval(self) -> "CausalLM": ...
    def to(self, device: torch.device | str) -> "CausalLM": ...
