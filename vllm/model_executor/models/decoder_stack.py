"""Runs a decoder's modules as one call of the compiled library, for as long as they are what they were built as.

The modules stay what a model is made of: weights are loaded into them, hooks hang on them, and without the library they
run one by one. What is here reads pointers out of them, and looks whether those still hold: before each step, unless
the caller says when somebody had a chance to change something.
"""

import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vllm._ops_decoder import DecoderLayer, DecoderMatrix, DecoderPlan, DecoderShape, DecoderStep, can_run_decoder
from vllm.config import AttentionConfig, TransformerConfig
from vllm.model_executor.layers.embedding import Embedding
from vllm.model_executor.layers.linear import WeightMatrix
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.ops import api as ops
from vllm.v1.attention import AttentionMetadata

# A look touches hundreds of objects that a step's weights have driven out of the cache: 0.2 to 0.5 ms.
MAX_SECONDS_BETWEEN_LOOKS = 0.1


class ModuleWatch:
    """What some modules held when it was made."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._hooks = [hooks for m in self._modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._attributes = [vars(m) for m in self._modules]
        self._num_attributes = [*map(len, self._attributes)]
        children = [m._modules for m in self._modules]
        self._child_tables = [table for table in children for _ in table]
        self._child_names = [name for table in children for name in table]
        self._children = [child for table in children for child in table.values()]
        held: list[dict[str, Any]] = [m._parameters for m in self._modules]
        self._tables = [table for table in held for x in table.values() if x is not None]
        self._names = [name for table in held for name, x in table.items() if x is not None]
        self._pointers = self._read_pointers()

    def _read_pointers(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, map(operator.getitem, self._tables, self._names))]

    @property
    def has_hooks(self) -> bool:
        """Say whether somebody wants to hear of a module's calls."""
        module = nn.modules.module
        return any(self._hooks) or bool(module._global_forward_hooks or module._global_forward_pre_hooks)

    def has_changed(self) -> bool:
        """Say whether a module, a parameter or its memory was replaced, or an attribute added (such as `forward`)."""
        try:
            return not (
                all(map(operator.is_, map(operator.getitem, self._child_tables, self._child_names), self._children))
                and self._read_pointers() == self._pointers
                and [*map(len, self._attributes)] == self._num_attributes
            )
        except (KeyError, TypeError):  # one was taken out, or is None now
            return True


class DecoderStack:
    """Embedding, layers and final norm as one call, where that gives what the modules would give."""

    def __init__(
        self, modules: nn.Module, layer_types: Mapping[str, type[nn.Module]], config: TransformerConfig
    ) -> None:
        self.is_enabled = True
        self._is_told = False
        self._next_look = 0.0  # time.monotonic()
        self._modules: Any = modules  # embed_tokens, layers, norm
        self._layer_types = layer_types  # path in a layer → what must stand there
        self._config = config
        self._watch: ModuleWatch | None = None
        self._plan: DecoderPlan | None = None
        self._usable_plan: DecoderPlan | None = None  # at the last look

    def __getstate__(self) -> dict[str, Any]:  # pointers are nothing for a copy
        return vars(self) | {"_watch": None, "_plan": None, "_usable_plan": None}

    def look_again(self) -> None:
        """Look at the modules before the next step.

        Who calls this says that it will do so whenever somebody else's code has run; then looks between are rare.
        """
        self._is_told = True
        self._next_look = 0.0

    def try_run(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        kv_caches: Sequence[torch.Tensor],
        attn: AttentionMetadata,
        rotaries: Sequence[RotaryEmbedding],
    ) -> torch.Tensor | None:  # [num_tokens, hidden_size], after the final norm
        """Run a step; None where the modules must do it one by one."""
        plan = self._get_plan()
        if plan is None or not _fit(token_ids, kv_caches, len(self._modules.layers)):
            return None
        step = DecoderStep(token_ids, positions, attn.slot_mapping, attn.block_tables, attn.query_starts, attn.seq_lens)
        return plan.run(step, rotaries[0].get_table(attn.max_seq_len), kv_caches)

    def count_scratch_bytes(self, num_tokens: int) -> int:
        """Return what a step of `num_tokens` keeps beside its result; 0 where the modules run one by one."""
        plan = self._get_plan()
        return 0 if plan is None else 4 * plan.count_scratch(num_tokens)

    def _get_plan(self) -> DecoderPlan | None:
        if not self.is_enabled:
            return None
        if self._is_told and self._usable_plan is not None and time.monotonic() < self._next_look:
            return self._usable_plan
        if self._watch is None or self._watch.has_changed():
            self._plan = None
            self._watch = ModuleWatch(self._modules.modules())
            self._plan = self._try_make_plan()
        self._usable_plan = None if self._watch.has_hooks else self._plan
        self._next_look = time.monotonic() + MAX_SECONDS_BETWEEN_LOOKS
        return self._usable_plan

    def _try_make_plan(self) -> DecoderPlan | None:
        modules, config = self._modules, self._config
        if not (
            _is_plain(modules.embed_tokens, Embedding)
            and _is_plain(modules.norm, RMSNorm)
            and all(map(self._is_as_built, modules.layers))
            and len(config.ropes) == 1
            and len({_find_shape(config, layer.attention) for layer in config.layers}) <= 1
            and all(layer.mlp.activation in ops.COMPILED_ACTIVATIONS for layer in config.layers)
            and config.layers
            and config.ropes[0].rotary_dim == config.layers[0].attention.head_dim
        ):
            return None
        layers = [_describe_layer(layer) for layer in modules.layers]
        embedding, final_norm = _describe_matrix(modules.embed_tokens), modules.norm.weight
        if not can_run_decoder(layers, embedding, final_norm):
            return None
        shape = _find_shape(config, config.layers[0].attention)
        return DecoderPlan(layers, embedding, final_norm, shape)

    def _is_as_built(self, layer: nn.Module) -> bool:
        return all(_is_plain(module, self._layer_types.get(path)) for path, module in layer.named_modules())


def _find_shape(config: TransformerConfig, attention: AttentionConfig) -> DecoderShape:
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
    return DecoderShape(*heads, config.norm_eps, attention.head_dim**-0.5)


def _is_plain(module: nn.Module, expected: type[nn.Module] | None) -> bool:
    return type(module) is expected and "forward" not in vars(module)


def _fit(token_ids: torch.Tensor, kv_caches: Sequence[torch.Tensor], num_layers: int) -> bool:
    return token_ids.is_cpu and len(kv_caches) == num_layers > 0 and kv_caches[0].dtype in ops.CACHE_KINDS


def _describe_matrix(module: WeightMatrix) -> DecoderMatrix:
    return DecoderMatrix(module.weight, module.weight_scale, getattr(module, "bias", None))


def _describe_layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        qkv=_describe_matrix(attention.qkv_proj),
        attention_out=_describe_matrix(attention.o_proj),
        gate_up=_describe_matrix(mlp.gate_up_proj),
        down=_describe_matrix(mlp.down_proj),
        attention_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        query_norm=None if attention.q_norm is None else attention.q_norm.weight,
        key_norm=None if attention.k_norm is None else attention.k_norm.weight,
        sliding_window=attention.attn.shape.sliding_window,
    )
