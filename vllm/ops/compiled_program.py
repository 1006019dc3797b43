"""Runs a program in one call of the compiled library.

One call an op costs some 10 µs of Python each, ten ops a layer; with narrow weights that is as much as the products.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from vllm import host_memory
from vllm.ops.library import ACTIVATION_CODES, CACHE_KINDS, check_status, load_library
from vllm.ops.program import Matrix, Op, Program, ProgramStep
from vllm.ops.program_layout import make_layout
from vllm.ops.stored_weights import can_read, describe_weights

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_STEP_TYPES = ProgramStep(torch.int64, torch.int64, torch.int64, torch.int32, torch.int32, torch.int32)  # type: ignore[arg-type]


def _fields(**types: Any) -> list[Any]:
    return [*types.items()]


# In the order of csrc/cpu/api.h, where each is described; tests/ops compare them with it.
class MatrixStruct(ctypes.Structure):
    _fields_ = _fields(
        weight=_POINTER, stride=_SIZE, num_columns=_SIZE, size=_SIZE, scale=_POINTER, bias=_POINTER, kind=_SIZE
    )


class ProgramBufferStruct(ctypes.Structure):
    _fields_ = _fields(place=_SIZE, offset=_SIZE, width=_SIZE)


class ProgramOpStruct(ctypes.Structure):
    _fields_ = _fields(
        kind=_SIZE,
        input=_SIZE,
        second=_SIZE,
        output=_SIZE,
        num_grouped=_SIZE,
        matrix=MatrixStruct,
        weight=_POINTER,
        other_weight=_POINTER,
        activation=_SIZE,
        num_heads=_SIZE,
        num_kv_heads=_SIZE,
        head_dim=_SIZE,
        table=_SIZE,
        cache=_SIZE,
        sliding_window=_SIZE,
        eps=_FLOAT,
        factor=_FLOAT,
    )


class ProgramStruct(ctypes.Structure):
    _fields_ = _fields(
        ops=_POINTER, num_ops=_SIZE, buffers=_POINTER, all_width=_SIZE, part_width=_SIZE, fewer_width=_SIZE
    )


class RotationTableStruct(ctypes.Structure):
    _fields_ = _fields(rows=_POINTER, num_positions=_SIZE, dim=_SIZE)


class PagedCacheStruct(ctypes.Structure):
    _fields_ = _fields(elements=_POINTER, kind=_SIZE, num_blocks=_SIZE, block_size=_SIZE)


class ProgramStepStruct(ctypes.Structure):
    _fields_ = _fields(
        token_ids=_POINTER,
        positions=_POINTER,
        num_tokens=_SIZE,
        tables=_POINTER,
        num_tables=_SIZE,
        caches=_POINTER,
        slot_mapping=_POINTER,
        block_tables=_POINTER,
        table_stride=_SIZE,
        query_starts=_POINTER,
        seq_lens=_POINTER,
        num_requests=_SIZE,
    )


def can_compile(program: Program) -> bool:
    """Say whether the compiled library runs a program of these weights."""
    matrices = [op.matrix for op in program.ops if op.matrix is not None]
    floats = [x for op in program.ops for x in (op.weight, op.other_weight)] + [x for m in matrices for x in m[1:]]
    return (
        all(can_read(m.weight, m.scale) for m in matrices)
        and all(x is None or (x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()) for x in floats)
        and all(op.activation in ("", *ACTIVATION_CODES) for op in program.ops)
        and load_library() is not None
    )


class CompiledProgram:
    """A program with pointers to its weights, which are good for as long as the weights stay where they are."""

    def __init__(self, program: Program) -> None:
        assert can_compile(program), "the library can't run this program"
        layout = make_layout(program)
        self._program = program
        self._owned = [tensor.detach() for op in program.ops for tensor in _list_constants(op)]  # keeps the memory
        ops = [_fill_op(op, size) for op, size in zip(layout.ops, layout.group_sizes, strict=True)]
        self._ops = (ProgramOpStruct * len(ops))(*ops)
        self._buffers = (ProgramBufferStruct * len(layout.buffers))(*(ProgramBufferStruct(*b) for b in layout.buffers))
        self._struct = ProgramStruct(
            ctypes.addressof(self._ops), len(ops), ctypes.addressof(self._buffers), *layout.place_widths
        )
        self._address = ctypes.addressof(self._struct)
        self._output_width = program.widths[program.output]
        self._scratch = torch.empty(0)
        self._cache_pointers: list[int] = []
        self._caches = (PagedCacheStruct * len(program.caches))()
        self._tables = (RotationTableStruct * len(program.tables))()
        self._step = ProgramStepStruct(
            tables=ctypes.addressof(self._tables),
            num_tables=len(program.tables),
            caches=ctypes.addressof(self._caches),
        )

    def count_scratch_bytes(self, num_tokens: int) -> int:
        """Return what a step of `num_tokens` works in."""
        library = load_library()
        assert library is not None, "a program is compiled where there is a library"
        return 4 * int(library.vllm_count_program_scratch(self._address, num_tokens))

    def can_run(self, token_ids: torch.Tensor, kv_caches: Sequence[torch.Tensor]) -> bool:
        """Say whether the library runs steps over these caches."""
        return (
            token_ids.is_cpu and len(kv_caches) == len(self._caches) and all(x.dtype in CACHE_KINDS for x in kv_caches)
        )

    def run(
        self, step: ProgramStep, num_positions: int, kv_caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:  # [num_tokens, width of the output]
        """Run a step whose positions lie below `num_positions`.

        Raises:
            IndexError: a token id, a position, a slot or a block lies outside its table.
        """
        library = load_library()
        assert library is not None, "a program is compiled where there is a library"
        for tensor, dtype in zip(step, _STEP_TYPES, strict=True):
            assert tensor.dtype == dtype and tensor.is_contiguous(), f"a step holds contiguous {dtype}"
        self._point_at_caches(kv_caches)
        tables = [table.get(num_positions) for table in self._program.tables]  # alive until the call returns
        for struct, table in zip(self._tables, tables, strict=True):
            struct.rows, struct.num_positions, struct.dim = table.data_ptr(), table.shape[0], table.shape[1] // 2
        num_tokens = step.token_ids.shape[0]
        c = self._step
        c.token_ids, c.positions, c.num_tokens = step.token_ids.data_ptr(), step.positions.data_ptr(), num_tokens
        c.slot_mapping, c.block_tables = step.slot_mapping.data_ptr(), step.block_tables.data_ptr()
        c.table_stride, c.num_requests = step.block_tables.shape[1], step.seq_lens.shape[0]
        c.query_starts, c.seq_lens = step.query_starts.data_ptr(), step.seq_lens.data_ptr()
        num_bytes = self.count_scratch_bytes(num_tokens)
        if self._scratch.nbytes < num_bytes:
            self._scratch = torch.empty(0)  # before the larger one is taken
            self._scratch = torch.empty(num_bytes // 4)
            host_memory.advise_huge_pages(self._scratch.data_ptr(), self._scratch.nbytes)
        output = torch.empty(num_tokens, self._output_width)
        status = library.vllm_run_program(
            self._address, ctypes.addressof(c), self._scratch.data_ptr(), torch.get_num_threads(), output.data_ptr()
        )
        check_status(status)
        return output

    def _point_at_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        pointers = [*map(torch.Tensor.data_ptr, kv_caches)]
        if pointers == self._cache_pointers:
            return
        for struct, cache, shape in zip(self._caches, kv_caches, self._program.caches, strict=True):
            assert cache.is_contiguous() and cache.shape[3:] == shape, f"a layer's cache is of {shape}"
            struct.elements, struct.kind = cache.data_ptr(), CACHE_KINDS[cache.dtype]
            struct.num_blocks, struct.block_size = cache.shape[1:3]
        self._cache_pointers = pointers


def _list_constants(op: Op) -> list[torch.Tensor]:
    return [tensor for tensor in (*(op.matrix or ()), op.weight, op.other_weight) if tensor is not None]


def _point_at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _fill_matrix(matrix: Matrix) -> MatrixStruct:
    weight, scale, bias = matrix
    stored = describe_weights(weight, scale)
    assert stored is not None, "can_compile looked"
    stride, num_columns, size, kind = stored
    return MatrixStruct(weight.data_ptr(), stride, num_columns, size, _point_at(scale), _point_at(bias), kind)


def _fill_op(op: Op, num_grouped: int) -> ProgramOpStruct:
    return ProgramOpStruct(
        op.kind,
        op.input,
        op.second,
        op.output,
        num_grouped,
        MatrixStruct() if op.matrix is None else _fill_matrix(op.matrix),
        _point_at(op.weight),
        _point_at(op.other_weight),
        ACTIVATION_CODES.get(op.activation, 0),
        op.num_heads,
        op.num_kv_heads,
        op.head_dim,
        op.table,
        op.cache,
        op.sliding_window,
        op.eps,
        op.factor,
    )
