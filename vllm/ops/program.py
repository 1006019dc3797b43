"""Programs: what a model does with a step, as a list of ops over buffers.

A program is recorded from a model's modules (program_recorder.py) and run by the compiled library in one call
(compiled_program.py). `run_op_by_op` runs the same list with any table of ops and is the oracle of both.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class OpKind(enum.IntEnum):
    """As in csrc/cpu/api.h, where each is described."""

    EMBED = 0
    LINEAR = 1
    GATED_LINEAR = 2
    GATE_AND_MULTIPLY = 3
    RMS_NORM = 4
    ADD = 5
    SCALE = 6
    ROTATE_AND_WRITE = 7
    ATTEND = 8
    ACTIVATE = 9


class Matrix(NamedTuple):
    """Weights as the op `linear` takes them."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Op:
    """One op. Buffers are numbers, −1: none."""

    kind: OpKind
    output: int
    input: int = -1
    second: int = -1  # a norm's residual, the other addend, the product that a gated linear may write
    matrix: Matrix | None = None
    weight: torch.Tensor | None = None  # a norm's; of ROTATE_AND_WRITE the query heads'
    other_weight: torch.Tensor | None = None  # the key heads'
    activation: str = ""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    table: int = 0
    cache: int = 0
    sliding_window: int = 0  # 0: none
    eps: float = 0.0
    factor: float = 0.0

    @property
    def reads(self) -> tuple[int, ...]:
        """The buffers whose content matters to the op."""
        second = -1 if self.kind == OpKind.GATED_LINEAR else self.second
        return tuple(buffer for buffer in (self.input, second) if buffer >= 0)


class CacheShape(NamedTuple):
    """What a program must know of a layer's cache, [2, num_blocks, block_size, num_kv_heads, head_dim]."""

    num_kv_heads: int
    head_dim: int


class RotationTable(NamedTuple):
    """Cosines and sines by position: `get(num_positions)` returns [num_positions or more, 2 · dim] float32."""

    get: Callable[[int], torch.Tensor]
    dim: int


@dataclass(frozen=True)
class Program:
    """A list of ops; the buffer `output` is the result."""

    ops: list[Op]
    widths: list[int]  # of each buffer
    output: int
    tables: list[RotationTable]
    caches: list[CacheShape]


class ProgramStep(NamedTuple):
    """What a step brings; see `rotate_and_write_kv` and `paged_attention`."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    block_tables: torch.Tensor  # [num_requests, max_blocks] int32
    query_starts: torch.Tensor  # [num_requests + 1] int32
    seq_lens: torch.Tensor  # [num_requests] int32


def run_op_by_op(
    program: Program,
    ops: Any,  # a table of ops: the compiled ones give the bits of the program in one call
    step: ProgramStep,
    kv_caches: Sequence[torch.Tensor],
) -> torch.Tensor:  # [num_tokens, width of the output]
    """Run a step, one op after the other."""
    buffers: dict[int, torch.Tensor] = {}
    max_position = int(step.positions.max()) + 1
    for op in program.ops:
        x, second = buffers.get(op.input, torch.empty(0)), buffers.get(op.second)
        buffers[op.output] = _run_op(op, ops, step, x, second, kv_caches, program.tables, max_position)
    return buffers[program.output]


def _run_op(
    op: Op,
    ops: Any,
    step: ProgramStep,
    x: torch.Tensor,
    second: torch.Tensor | None,
    kv_caches: Sequence[torch.Tensor],
    tables: list[RotationTable],
    num_positions: int,
) -> torch.Tensor:
    weight, scale, bias = op.matrix or Matrix(torch.empty(0))
    result: torch.Tensor
    match op.kind:
        case OpKind.EMBED:
            result = ops.embed(step.token_ids, weight, scale, torch.float32)
        case OpKind.LINEAR:
            result = ops.linear(x, weight, bias, scale)
        case OpKind.GATED_LINEAR:
            result = ops.gate_and_multiply(ops.linear(x, weight, bias, scale), op.activation)
        case OpKind.GATE_AND_MULTIPLY:
            result = ops.gate_and_multiply(x, op.activation)
        case OpKind.ACTIVATE:
            result = ops.activate(x, op.activation)
        case OpKind.RMS_NORM:
            result = ops.rms_norm(x, op.weight, op.eps, second)
        case OpKind.ADD:
            assert second is not None, "two addends"
            result = x + second
        case OpKind.SCALE:
            result = x * op.factor
        case OpKind.ROTATE_AND_WRITE:
            cos, sin = tables[op.table].get(num_positions)[step.positions].chunk(2, -1)
            heads, norms = x.unflatten(1, (-1, op.head_dim)), (op.weight, op.other_weight, op.eps)
            cache = kv_caches[op.cache]
            result = ops.rotate_and_write_kv(heads, cos, sin, cache, step.slot_mapping, *norms).flatten(1)
        case OpKind.ATTEND:
            query, cache = x.unflatten(1, (-1, op.head_dim)), kv_caches[op.cache]
            requests = (step.block_tables, step.query_starts, step.seq_lens)
            window = op.sliding_window or None
            result = ops.paged_attention(query, cache, *requests, op.factor, window).flatten(1)
    return result
