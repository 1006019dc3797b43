"""Products with weights: the part of the door (vllm/_custom_ops.py) that the layers with weights go through."""

import torch

from vllm._ops_library import check_status, load_library

WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def linear(
    x: torch.Tensor,  # [..., size] float32
    weight: torch.Tensor,  # [num_columns, size] float32, bfloat16 or int8; rows contiguous
    bias: torch.Tensor | None = None,  # [num_columns] float32
    scale: torch.Tensor | None = None,  # [num_columns] float32: what each row of weights is multiplied by
    out: torch.Tensor | None = None,  # [..., num_columns] float32, row stride free; filled and returned when given
) -> torch.Tensor:  # [..., num_columns] float32
    """Return x · weightᵀ · scale + bias, summed in float32 whatever the weights' type.

    The weights are read as they lie: nothing has to be renewed when they change. An output's bits depend on its own row
    of x and row of weights (and the instruction set) alone: not on how many rows there are, nor on the threads.
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
    for row in (bias, scale):
        assert row is None or (row.dtype == torch.float32 and row.is_contiguous() and row.shape == weight.shape[:1])
    status = library.vllm_linear(
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        weight.data_ptr(),
        weight.stride(0),
        weight.shape[0],
        WEIGHT_KINDS[weight.dtype],
        None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        torch.get_num_threads(),
        outputs.data_ptr(),
        outputs.stride(0),
    )
    check_status(status)
    return out


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Widen all weights and multiply; see `linear`."""
    product = x.float() @ weight.float().t()
    if scale is not None:
        product *= scale
    if bias is not None:
        product += bias
    return product if out is None else out.copy_(product)
