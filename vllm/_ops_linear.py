"""Products with weights: the part of the door (vllm/_custom_ops.py) that the layers with weights go through."""

import torch

from vllm._ops_library import check_status, load_library

WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_INT8_BLOCKS = 3
FACTOR_BLOCK = 32  # numbers of a row that share a factor, where a row has more than one


def has_factor_blocks(scale: torch.Tensor | None) -> bool:
    """Say whether int8 rows have a factor each FACTOR_BLOCK numbers, [size / 32, num_rows], and not one a row."""
    return scale is not None and scale.dim() == 2


def get_weight_kind(weight: torch.Tensor, scale: torch.Tensor | None) -> int:
    """Return the library's number of how these weights are stored."""
    return _INT8_BLOCKS if has_factor_blocks(scale) else WEIGHT_KINDS[weight.dtype]


def get_scale_shape(weight: torch.Tensor, has_blocks: bool) -> tuple[int, ...]:
    """Return the shape of the factors of int8 rows: one a row, or one each FACTOR_BLOCK numbers of a row."""
    num_rows, size = weight.shape
    return (size // FACTOR_BLOCK, num_rows) if has_blocks else (num_rows,)


def widen_rows(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:  # [num_rows, size] float32
    """Return weights times their factors."""
    wide = weight.float()
    if scale is None:
        return wide
    if scale.dim() == 1:
        return wide * scale[:, None]
    return (wide.view(len(wide), -1, FACTOR_BLOCK) * scale.t()[:, :, None]).view(wide.shape)


def linear(
    x: torch.Tensor,  # [..., size] float32
    weight: torch.Tensor,  # [num_columns, size] float32, bfloat16 or int8; rows contiguous
    bias: torch.Tensor | None = None,  # [num_columns] float32
    scale: torch.Tensor | None = None,  # [num_columns] float32, or [size / 32, num_columns]: the weights' factors
    out: torch.Tensor | None = None,  # [..., num_columns] float32, row stride free; filled and returned when given
) -> torch.Tensor:  # [..., num_columns] float32
    """Return x · weightᵀ · scale + bias, summed in float32 whatever the weights' type.

    Of int8 weights a row has a factor, or each 32 numbers of a row have one: those are multiplied by it before anything
    else, so the result is to the bit that of the products as float32 weights. The weights are read as they lie: nothing
    has to be renewed when they change. An output's bits depend on its own row of x and row of weights (and the
    instruction set) alone: not on how many rows there are, nor on the threads.
    """
    library = load_library() if x.is_cpu and weight.is_cpu else None
    if library is None:
        return linear_reference(x, weight, bias, scale, out)
    assert x.dtype == torch.float32 and x.shape[-1] == weight.shape[1], f"x must be float32 rows; got {x.dtype}"
    assert weight.stride(1) == 1 or weight.shape[1] == 1, "rows of weights must be contiguous"
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    if out is None:
        out = torch.empty(*x.shape[:-1], weight.shape[0])
    outputs = out if out.dim() == 2 else out.view(-1, weight.shape[0])
    assert outputs.shape == (rows.shape[0], weight.shape[0]) and outputs.dtype == torch.float32
    assert outputs.stride(1) == 1 or outputs.shape[1] == 1, "rows of the output must be contiguous"
    for row, shape in ((bias, weight.shape[:1]), (scale, _find_scale_shape(weight, scale))):
        assert row is None or (row.dtype == torch.float32 and row.is_contiguous() and row.shape == shape)
    status = library.vllm_linear(
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        weight.data_ptr(),
        weight.stride(0),
        weight.shape[0],
        get_weight_kind(weight, scale),
        None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        torch.get_num_threads(),
        outputs.data_ptr(),
        outputs.stride(0),
    )
    check_status(status)
    return out


def _find_scale_shape(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, ...]:
    has_blocks = has_factor_blocks(scale)
    assert not has_blocks or weight.shape[1] % FACTOR_BLOCK == 0, "factors are of whole blocks"
    return get_scale_shape(weight, has_blocks)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Widen all weights and multiply; see `linear`."""
    has_blocks = has_factor_blocks(scale)
    product = x.float() @ (widen_rows(weight, scale) if has_blocks else weight.float()).t()
    if scale is not None and not has_blocks:
        product *= scale
    if bias is not None:
        product += bias
    return product if out is None else out.copy_(product)
