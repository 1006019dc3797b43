"""The ops on a CPU: the compiled kernels (csrc/cpu) for what they serve, the reference for any other dtype."""

import torch

from vllm.ops.cpu_sampling import CpuSampling, to_contiguous
from vllm.ops.library import ACTIVATION_CODES, CACHE_KINDS, check_status
from vllm.ops.stored_weights import describe_weights


def _are_floats(*tensors: torch.Tensor | None) -> bool:
    """Say whether these tensors are all float32 and on the CPU."""
    for tensor in tensors:  # noqa: SIM110 - a generator costs more than the smallest kernels
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_cpu):
            return False
    return True


def _as_heads(heads: torch.Tensor) -> torch.Tensor:
    """Return [num_tokens, num_heads, head_dim] with the heads of a token contiguous; copies only where it must."""
    _, num_heads, head_dim = heads.shape
    is_dense = (heads.stride(2) == 1 or head_dim == 1) and (heads.stride(1) == head_dim or num_heads == 1)
    return heads if is_dense else heads.contiguous()


def _check_rotation(cos: torch.Tensor, sin: torch.Tensor, num_tokens: int, head_dim: int) -> None:
    rotary_dim = cos.shape[-1]
    assert rotary_dim % 2 == 0 and rotary_dim <= head_dim, "pairs of a head's elements are rotated"
    assert cos.numel() == sin.numel() == num_tokens * rotary_dim, "a row of cosines and of sines a token"


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()


class CpuOps(CpuSampling):
    """The table of the CPU where the compiled library loads."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        stored = describe_weights(weight, scale) if x.dtype == torch.float32 else None
        if stored is None:
            return super().linear(x, weight, bias, scale, out)
        stride, num_columns, size, kind = stored
        assert x.shape[-1] == size, f"x must have rows of {size}; got {tuple(x.shape)}"
        rows = _as_rows(x)
        if out is None:
            out = torch.empty(*x.shape[:-1], num_columns)
        outputs = out if out.dim() == 2 else out.view(-1, num_columns)
        assert outputs.shape == (rows.shape[0], num_columns) and outputs.dtype == torch.float32
        assert outputs.stride(1) == 1 or outputs.shape[1] == 1, "rows of the output must be contiguous"
        assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous() and bias.shape == (num_columns,))
        status = self._library.vllm_linear(
            rows.data_ptr(),
            rows.stride(0),
            *rows.shape,
            weight.data_ptr(),
            stride,
            num_columns,
            kind,
            None if scale is None else scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            torch.get_num_threads(),
            outputs.data_ptr(),
            outputs.stride(0),
        )
        check_status(status)
        return out

    def linear_to_float32(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight.dtype == torch.float16:
            return super().linear_to_float32(x, weight, scale, out)
        return self.linear(x.float(), weight, None, scale, out)

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        if kv_cache.dtype not in CACHE_KINDS or query.dtype != torch.float32:
            return super().paged_attention(query, kv_cache, block_tables, query_starts, seq_lens, scale, sliding_window)
        query = _as_heads(query)
        block_tables = to_contiguous(block_tables, torch.int32)
        query_starts, seq_lens = to_contiguous(query_starts, torch.int32), to_contiguous(seq_lens, torch.int32)
        assert kv_cache.is_contiguous(), "the cache must be contiguous"
        assert query.shape[2] == kv_cache.shape[4] and query.shape[1] % kv_cache.shape[3] == 0, (
            "heads must match the cache"
        )
        output = torch.empty(query.shape, dtype=torch.float32)
        status = self._library.vllm_paged_attention(
            query.data_ptr(),
            query.stride(0),
            query.shape[1],
            kv_cache.data_ptr(),
            CACHE_KINDS[kv_cache.dtype],
            *kv_cache.shape[1:],
            block_tables.data_ptr(),
            block_tables.shape[1],
            query_starts.data_ptr(),
            seq_lens.data_ptr(),
            seq_lens.shape[0],
            scale,
            sliding_window or 0,
            torch.get_num_threads(),
            output.data_ptr(),
        )
        check_status(status)
        return output

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if kv_cache.dtype not in CACHE_KINDS or key.dtype != torch.float32 or not _are_floats(value):
            return super().write_kv(key, value, kv_cache, slot_mapping)
        key, value, slot_mapping = _as_heads(key), _as_heads(value), to_contiguous(slot_mapping, torch.int64)
        assert kv_cache.is_contiguous() and key.shape == value.shape and key.shape[1:] == kv_cache.shape[3:]
        status = self._library.vllm_write_kv(
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            key.shape[0],
            key.shape[1] * key.shape[2],
            slot_mapping.data_ptr(),
            kv_cache.data_ptr(),
            CACHE_KINDS[kv_cache.dtype],
            kv_cache.shape[1] * kv_cache.shape[2],
            torch.get_num_threads(),
        )
        check_status(status)

    def rotate_and_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        if kv_cache.dtype not in CACHE_KINDS or qkv.dtype != torch.float32 or not _are_floats(query_norm, key_norm):
            return super().rotate_and_write_kv(qkv, cos, sin, kv_cache, slot_mapping, query_norm, key_norm, eps)
        qkv, slot_mapping = _as_heads(qkv), to_contiguous(slot_mapping, torch.int64)
        cos, sin = to_contiguous(cos, torch.float32), to_contiguous(sin, torch.float32)
        num_tokens, num_all_heads, head_dim = qkv.shape
        num_kv_heads = kv_cache.shape[3]
        num_heads = num_all_heads - 2 * num_kv_heads
        assert kv_cache.is_contiguous() and head_dim == kv_cache.shape[4] and slot_mapping.shape == (num_tokens,)
        _check_rotation(cos, sin, num_tokens, head_dim)
        query = torch.empty(num_tokens, num_heads, head_dim)
        status = self._library.vllm_rotate_and_write_kv(
            qkv.data_ptr(),
            qkv.stride(0),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            eps,
            slot_mapping.data_ptr(),
            kv_cache.data_ptr(),
            CACHE_KINDS[kv_cache.dtype],
            kv_cache.shape[1] * kv_cache.shape[2],
            torch.get_num_threads(),
            query.data_ptr(),
        )
        check_status(status)
        return query

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if heads.dtype != torch.float32:
            return super().rotate(heads, cos, sin)
        heads = _as_heads(heads)
        cos, sin = to_contiguous(cos, torch.float32), to_contiguous(sin, torch.float32)
        _check_rotation(cos, sin, heads.shape[0], heads.shape[2])
        output = torch.empty(heads.shape)
        status = self._library.vllm_rotate(
            heads.data_ptr(),
            heads.stride(0),
            *heads.shape,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            torch.get_num_threads(),
            output.data_ptr(),
        )
        check_status(status)
        return output

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.dtype != torch.float32 or not _are_floats(weight, residual):
            return super().rms_norm(x, weight, eps, residual)
        rows = _as_rows(x)
        assert weight.is_contiguous() and weight.shape == x.shape[-1:]
        assert residual is None or (residual.shape == rows.shape and residual.stride(1) == 1), "the residual is rows"
        output = torch.empty(x.shape)
        status = self._library.vllm_rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            *rows.shape,
            weight.data_ptr(),
            eps,
            torch.get_num_threads(),
            output.data_ptr(),
        )
        check_status(status)
        return output

    def activate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        if x.dtype != torch.float32:
            return super().activate(x, activation)
        return self._activate(x, activation, x.shape[-1], is_gated=False)

    def gate_and_multiply(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        if gate_up.dtype != torch.float32:
            return super().gate_and_multiply(gate_up, activation)
        return self._activate(gate_up, activation, gate_up.shape[-1] // 2, is_gated=True)

    def _activate(self, x: torch.Tensor, activation: str, size: int, *, is_gated: bool) -> torch.Tensor:
        rows, code = _as_rows(x), ACTIVATION_CODES[activation]
        output = torch.empty(*x.shape[:-1], size)
        status = self._library.vllm_activate(
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            size,
            code,
            is_gated,
            torch.get_num_threads(),
            output.data_ptr(),
        )
        check_status(status)
        return output
