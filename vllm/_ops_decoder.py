"""A whole decoder in one call: the part of the door (vllm/_custom_ops.py) that holds pointers to all weights.

One call an op costs some 10 us of Python each, ten ops a layer; with narrow weights that is as much as the products.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vllm import host_memory
from vllm.ops.library import CACHE_KINDS, check_status, load_library
from vllm.ops.stored_weights import can_read, get_row_stride, get_shape, get_weight_kind

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _fields(**types: Any) -> list[Any]:
    return [*types.items()]


# In the order of csrc/cpu/api.h, where each is described.
class _Matrix(ctypes.Structure):
    _fields_ = _fields(
        weight=_POINTER, stride=_SIZE, num_columns=_SIZE, size=_SIZE, scale=_POINTER, bias=_POINTER, kind=_SIZE
    )


class _Layer(ctypes.Structure):
    _fields_ = _fields(
        qkv=_Matrix,
        attention_out=_Matrix,
        gate_up=_Matrix,
        down=_Matrix,
        attention_norm=_POINTER,
        mlp_norm=_POINTER,
        query_norm=_POINTER,
        key_norm=_POINTER,
        sliding_window=_SIZE,
    )


class _Decoder(ctypes.Structure):
    _fields_ = _fields(
        layers=ctypes.POINTER(_Layer),
        num_layers=_SIZE,
        embedding=_Matrix,
        final_norm=_POINTER,
        num_heads=_SIZE,
        num_kv_heads=_SIZE,
        head_dim=_SIZE,
        eps=_FLOAT,
        attention_scale=_FLOAT,
    )


class _Step(ctypes.Structure):
    _fields_ = _fields(
        token_ids=_POINTER,
        positions=_POINTER,
        num_tokens=_SIZE,
        rotations=_POINTER,
        num_positions=_SIZE,
        kv_caches=_POINTER,
        kv_kind=_SIZE,
        num_blocks=_SIZE,
        block_size=_SIZE,
        slot_mapping=_POINTER,
        block_tables=_POINTER,
        table_stride=_SIZE,
        query_starts=_POINTER,
        seq_lens=_POINTER,
        num_requests=_SIZE,
    )


class DecoderMatrix(NamedTuple):
    """Weights as `vllm._custom_ops.linear` takes them."""

    weight: torch.Tensor
    scale: torch.Tensor | None = None  # [num_columns] float32, or [size / 32, num_columns]
    bias: torch.Tensor | None = None  # [num_columns] float32


class DecoderLayer(NamedTuple):
    """One layer's weights; norms are float32."""

    qkv: DecoderMatrix
    attention_out: DecoderMatrix
    gate_up: DecoderMatrix
    down: DecoderMatrix
    attention_norm: torch.Tensor  # [hidden_size]
    mlp_norm: torch.Tensor  # [hidden_size]
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None  # [head_dim]
    sliding_window: int | None


class DecoderShape(NamedTuple):
    """What all layers share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    attention_scale: float


class DecoderStep(NamedTuple):
    """What a step brings; see `vllm._custom_ops.rotate_and_write_kv` and `paged_attention`."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    block_tables: torch.Tensor  # [num_requests, max_blocks] int32
    query_starts: torch.Tensor  # [num_requests + 1] int32
    seq_lens: torch.Tensor  # [num_requests] int32


_STEP_TYPES = (torch.int64, torch.int64, torch.int64, torch.int32, torch.int32, torch.int32)


def can_run_decoder(layers: Sequence[DecoderLayer], embedding: DecoderMatrix, final_norm: torch.Tensor) -> bool:
    """Say whether the compiled library runs a decoder of these weights."""
    matrices = [embedding, *(matrix for layer in layers for matrix in layer[:4])]
    floats = [final_norm, *(norm for layer in layers for norm in layer[4:8] if isinstance(norm, torch.Tensor))]
    floats += [row for matrix in matrices for row in matrix[1:] if row is not None]
    return (
        all(m.weight.is_cpu and can_read(m.weight, m.scale) for m in matrices)
        and all(x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() for x in floats)
        and load_library() is not None
    )


class DecoderPlan:
    """Pointers to a decoder's weights: good for as long as the tensors stay where they are."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        embedding: DecoderMatrix,  # [vocab_size, hidden_size]
        final_norm: torch.Tensor,  # [hidden_size]
        shape: DecoderShape,
    ) -> None:
        assert can_run_decoder(layers, embedding, final_norm), "the library can't run this decoder"
        self._owned = (tuple(layers), embedding, final_norm)  # keeps the memory
        self._layers = (_Layer * len(layers))(*map(_point_at_layer, layers))
        self._decoder = _Decoder(self._layers, len(layers), _point_at_matrix(embedding), final_norm.data_ptr(), *shape)
        self._address = ctypes.addressof(self._decoder)
        self._hidden_size = embedding.weight.shape[1]
        self._scratch = torch.empty(0)
        self._kv_pointers: list[int] = []
        self._kv_array: Any = (_POINTER * len(layers))()
        self._step = _Step(kv_caches=ctypes.addressof(self._kv_array))

    def count_scratch(self, num_tokens: int) -> int:
        """Return the float32 numbers that a step of `num_tokens` works in."""
        library = load_library()
        assert library is not None, "a plan is made where there is a library"
        return int(library.vllm_count_decoder_scratch(self._address, num_tokens))

    def run(
        self,
        step: DecoderStep,
        rotations: torch.Tensor,  # [num_positions, 2 · head_dim] float32: cosines and sines as in `rotate`
        kv_caches: Sequence[torch.Tensor],  # a layer: [2, num_blocks, block_size, num_kv_heads, head_dim]
    ) -> torch.Tensor:  # [num_tokens, hidden_size] float32, after the final norm
        """Run a step: the same functions as op by op, so the same bits.

        Raises:
            IndexError: a token id, a position, a slot or a block lies outside its table.
        """
        library = load_library()
        assert library is not None, "a plan is made where there is a library"
        for tensor, dtype in zip(step, _STEP_TYPES, strict=True):
            assert tensor.dtype == dtype and tensor.is_contiguous(), f"a step holds contiguous {dtype}"
        self._point_at_caches(kv_caches)
        num_tokens = step.token_ids.shape[0]
        c = self._step
        c.token_ids, c.positions, c.num_tokens = step.token_ids.data_ptr(), step.positions.data_ptr(), num_tokens
        c.rotations, c.num_positions = rotations.data_ptr(), rotations.shape[0]
        c.slot_mapping, c.block_tables = step.slot_mapping.data_ptr(), step.block_tables.data_ptr()
        c.table_stride, c.num_requests = step.block_tables.shape[1], step.seq_lens.shape[0]
        c.query_starts, c.seq_lens = step.query_starts.data_ptr(), step.seq_lens.data_ptr()
        num_floats = self.count_scratch(num_tokens)
        if self._scratch.shape[0] < num_floats:
            self._scratch = torch.empty(0)  # before the larger one is taken
            self._scratch = torch.empty(num_floats)
            host_memory.advise_huge_pages(self._scratch.data_ptr(), self._scratch.nbytes)
        output = torch.empty(num_tokens, self._hidden_size)
        status = library.vllm_run_decoder(
            self._address, ctypes.addressof(c), self._scratch.data_ptr(), torch.get_num_threads(), output.data_ptr()
        )
        check_status(status)
        return output

    def _point_at_caches(self, kv_caches: Sequence[torch.Tensor]) -> None:
        pointers = [*map(torch.Tensor.data_ptr, kv_caches)]
        if pointers == self._kv_pointers:
            return
        assert len(pointers) == len(self._layers), "one cache a layer"
        first = kv_caches[0]
        assert all(x.shape == first.shape and x.is_contiguous() and x.dtype == first.dtype for x in kv_caches)
        self._kv_pointers, self._kv_array[:] = pointers, pointers
        self._step.num_blocks, self._step.block_size = first.shape[1:3]
        self._step.kv_kind = CACHE_KINDS[first.dtype]


def _point_at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _point_at_matrix(matrix: DecoderMatrix) -> _Matrix:
    weight, scale, bias = matrix
    num_columns, size = get_shape(weight, scale)
    stride, kind = get_row_stride(weight), get_weight_kind(weight, scale)
    return _Matrix(weight.data_ptr(), stride, num_columns, size, _point_at(scale), _point_at(bias), kind)


def _point_at_layer(layer: DecoderLayer) -> _Layer:
    matrices, norms = map(_point_at_matrix, layer[:4]), map(_point_at, layer[4:8])
    return _Layer(*matrices, *norms, layer.sliding_window or 0)
