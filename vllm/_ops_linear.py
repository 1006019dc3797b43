"""Products with weights: the part of the door (vllm/_custom_ops.py) that the layers with weights go through."""

import itertools

import torch

from vllm._ops_library import check_status, load_library

WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_INT8_BLOCKS = 3
FACTOR_BLOCK = 32  # numbers of a row that share a factor, where a row has more than one
# int8 rows that lie side by side: a number of each, then the next one of each. A kernel that computes as many outputs
# then reads memory in its order, and its vectors as they lie: turning rows in registers kept it behind the memory.
ROW_GROUP = 32


def has_factor_blocks(scale: torch.Tensor | None) -> bool:
    """Say whether int8 rows have a factor each FACTOR_BLOCK numbers, [size / 32, num_rows], and not one a row."""
    return scale is not None and scale.dim() == 2


def get_weight_kind(weight: torch.Tensor, scale: torch.Tensor | None) -> int:
    """Return the library's number of how these weights are stored."""
    return _INT8_BLOCKS if has_factor_blocks(scale) else WEIGHT_KINDS[weight.dtype]


def get_stored_shape(num_rows: int, size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a matrix of weights as it is stored."""
    return (-(-num_rows // ROW_GROUP), size, ROW_GROUP) if dtype == torch.int8 else (num_rows, size)


def get_shape(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, int]:
    """Return how many rows stored weights are, and of how many numbers."""
    return weight.shape[0] if scale is None else scale.shape[-1], weight.shape[1]


def get_row_stride(weight: torch.Tensor) -> int:
    """Return the numbers from row to row of stored weights; of int8, where rows share a group's room, their size."""
    return weight.shape[1] if weight.dtype == torch.int8 else weight.stride(0)


def get_scale_shape(num_rows: int, size: int, has_blocks: bool) -> tuple[int, ...]:
    """Return the shape of the factors of int8 rows: one a row, or one each FACTOR_BLOCK numbers of a row."""
    return (size // FACTOR_BLOCK, num_rows) if has_blocks else (num_rows,)


def write_int8_rows(
    weight: torch.Tensor,  # [num_groups, size, ROW_GROUP] int8
    first_row: int,
    rows: torch.Tensor,  # [num_rows, size], whole numbers
) -> None:
    """Store int8 rows from `first_row` on."""
    end = first_row + len(rows)
    whole = range(-(-first_row // ROW_GROUP) * ROW_GROUP, end // ROW_GROUP * ROW_GROUP)  # rows of whole groups
    if whole:
        some = rows[whole.start - first_row : whole.stop - first_row].reshape(-1, ROW_GROUP, rows.shape[1])
        weight[whole.start // ROW_GROUP : whole.stop // ROW_GROUP] = some.transpose(1, 2)
    for row in itertools.filterfalse(whole.__contains__, range(first_row, end)):
        weight[row // ROW_GROUP, :, row % ROW_GROUP] = rows[row - first_row]


def take_int8_rows(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # [..., size] int8
    """Return the int8 rows of these numbers."""
    return weight[rows // ROW_GROUP, :, rows % ROW_GROUP]


def store_int8(rows: torch.Tensor) -> torch.Tensor:  # [num_groups, size, ROW_GROUP] int8
    """Return rows, [num_rows, size] of whole numbers, as they are stored."""
    num_rows, size = rows.shape
    weight = torch.zeros(get_stored_shape(num_rows, size, torch.int8), dtype=torch.int8)
    write_int8_rows(weight, 0, rows)
    return weight


def widen_rows(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:  # [num_rows, size] float32
    """Return rows of weights times their factors."""
    wide = rows.float()
    if scale is None:
        return wide
    if scale.dim() == 1:
        return wide * scale[:, None]
    return (wide.view(len(wide), -1, FACTOR_BLOCK) * scale.t()[:, :, None]).view(wide.shape)


def linear(
    x: torch.Tensor,  # [..., size] float32
    weight: torch.Tensor,  # [num_columns, size] float32 or bfloat16, rows contiguous; int8: as `store_int8` makes it
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
    num_columns, size = get_shape(weight, scale)
    assert x.dtype == torch.float32 and x.shape[-1] == size, f"x must be float32 rows; got {x.dtype}"
    assert can_read(weight, scale), "rows of weights must be contiguous; int8 has factors"
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    if out is None:
        out = torch.empty(*x.shape[:-1], num_columns)
    outputs = out if out.dim() == 2 else out.view(-1, num_columns)
    assert outputs.shape == (rows.shape[0], num_columns) and outputs.dtype == torch.float32
    assert outputs.stride(1) == 1 or outputs.shape[1] == 1, "rows of the output must be contiguous"
    for row, shape in ((bias, (num_columns,)), (scale, _find_scale_shape(num_columns, size, scale))):
        assert row is None or (row.dtype == torch.float32 and row.is_contiguous() and row.shape == shape)
    status = library.vllm_linear(
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        weight.data_ptr(),
        get_row_stride(weight),
        num_columns,
        get_weight_kind(weight, scale),
        None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        torch.get_num_threads(),
        outputs.data_ptr(),
        outputs.stride(0),
    )
    check_status(status)
    return out


def can_read(weight: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Say whether the compiled library reads weights that are stored so."""
    if weight.dtype == torch.int8:
        return scale is not None and weight.is_contiguous() and weight.shape[2] == ROW_GROUP
    return scale is None and weight.dtype in WEIGHT_KINDS and (weight.stride(1) == 1 or weight.shape[1] == 1)


def _find_scale_shape(num_rows: int, size: int, scale: torch.Tensor | None) -> tuple[int, ...]:
    has_blocks = has_factor_blocks(scale)
    assert not has_blocks or size % FACTOR_BLOCK == 0, "factors are of whole blocks"
    return get_scale_shape(num_rows, size, has_blocks)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Widen all weights and multiply; see `linear`."""
    has_blocks = has_factor_blocks(scale)
    rows = weight if scale is None else take_int8_rows(weight, torch.arange(scale.shape[-1]))
    product = x.float() @ (widen_rows(rows, scale) if has_blocks else rows.float()).t()
    if scale is not None and not has_blocks:
        product *= scale
    if bias is not None:
        product += bias
    return product if out is None else out.copy_(product)
