"""How matrices of weights are stored: float rows, or int8 rows that are interleaved."""

import itertools

import torch

WEIGHT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_INT8_GROUPS = 3
GROUP_SIZE = 32  # elements of a row that share a scale, where a row has more than one
# Rows of int8 that are interleaved: an element of each, then the next one of each. A kernel that computes as many
# outputs then reads memory in its order, and needs no transpose in registers, which would be slower than the memory.
INTERLEAVED_ROWS = 32


def has_group_scales(scale: torch.Tensor | None) -> bool:
    """Say whether int8 rows have a scale for each GROUP_SIZE elements, [size / 32, num_rows], instead of one a row."""
    return scale is not None and scale.dim() == 2


def get_stored_shape(num_rows: int, size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a matrix of weights as it is stored."""
    return (-(-num_rows // INTERLEAVED_ROWS), size, INTERLEAVED_ROWS) if dtype == torch.int8 else (num_rows, size)


def get_scale_shape(num_rows: int, size: int, has_groups: bool) -> tuple[int, ...]:
    """Return the shape of the scales of int8 rows: one a row, or one for each GROUP_SIZE elements of a row."""
    return (size // GROUP_SIZE, num_rows) if has_groups else (num_rows,)


def write_int8_rows(
    weight: torch.Tensor,  # [num_rows / INTERLEAVED_ROWS, size, INTERLEAVED_ROWS] int8
    first_row: int,
    rows: torch.Tensor,  # [num_rows, size], whole numbers
) -> None:
    """Store int8 rows from `first_row` on."""
    end = first_row + len(rows)
    # Sets of interleaved rows that are written whole.
    whole = range(-(-first_row // INTERLEAVED_ROWS) * INTERLEAVED_ROWS, end // INTERLEAVED_ROWS * INTERLEAVED_ROWS)
    if whole:
        some = rows[whole.start - first_row : whole.stop - first_row].reshape(-1, INTERLEAVED_ROWS, rows.shape[1])
        weight[whole.start // INTERLEAVED_ROWS : whole.stop // INTERLEAVED_ROWS] = some.transpose(1, 2)
    for row in itertools.filterfalse(whole.__contains__, range(first_row, end)):
        weight[row // INTERLEAVED_ROWS, :, row % INTERLEAVED_ROWS] = rows[row - first_row]


def take_int8_rows(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # [..., size] int8
    """Return the int8 rows at these indices."""
    return weight[rows // INTERLEAVED_ROWS, :, rows % INTERLEAVED_ROWS]


def store_int8(rows: torch.Tensor) -> torch.Tensor:  # [num_rows / INTERLEAVED_ROWS, size, INTERLEAVED_ROWS] int8
    """Return rows, [num_rows, size] of whole numbers, as they are stored."""
    num_rows, size = rows.shape
    weight = torch.zeros(get_stored_shape(num_rows, size, torch.int8), dtype=torch.int8)
    write_int8_rows(weight, 0, rows)
    return weight


def widen_rows(rows: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:  # [num_rows, size] float32
    """Return rows of weights times their scales."""
    wide = rows.float()
    if scale is None:
        return wide
    if scale.dim() == 1:
        return wide * scale[:, None]
    return (wide.view(len(wide), -1, GROUP_SIZE) * scale.t()[:, :, None]).view(wide.shape)


def can_read(weight: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Say whether the compiled library reads weights that are stored so."""
    return describe_weights(weight, scale) is not None


def describe_weights(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[int, int, int, int] | None:
    """Return row stride, number of rows, size and the library's code of how they are stored; None: it can't read them.

    Of int8 rows, which are interleaved, the stride is their size.
    """
    kind = WEIGHT_KINDS.get(weight.dtype)
    if kind is None or not weight.is_cpu:
        return None
    if scale is None:
        assert weight.dim() == 2, "int8 rows have scales"
        num_rows, size = weight.shape
        stride, step = weight.stride()
        return (stride, num_rows, size, kind) if step == 1 or size == 1 else None
    _, size, _ = weight.shape
    num_rows = scale.shape[-1]
    if scale.dim() == 2:
        kind = _INT8_GROUPS
        assert scale.shape[0] * GROUP_SIZE == size, "scales are of whole groups"
    assert weight.shape == get_stored_shape(num_rows, size, weight.dtype), "only int8 rows have scales"
    assert weight.is_contiguous() and scale.is_contiguous() and scale.dtype == torch.float32, "scales are float32"
    return size, num_rows, size, kind
