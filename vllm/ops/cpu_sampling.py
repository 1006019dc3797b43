"""The compiled kernels for rows of logits (csrc/cpu/{score,draw,filter}.cpp)."""

import ctypes

import torch

from vllm.ops.library import check_status
from vllm.ops.torch_reference import TorchReference
from vllm.ops.torch_sampling import ScoredEntries


def to_contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def _describe(logits: torch.Tensor) -> tuple[int, int, int, int]:
    return logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1]


def _make_entries(num_rows: int, width: int) -> ScoredEntries:
    return ScoredEntries(
        torch.empty(num_rows, width, dtype=torch.int32),
        torch.empty(num_rows, width, dtype=torch.float32),
        torch.empty(num_rows, width, dtype=torch.int32),
        torch.empty(num_rows, dtype=torch.int32),
        torch.empty(num_rows, dtype=torch.bool),
    )


class CpuSampling(TorchReference):
    """The operations on rows of logits by the compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def score_rows(
        self, logits: torch.Tensor, chosen: torch.Tensor, num_top: torch.Tensor, max_top: int, as_logits: bool
    ) -> ScoredEntries:
        chosen, num_top = to_contiguous(chosen, torch.int64), to_contiguous(num_top, torch.int32)
        assert chosen.shape == num_top.shape == logits.shape[:1], "one chosen token and one num_top a row"
        entries = _make_entries(logits.shape[0], 1 + max_top)
        status = self._library.vllm_score_rows(
            *_describe(logits),
            chosen.data_ptr(),
            num_top.data_ptr(),
            max_top,
            as_logits,
            torch.get_num_threads(),
            *(field.data_ptr() for field in entries),
        )
        check_status(status)
        return entries

    def score_given_ids(
        self, logits: torch.Tensor, chosen: torch.Tensor, given: torch.Tensor, as_logits: bool
    ) -> ScoredEntries:
        chosen, given = to_contiguous(chosen, torch.int64), to_contiguous(given, torch.int32)
        assert chosen.shape == given.shape[:1] == logits.shape[:1], "one chosen token and one list of ids a row"
        entries = _make_entries(logits.shape[0], 1 + given.shape[1])
        status = self._library.vllm_score_given_ids(
            *_describe(logits),
            chosen.data_ptr(),
            given.data_ptr(),
            given.shape[1],
            as_logits,
            torch.get_num_threads(),
            *(field.data_ptr() for field in entries),
        )
        check_status(status)
        return entries

    def score_full_rows(self, logits: torch.Tensor, as_logits: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = torch.empty(logits.shape, dtype=torch.float32)
        ranks = torch.empty(logits.shape, dtype=torch.int32)
        is_finite = torch.empty(logits.shape[0], dtype=torch.bool)
        outputs = (values.data_ptr(), ranks.data_ptr(), is_finite.data_ptr())
        check_status(
            self._library.vllm_score_full_rows(*_describe(logits), as_logits, torch.get_num_threads(), *outputs)
        )
        return values, ranks, is_finite

    def argmax_rows(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids = torch.empty(logits.shape[0], dtype=torch.int32)
        is_finite = torch.empty(logits.shape[0], dtype=torch.bool)
        status = self._library.vllm_argmax_rows(
            *_describe(logits), torch.get_num_threads(), token_ids.data_ptr(), is_finite.data_ptr()
        )
        check_status(status)
        return token_ids, is_finite

    def draw_rows(
        self, logits: torch.Tensor, row_of_draw: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        row_of_draw = to_contiguous(row_of_draw, torch.int32)
        seeds, positions = to_contiguous(seeds, torch.int64), to_contiguous(positions, torch.int64)
        assert row_of_draw.shape == seeds.shape == positions.shape, "one row, seed and position a draw"
        token_ids = torch.empty(row_of_draw.shape[0], dtype=torch.int32)
        status = self._library.vllm_draw_rows(
            *_describe(logits),
            row_of_draw.data_ptr(),
            seeds.data_ptr(),
            positions.data_ptr(),
            row_of_draw.shape[0],
            torch.get_num_threads(),
            token_ids.data_ptr(),
        )
        check_status(status)
        return token_ids

    def philox_bits(self, seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
        seeds, positions = to_contiguous(seeds, torch.int64), to_contiguous(positions, torch.int64)
        bits = torch.empty(seeds.shape[0], vocab_size, dtype=torch.int64)
        status = self._library.vllm_philox_bits(
            seeds.data_ptr(), positions.data_ptr(), seeds.shape[0], vocab_size, bits.data_ptr()
        )
        check_status(status)
        return bits

    def filter_rows(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> None:
        columns = [column.contiguous() for column in (rows, temperature, top_k, top_p, min_p)]
        pointers = (column.data_ptr() for column in columns)
        check_status(
            self._library.vllm_filter_rows(*_describe(logits), *pointers, rows.shape[0], torch.get_num_threads())
        )
