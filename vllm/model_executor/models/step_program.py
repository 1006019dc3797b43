"""A model's step as a program, for as long as the model's modules are what they were built as.

The modules stay what a model is made of: weights are loaded into them, hooks hang on them, and they run one by one
where there is no program.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.layers.module import Changes, Module, Weight, has_global_hooks
from vllm.ops.compiled_program import CompiledProgram, can_compile
from vllm.ops.program import CacheShape, ProgramStep
from vllm.ops.program_recorder import CannotRecordError, Recorder, record
from vllm.v1.attention import AttentionMetadata, CacheSpec

logger = init_logger(__name__)

_NAMES_ON_MODEL = ("run_modules", "get_cache_specs")


class RecordableModel(Protocol):
    """What a program is made of."""

    def modules(self) -> Any: ...

    def run_modules(self, input_ids: Any, positions: Any, kv_caches: Any, attn: Any) -> Any:
        """Do a step by the modules, one by one."""

    def get_cache_specs(self) -> list[CacheSpec]: ...


class StepProgram:
    """The program of a model, which has all its modules when this is made."""

    def __init__(self, model: RecordableModel) -> None:
        self.is_enabled = True
        self._model = model
        self._types = {type(module) for module in model.modules()}
        self._program: CompiledProgram | None = None
        self._seen_changes = -1

    def __getstate__(self) -> dict[str, Any]:  # pointers are nothing for a copy
        return vars(self) | {"_program": None, "_seen_changes": -1}

    def invalidate(self) -> None:
        """Record anew before the next step."""
        self._seen_changes = -1

    def try_run(
        self,
        token_ids: torch.Tensor,  # [num_tokens] int64
        positions: torch.Tensor,  # [num_tokens] int64
        kv_caches: Sequence[torch.Tensor],
        attn: AttentionMetadata,
    ) -> torch.Tensor | None:  # [num_tokens, hidden_size]
        """Run a step; None where the modules must do it one by one."""
        program = self._get_program()
        if program is None or not program.can_run(token_ids, kv_caches):
            return None
        step = ProgramStep(token_ids, positions, attn.slot_mapping, attn.block_tables, attn.query_starts, attn.seq_lens)
        return program.run(step, attn.max_seq_len, kv_caches)

    def count_scratch_bytes(self, num_tokens: int) -> int:
        """Return what a step of `num_tokens` keeps beside its result; 0 where the modules run one by one."""
        program = self._get_program()
        return 0 if program is None else program.count_scratch_bytes(num_tokens)

    def _get_program(self) -> CompiledProgram | None:
        if not self.is_enabled or has_global_hooks():
            return None
        if self._seen_changes != Changes.count:
            self._program = None  # before another one takes as much
            try:
                self._program = self._make_program()
            except Exception as error:  # whatever a module does with what stands for a tensor
                logger.debug("The model's modules run one by one: %s", error)
            self._seen_changes = Changes.count
        return self._program

    def _make_program(self) -> CompiledProgram:
        for module in self._model.modules():
            self._check_module(module)
        shapes = [CacheShape(spec.num_kv_heads, spec.head_dim) for spec in self._model.get_cache_specs()]
        program = record(self._run_modules, shapes, lambda tensor: type(tensor) is Weight)
        if not can_compile(program):
            raise CannotRecordError("the compiled library doesn't run these ops")
        return CompiledProgram(program)

    def _check_module(self, module: nn.Module) -> None:
        name = type(module).__name__
        if not isinstance(module, Module) or type(module) not in self._types:
            raise CannotRecordError(f"{name} was not there when the model was built")
        if module.has_hooks and module is not self._model:
            raise CannotRecordError(f"{name} has hooks")
        names = _NAMES_ON_MODEL if module is self._model else vars(module)
        if any(attribute in vars(module) and hasattr(type(module), attribute) for attribute in names):
            raise CannotRecordError(f"{name} has a method of its own")

    def _run_modules(self, recorder: Recorder) -> Any:
        step = recorder.step
        return self._model.run_modules(step.token_ids, step.positions, recorder.caches, step)
