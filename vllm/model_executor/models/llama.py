"""The Llama decoder and its family: token ids and positions in, hidden states and float32 logits out.

Mistral, Qwen2 and Qwen3 differ from it in what `TransformerConfig` says (window, biases, norms on q and k), so one
implementation serves them; the classes in registry.py keep the names.

    embed → layers × [norm → qkv → rotate → paged attention → o → +] [norm → gate·up → down → +] → norm
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from vllm.config import TransformerConfig
from vllm.exceptions import ModelLoadError
from vllm.model_executor.layers.activation import ACTIVATIONS, gate_and_multiply
from vllm.model_executor.layers.embedding import Embedding, compute_float32_product
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding, Rotation
from vllm.model_executor.models.decoder_stack import DecoderStack
from vllm.model_executor.number_types import NumberTypes
from vllm.model_executor.weights import WeightSlot, collect_slots, is_ignored, list_names, to_canonical_name
from vllm.v1.attention import Attention, AttentionBackend, AttentionMetadata, CacheSpec


class LlamaAttention(nn.Module):
    """Grouped-query attention over the paged KV cache."""

    def __init__(self, config: TransformerConfig, layer: int, types: NumberTypes, backend: AttentionBackend) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        kv_size = num_kv_heads * head_dim
        parts = {"q_proj": num_heads * head_dim, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(config.hidden_size, parts, has_bias=config.attention_bias, types=types)
        self.o_proj = Linear(num_heads * head_dim, config.hidden_size, has_bias=config.attention_out_bias, types=types)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, types.compute) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, types.compute) if config.qk_norm else None
        self.norm_eps = config.rms_norm_eps
        layers = config.sliding_window_layers
        self.attn = Attention(
            backend,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            sliding_window=config.sliding_window if layers is None or layer in layers else None,
        )

    def forward(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        rotation: Rotation,
        kv_cache: torch.Tensor,
        attn: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        query_norm = None if self.q_norm is None else self.q_norm.weight
        key_norm = None if self.k_norm is None else self.k_norm.weight
        qkv = self.qkv_proj(hidden)
        return self.o_proj(self.attn(qkv, rotation, kv_cache, attn, query_norm, key_norm, self.norm_eps))


class LlamaMLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: TransformerConfig, types: NumberTypes) -> None:
        super().__init__()
        size = config.intermediate_size
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(config.hidden_size, parts, has_bias=config.mlp_bias, types=types)
        self.down_proj = Linear(size, config.hidden_size, has_bias=config.mlp_bias, types=types)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [num_tokens, hidden_size], the same shape out
        return self.down_proj(gate_and_multiply(self.gate_up_proj(hidden), self.activation))


class LlamaLayer(nn.Module):
    """One block. The residual stream is changed in place; what a block adds to it is added by the norm that follows."""

    def __init__(self, config: TransformerConfig, layer: int, types: NumberTypes, backend: AttentionBackend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, types.compute)
        self.self_attn = LlamaAttention(config, layer, types, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, types.compute)
        self.mlp = LlamaMLP(config, types)

    def forward(
        self,
        residual: torch.Tensor,  # [num_tokens, hidden_size], changed in place
        added: torch.Tensor | None,  # [num_tokens, hidden_size], still to be added to it
        rotation: Rotation,
        kv_cache: torch.Tensor,
        attn: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size], still to be added to the residual stream
        normed = self.input_layernorm(residual) if added is None else self.input_layernorm(added, residual)
        added = self.self_attn(normed, rotation, kv_cache, attn)
        return self.mlp(self.post_attention_layernorm(added, residual))


# What the one call for all layers stands for; anything else in a layer, and the modules run one by one.
_LAYER_TYPES: dict[str, type[nn.Module]] = {
    "": LlamaLayer,
    "input_layernorm": RMSNorm,
    "self_attn": LlamaAttention,
    "self_attn.attn": Attention,
    "self_attn.qkv_proj": Linear,
    "self_attn.q_norm": RMSNorm,
    "self_attn.k_norm": RMSNorm,
    "self_attn.o_proj": Linear,
    "post_attention_layernorm": RMSNorm,
    "mlp": LlamaMLP,
    "mlp.gate_up_proj": Linear,
    "mlp.down_proj": Linear,
}


class LlamaModel(nn.Module):
    """The decoder below its head; module names are the checkpoint's."""

    def __init__(self, config: TransformerConfig, types: NumberTypes, backend: AttentionBackend) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, types)
        self.layers = nn.ModuleList(
            LlamaLayer(config, layer, types, backend) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, types.compute)


class LlamaForCausalLM(nn.Module):
    """The decoder with its head.

    on_weights_changed: called after each `load_weights`, whether it succeeded or stopped half-way: what was computed
    with the old weights (cached keys and values, packed copies) is no longer true.
    """

    def __init__(
        self, config: TransformerConfig, types: NumberTypes, max_model_len: int, backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = types.compute  # of activations and the KV cache
        self.model = LlamaModel(config, types, backend)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, types=types)
        )
        self.rotary = RotaryEmbedding(config, max_model_len)
        self.stack = DecoderStack(self.model, _LAYER_TYPES, config)
        self.on_weights_changed: list[Callable[[], None]] = []
        self._slots: dict[str, WeightSlot] | None = None

    def forward(
        self,
        input_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        kv_caches: list[torch.Tensor],  # a layer: [2, num_blocks, block_size, num_kv_heads, head_dim]
        attn: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, hidden_size], after the final norm
        hidden = self.stack.try_run(input_ids, positions, kv_caches, attn, self.rotary)
        if hidden is not None:
            return hidden
        rotation = self.rotary.make_rotation(positions)
        residual, added = self.model.embed_tokens(input_ids), None
        for layer, kv_cache in zip(self.model.layers, kv_caches, strict=True):
            added = layer(residual, added, rotation, kv_cache, attn)
        return self.model.norm(residual) if added is None else self.model.norm(added, residual)

    def compute_logits(
        self,
        hidden: torch.Tensor,  # [num_rows, hidden_size]
        out: torch.Tensor | None = None,  # [num_rows, vocab_size] float32, filled and returned when given
    ) -> torch.Tensor:  # [num_rows, vocab_size] float32
        """Return the logits of the checkpoint's whole vocabulary, products and results in float32."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return compute_float32_product(hidden, head, out)

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
            raise ModelLoadError(f"{type(self).__name__} has no weights named {list_names(unknown)}")
        return loaded

    def count_step_bytes(self, num_tokens: int) -> int:
        """Return what a step of `num_tokens` takes and keeps on a CPU, its result and what longer sequences add."""
        size = self.config.hidden_size * self.dtype.itemsize
        return self.stack.count_scratch_bytes(num_tokens) + num_tokens * size + self.rotary.max_table_bytes

    def weights_bytes(self) -> int:
        """Return the bytes that all weights take."""
        return sum(parameter.nbytes for parameter in self.parameters())
