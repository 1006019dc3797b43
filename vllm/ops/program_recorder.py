"""Records a program: a model's modules run once on buffers that hold nothing, and each op that meets one is noted.

Whatever else is done with a buffer raises: what can be recorded is what ops alone do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vllm.ops.api import register_table
from vllm.ops.program import CacheShape, Matrix, Op, OpKind, Program, ProgramStep, RotationTable


class CannotRecordError(Exception):
    """Something was done with a buffer that no op stands for."""


class _Device(NamedTuple):
    type: str


class _Unknown:
    """What has no value while a program is recorded: nothing may depend on one."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise CannotRecordError("a program does not depend on a step's values")

    def __bool__(self) -> bool:
        raise CannotRecordError("a program does not depend on a step's values")


_DEVICE = _Device("program")
_ROWS: Any = _Unknown()  # the number of tokens


class Symbol(_Unknown):
    """What stands for a tensor while a program is recorded. Anything that it does not say raises."""

    device = _DEVICE
    is_cpu = True
    dtype = torch.float32

    def __init__(self, recorder: "Recorder", shape: tuple[Any, ...]) -> None:
        self.recorder = recorder
        self.shape = shape


class StepInput(Symbol):
    """One of the tensors of a `ProgramStep`, or its cosines or sines."""


class CacheInput(Symbol):
    """A layer's cache."""

    def __init__(self, recorder: "Recorder", number: int, shape: CacheShape) -> None:
        super().__init__(recorder, (2, _ROWS, _ROWS, *shape))
        self.number = number


class Buffer(Symbol):
    """Rows of float32, one a token."""

    def __init__(self, recorder: "Recorder", number: int, shape: tuple[Any, ...]) -> None:
        super().__init__(recorder, shape)
        self.number = number

    @property
    def width(self) -> int:
        return self.recorder.widths[self.number]

    def view(self, rows: Any, *sizes: int) -> "Buffer":
        """Return the rows as heads, or heads as rows."""
        known = math.prod(size for size in sizes if size != -1)
        sizes = tuple(self.width // known if size == -1 else size for size in sizes)
        is_whole = rows is _ROWS and len(sizes) in (1, 2) and math.prod(sizes) == self.width
        _require(is_whole, f"a row of {self.width} is not {sizes}")
        return Buffer(self.recorder, self.number, (_ROWS, *sizes))

    def flatten(self, start: int) -> "Buffer":
        _require(start == 1, "rows stay apart")
        return self.view(_ROWS, self.width)

    def to(self, dtype: torch.dtype) -> "Buffer":
        _require(dtype == torch.float32, "buffers are float32")
        return self

    def __add__(self, other: "Buffer") -> "Buffer":
        _require(isinstance(other, Buffer) and other.shape == self.shape, "rows are added to as many of the same width")
        return self.recorder.append(OpKind.ADD, self.width, input=self, second=other)

    def __mul__(self, factor: float) -> "Buffer":
        _require(isinstance(factor, float | int), "rows are multiplied by a constant")
        return self.recorder.append(OpKind.SCALE, self.width, input=self, factor=float(factor))

    def __iadd__(self, other: "Buffer") -> "Buffer":
        raise CannotRecordError("a buffer changes in place in norms only")

    def __imul__(self, factor: float) -> "Buffer":
        raise CannotRecordError("a buffer changes in place in norms only")


@dataclass
class Recorder:
    """Ops as they come. `accepts`: whether a tensor may be a program's constant."""

    cache_shapes: Sequence[CacheShape]
    accepts: Callable[[torch.Tensor], bool] = lambda _: True
    ops: list[Op] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    tables: list[RotationTable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step = ProgramStep(*(StepInput(self, (_ROWS,)) for _ in ProgramStep._fields))  # type: ignore[arg-type]
        self.caches = [CacheInput(self, number, shape) for number, shape in enumerate(self.cache_shapes)]
        self._rotations: list[tuple[StepInput, StepInput]] = []

    def get_rotation(self, positions: Any, table: RotationTable) -> tuple[Any, Any]:
        """Return what stands for the step's cosines and sines out of `table`."""
        _require(positions is self.step.positions, "rotations are those of the step's positions")
        if table not in self.tables:
            self.tables.append(table)
            pair = (StepInput(self, (_ROWS, 1, table.dim)), StepInput(self, (_ROWS, 1, table.dim)))
            self._rotations.append(pair)
        return self._rotations[self.tables.index(table)]

    def find_table(self, cos: Any, sin: Any) -> int:
        numbers = [number for number, pair in enumerate(self._rotations) if pair[0] is cos and pair[1] is sin]
        _require(bool(numbers), "cosines and sines come from a table")
        return numbers[0]

    def append(
        self, kind: OpKind, width: int, *, input: Buffer | None = None, second: Buffer | None = None, **others: Any
    ) -> Buffer:
        """Note an op, and return its output."""
        for operand in (input, second):
            _require(operand is None or operand.recorder is self, "a program's buffers are its own")
        constants = [*(others.get("matrix") or ()), others.get("weight"), others.get("other_weight")]
        for constant in constants:
            _require(constant is None or self.accepts(constant), "only a module's own weights are constants")
        output = Buffer(self, len(self.widths), (_ROWS, width))
        self.widths.append(width)
        numbers = [-1 if operand is None else operand.number for operand in (input, second)]
        self.ops.append(Op(kind, output.number, input=numbers[0], second=numbers[1], **others))
        return output

    def finish(self, output: Any) -> Program:
        _require(isinstance(output, Buffer) and bool(self.ops), "a program's result is a buffer")
        return Program(self.ops, self.widths, output.number, self.tables, list(self.cache_shapes))


def record(
    run: Callable[[Recorder], Any], cache_shapes: Sequence[CacheShape], accepts: Callable[[torch.Tensor], bool]
) -> Program:
    """Return the program of what `run` does with a recorder's inputs, as its result.

    Raises:
        CannotRecordError: no program does the same; so may anything that a function raises on meeting a `Symbol`.
    """
    recorder = Recorder(cache_shapes, accepts)
    return recorder.finish(run(recorder))


class RecordingOps:
    """The table of ops for buffers: methods have the contract of their namesakes in `vllm.ops.api`."""

    def embed(self, token_ids: Any, weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> Buffer:
        recorder: Recorder = token_ids.recorder
        _require(token_ids is recorder.step.token_ids and dtype == torch.float32, "embeds the step's tokens, float32")
        return recorder.append(OpKind.EMBED, weight.shape[1], matrix=Matrix(weight, scale))

    def linear(
        self,
        x: Buffer,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Buffer:
        num_columns = weight.shape[0] if scale is None else scale.shape[-1]
        _require(out is None and weight.shape[1] == x.width, "rows of as many as the weights have")
        return x.recorder.append(OpKind.LINEAR, num_columns, input=x, matrix=Matrix(weight, scale, bias))

    def rms_norm(self, x: Buffer, weight: torch.Tensor, eps: float, residual: Buffer | None = None) -> Buffer:
        _require(weight.shape == (x.width,), "a weight a column")
        _require(residual is None or residual.shape == x.shape, "the residual is as wide")
        _require(residual is None or residual.number != x.number, "the residual is another buffer")
        return x.recorder.append(OpKind.RMS_NORM, x.width, input=x, second=residual, weight=weight, eps=eps)

    def activate(self, x: Buffer, activation: str) -> Buffer:
        return x.recorder.append(OpKind.ACTIVATE, x.width, input=x, activation=activation)

    def gate_and_multiply(self, gate_up: Buffer, activation: str) -> Buffer:
        return gate_up.recorder.append(
            OpKind.GATE_AND_MULTIPLY, gate_up.width // 2, input=gate_up, activation=activation
        )

    def rotate_and_write_kv(
        self,
        qkv: Buffer,
        cos: Any,
        sin: Any,
        kv_cache: CacheInput,
        slot_mapping: Any,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> Buffer:
        recorder = qkv.recorder
        _require(slot_mapping is recorder.step.slot_mapping, "writes to the step's slots")
        num_kv_heads, head_dim = kv_cache.shape[3:]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        _require(qkv.shape[2] == head_dim and num_heads > 0, "heads match the cache")
        query = recorder.append(
            OpKind.ROTATE_AND_WRITE,
            num_heads * head_dim,
            input=qkv,
            weight=query_norm,
            other_weight=key_norm,
            eps=eps,
            table=recorder.find_table(cos, sin),
            **_describe_heads(kv_cache, num_heads),
        )
        return query.view(_ROWS, num_heads, head_dim)

    def paged_attention(
        self,
        query: Buffer,
        kv_cache: CacheInput,
        block_tables: Any,
        query_starts: Any,
        seq_lens: Any,
        scale: float,
        sliding_window: int | None = None,
    ) -> Buffer:
        step = query.recorder.step
        is_own = block_tables is step.block_tables and query_starts is step.query_starts and seq_lens is step.seq_lens
        _require(is_own, "attends over the step's own blocks")
        _require(query.shape[2] == kv_cache.shape[4] and query.shape[1] % kv_cache.shape[3] == 0, "heads match")
        output = query.recorder.append(
            OpKind.ATTEND,
            query.width,
            input=query,
            factor=scale,
            sliding_window=sliding_window or 0,
            **_describe_heads(kv_cache, query.shape[1]),
        )
        return output.view(*query.shape)


register_table(_DEVICE.type, RecordingOps())


def _describe_heads(kv_cache: CacheInput, num_heads: int) -> dict[str, Any]:
    _, _, _, num_kv_heads, head_dim = kv_cache.shape
    return {"cache": kv_cache.number, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise CannotRecordError(rule)
