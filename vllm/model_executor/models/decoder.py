"""The decoder that most families are: token ids and positions in, hidden states and float32 logits out.

    embed → layers × [norm → qkv → rotate → paged attention → o → +] [norm → gate·up → down → +] → norm

Where families differ stands in their `TransformerConfig`, layer by layer.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from vllm.config import AttentionConfig, LayerConfig, MlpConfig, TransformerConfig
from vllm.exceptions import ModelLoadError
from vllm.model_executor.dtypes import ModelDtypes
from vllm.model_executor.layers.embedding import Embedding, compute_float32_product
from vllm.model_executor.layers.linear import Linear, WeightMatrix
from vllm.model_executor.layers.module import Module, ModuleList
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding, Rotation
from vllm.model_executor.models.step_program import StepProgram
from vllm.model_executor.weights import WeightSlot, collect_slots, is_ignored, list_names, to_canonical_name
from vllm.ops import api as ops
from vllm.v1.attention import Attention, AttentionBackend, AttentionMetadata, CacheSpec


class SelfAttention(Module):
    """Grouped-query attention over the paged KV cache."""

    def __init__(
        self, config: AttentionConfig, hidden_size: int, norm_eps: float, dtypes: ModelDtypes, backend: AttentionBackend
    ) -> None:
        super().__init__()
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(hidden_size, parts, has_bias=config.qkv_bias, dtypes=dtypes, is_fused=config.is_fused)
        self.o_proj = Linear(query_size, hidden_size, has_bias=config.out_bias, dtypes=dtypes)
        self.q_norm = RMSNorm(config.head_dim, norm_eps, dtypes.compute) if config.has_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, norm_eps, dtypes.compute) if config.has_qk_norm else None
        self.norm_eps = norm_eps
        self.rope = config.rope
        self.attn = Attention(
            backend,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            sliding_window=config.sliding_window,
        )

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        rotations: Sequence[Rotation],  # one of each way to rotate
        kv_cache: torch.Tensor,
        attn: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        query_norm = None if self.q_norm is None else self.q_norm.weight
        key_norm = None if self.k_norm is None else self.k_norm.weight
        qkv = self.qkv_proj(hidden)
        return self.o_proj(self.attn(qkv, rotations[self.rope], kv_cache, attn, query_norm, key_norm, self.norm_eps))


class GatedMlp(Module):
    """The gated feed-forward part."""

    def __init__(self, config: MlpConfig, hidden_size: int, dtypes: ModelDtypes) -> None:
        super().__init__()
        parts = {"gate_proj": config.size, "up_proj": config.size}
        self.gate_up_proj = Linear(hidden_size, parts, has_bias=config.bias, dtypes=dtypes, is_fused=config.is_fused)
        self.down_proj = Linear(config.size, hidden_size, has_bias=config.bias, dtypes=dtypes)
        self.activation = config.activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [num_tokens, hidden_size], the same shape out
        return self.down_proj(ops.gate_and_multiply(self.gate_up_proj(hidden), self.activation))


class DecoderLayer(Module):
    """One block. The residual stream is changed in place; what a block adds to it is added by the norm that follows."""

    def __init__(
        self, config: LayerConfig, hidden_size: int, norm_eps: float, dtypes: ModelDtypes, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, norm_eps, dtypes.compute)
        self.self_attn = SelfAttention(config.attention, hidden_size, norm_eps, dtypes, backend)
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps, dtypes.compute)
        self.mlp = GatedMlp(config.mlp, hidden_size, dtypes)

    def forward(
        self,
        residual: torch.Tensor,  # [num_tokens, hidden_size], changed in place
        added: torch.Tensor | None,  # [num_tokens, hidden_size], still to be added to it
        rotations: Sequence[Rotation],
        kv_cache: torch.Tensor,
        attn: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size], still to be added to the residual stream
        normed = self.input_layernorm(residual) if added is None else self.input_layernorm(added, residual)
        added = self.self_attn(normed, rotations, kv_cache, attn)
        return self.mlp(self.post_attention_layernorm(added, residual))


class DecoderModel(Module):
    """The decoder below its head; module names are the checkpoint's."""

    def __init__(self, config: TransformerConfig, dtypes: ModelDtypes, backend: AttentionBackend) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.embed_tokens = Embedding(config.vocab_size, size, dtypes)
        self.layers = ModuleList(DecoderLayer(layer, size, eps, dtypes, backend) for layer in config.layers)
        self.norm = RMSNorm(size, eps, dtypes.compute)


class DecoderForCausalLM(Module):
    """The decoder with its head: a `CausalLM` (interface.py)."""

    def __init__(
        self, config: TransformerConfig, dtypes: ModelDtypes, max_model_len: int, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtypes.compute  # of activations and the KV cache
        self.model = DecoderModel(config, dtypes, backend)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, dtypes=dtypes)
        )
        self.rotaries = [RotaryEmbedding(rope, config.max_position_embeddings, max_model_len) for rope in config.ropes]
        self.on_weights_changed: list[Callable[[], None]] = []
        self._slots: dict[str, WeightSlot] | None = None
        self.program = StepProgram(self)

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        kv_caches: list[torch.Tensor],  # a layer, as the backend made them
        attn: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size], after the final norm
        hidden = self.program.try_run(input_ids, positions, kv_caches, attn)
        return self.run_modules(input_ids, positions, kv_caches, attn) if hidden is None else hidden

    def run_modules(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor], attn: AttentionMetadata
    ) -> torch.Tensor:
        """Do what `forward` does by the modules, one by one."""
        rotations = [rotary.make_rotation(positions) for rotary in self.rotaries]
        residual, added = self.model.embed_tokens(input_ids), None
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            added = layer(residual, added, rotations, kv_cache, attn)
        return self.model.norm(residual) if added is None else self.model.norm(added, residual)

    def compute_logits(
        self,
        hidden: torch.Tensor,  # [num_rows, hidden_size]
        out: torch.Tensor | None = None,  # [num_rows, vocab_size] float32, filled and returned when given
    ) -> torch.Tensor:  # [num_rows, vocab_size] float32
        """Return the logits of the checkpoint's whole vocabulary, products and results in float32."""
        return compute_float32_product(hidden, self.head, out)

    @property
    def head(self) -> WeightMatrix:
        """The matrix whose rows are the vocabulary's."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def invalidate(self) -> None:
        """Take note that code which is not the engine's may have changed modules, hooks or where weights lie."""
        self.program.invalidate()

    def get_cache_specs(self) -> list[CacheSpec]:
        """Return what each layer keeps in the KV cache."""
        return [module.cache_spec for module in self.model.modules() if isinstance(module, Attention)]

    def expected_weight_names(self) -> set[str]:
        """Return the names, without "model.", of the weights that the model is made of."""
        return set(self.get_slots())

    def get_slots(self) -> dict[str, WeightSlot]:
        """Return canonical name → place of each weight."""
        if self._slots is None:
            self._slots = collect_slots(self)
        return self._slots

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy weights in, one Hugging Face name at a time: any order, any subset, on any device, of any float type.

        Fused slots are filled by their parts' names; "model." in front of a name may be left out; lm_head.weight is
        passed over where it is tied to the embedding. Returns the names that came.

        Raises:
            ModelLoadError: an unknown name or a wrong shape; weights that came before it have been replaced.
        """
        slots, loaded, unknown = self.get_slots(), set(), []
        try:
            for name, tensor in weights:
                canonical = to_canonical_name(name)
                if canonical in slots:
                    slots[canonical].write(name, tensor)
                elif not is_ignored(name) and not (canonical == "lm_head.weight" and self.lm_head is None):
                    unknown.append(name)
                    continue
                loaded.add(name)
        finally:
            for callback in self.on_weights_changed:
                callback()
        if unknown:
            raise ModelLoadError(f"{self.config.architecture} has no weights named {list_names(unknown)}")
        return loaded

    def count_step_bytes(self, num_tokens: int) -> int:
        """Return what a step of `num_tokens` takes and keeps on a CPU, its result and what longer sequences add."""
        size = self.config.hidden_size * self.dtype.itemsize
        tables = sum(rotary.max_table_bytes for rotary in self.rotaries)
        return self.program.count_scratch_bytes(num_tokens) + num_tokens * size + tables

    def weights_bytes(self) -> int:
        """Return the bytes that all weights take."""
        return sum(parameter.nbytes for parameter in self.parameters())
