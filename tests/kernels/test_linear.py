"""Products with weights against a float64 oracle: every size of remainder, every stored type, hostile values."""

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from tests.kernels.oracle import REFERENCE
from vllm.ops import api
from vllm.ops.stored_weights import take_int8_rows

KINDS = [torch.float32, torch.bfloat16, torch.int8]
# Gemv (up to 4 rows), panels of 1 to 4 vectors, so many panels that weights are copied, so many that the weights are
# transposed.
ROWS = [1, 2, 3, 4, 5, 8, 15, 24, 32, 33, 49, 55, 100, 191, 192, 250]
SIZES = [1, 7, 8, 15, 17, 64, 321, 576, 1025, 1536]
COLUMNS = [1, 3, 4, 5, 15, 16, 17, 33, 130]


class Product(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor  # in rows
    bias: torch.Tensor | None
    scale: torch.Tensor | None

    @property
    def stored(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What `linear` takes beside x."""
        weight = self.weight
        return api.store_int8(weight) if weight.dtype == torch.int8 else weight, self.bias, self.scale


def make_product(num_rows: int, size: int, num_columns: int, kind: torch.dtype, seed: int = 0) -> Product:
    generator = torch.Generator().manual_seed(seed + 31 * num_rows + 7 * size + num_columns)
    x = torch.randn(num_rows, size, generator=generator)
    weight = torch.randn(num_columns, size, generator=generator)
    bias = torch.randn(num_columns, generator=generator) if (num_rows + size) % 2 else None
    if kind == torch.int8:
        weight = torch.randint(-127, 128, (num_columns, size), generator=generator)
    scale = torch.rand(num_columns, generator=generator) / 100 if kind == torch.int8 else None
    return Product(x, weight.to(kind), bias, scale)


def compute_oracle(product: Product) -> torch.Tensor:  # float64
    wide = product.weight.double()
    if product.scale is not None:
        wide = wide * product.scale.double()[:, None]
    result = product.x.double() @ wide.t()
    return result if product.bias is None else result + product.bias.double()


def assert_near(got: torch.Tensor, product: Product) -> None:
    """float32 sums: an error of some units of rounding of the sum of magnitudes."""
    absolute = Product(product.x.abs(), product.weight.abs(), product.bias, product.scale)
    magnitude = compute_oracle(absolute._replace(bias=None)) + 1
    assert got.dtype == torch.float32
    assert ((got.double() - compute_oracle(product)).abs() / magnitude).max() < 3e-6


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_ragged_size_gives_the_oracle_s_numbers(ops: ModuleType, kind: torch.dtype) -> None:
    for i, (num_rows, size) in enumerate(itertools.product(ROWS, SIZES)):
        product = make_product(num_rows, size, COLUMNS[i % len(COLUMNS)], kind)
        assert_near(ops.linear(product.x, *product.stored), product)
    for num_rows, num_columns in itertools.product((1, 5, 60, 200), COLUMNS):
        product = make_product(num_rows, 48, num_columns, kind)
        assert_near(ops.linear(product.x, *product.stored), product)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_output_depends_on_its_own_row_and_column_alone(
    kind: torch.dtype, on_each_variant: Callable[[Callable[[], Any]], list[Any]]
) -> None:
    """Bit for bit: any number of rows, which are computed in different ways; any threads; any columns beside it."""

    def compare() -> None:
        for size, num_columns in ((576, 107), (1537, 40)):
            product = make_product(530, size, num_columns, kind)
            torch.set_num_threads(2)
            wanted = api.linear(product.x, *product.stored)
            for i, num_rows in enumerate((*range(1, 10), 16, 17, 24, 25, 31, 32, 33, 64, 65, 97, 128, 192, 259, 513)):
                torch.set_num_threads(1 + i % 2)
                first = (37 * num_rows) % (530 - num_rows)
                part = api.linear(product.x[first : first + num_rows], *product.stored)
                assert torch.equal(part, wanted[first : first + num_rows]), (size, num_rows)
            columns = slice(5, 38)
            some = Product(product.x, *(None if rows is None else rows[columns] for rows in product[1:]))
            for num_rows in (1, 3, 8, 150, 300):
                part = api.linear(product.x[:num_rows], *some.stored)
                assert torch.equal(part, wanted[:num_rows, columns]), (size, num_rows)

    threads = torch.get_num_threads()
    try:
        on_each_variant(compare)
    finally:
        torch.set_num_threads(threads)


def test_factors_of_blocks_give_the_bits_of_the_same_weights_as_float32(
    on_each_variant: Callable[[Callable[[], Any]], list[Any]],
) -> None:
    """Each 32 numbers of an int8 row with a factor of their own, whatever kernel and thread reads them."""

    def compare() -> None:
        for i, (num_rows, size) in enumerate(itertools.product(ROWS, (32, 64, 96, 320, 576, 1056))):
            torch.set_num_threads(1 + i % 2)
            num_columns = COLUMNS[i % len(COLUMNS)]
            x, weight, bias, _ = make_product(num_rows, size, num_columns, torch.int8)
            scale = torch.rand(size // 32, num_columns, generator=torch.Generator().manual_seed(i)) / 100
            scale[0, 0] = 0
            wide = weight.float() * scale.t().repeat_interleave(32, dim=1)
            wanted = api.linear(x, wide, bias)
            stored = Product(x, weight, bias, scale).stored
            assert torch.equal(api.linear(x, *stored), wanted), (num_rows, size, num_columns)
            assert torch.allclose(REFERENCE.linear(x, *stored), wanted, atol=1e-3)

    threads = torch.get_num_threads()
    try:
        on_each_variant(compare)
    finally:
        torch.set_num_threads(threads)


def test_int8_rows_are_found_where_they_were_stored() -> None:
    """Part by part, groups begun and ended anywhere, any of them again."""
    rows = torch.randint(-128, 128, (131, 40))
    stored = api.store_int8(torch.zeros(131, 40))
    for first, end in ((0, 5), (5, 37), (64, 100), (100, 131), (37, 64), (30, 34)):
        api.write_int8_rows(stored, first, rows[first:end])
    assert torch.equal(stored, api.store_int8(rows)) and stored.dtype == torch.int8
    ids = torch.tensor([[130, 0], [31, 32]])
    assert torch.equal(take_int8_rows(stored, ids), rows[ids].to(torch.int8))


def test_a_factor_that_is_not_finite_reaches_its_own_outputs_and_no_others(ops: ModuleType) -> None:
    product = make_product(3, 96, 21, torch.int8)
    x, (weight, _, _) = product.x, product.stored
    scale = torch.rand(3, 21)
    wanted = ops.linear(x, weight, None, scale)
    scale[1, 4], scale[2, 9] = torch.nan, torch.inf
    got = ops.linear(x, weight, None, scale)
    rest = [c for c in range(21) if c not in (4, 9)]
    assert torch.equal(got[:, rest], wanted[:, rest])
    assert got[:, 4].isnan().all() and not got[:, 9].isfinite().any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_instruction_sets_agree_to_rounding(
    kind: torch.dtype, on_each_variant: Callable[[Callable[[], Any]], list[Any]]
) -> None:
    for num_rows in (5, 60, 200):
        product = make_product(num_rows, 577, 50, kind)
        for got in on_each_variant(lambda product=product: api.linear(product.x, *product.stored)):
            assert_near(got, product)


@pytest.mark.parametrize("num_rows", [2, 60, 200])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinity_reach_their_own_outputs_and_no_others(
    ops: ModuleType, kind: torch.dtype, num_rows: int
) -> None:
    """The last number of a row is where a padded vector could bring the neighbour's in."""
    x, weight, _, _ = make_product(num_rows, 37, 21, kind)
    wanted = ops.linear(x, weight)
    weight[4, 36], weight[9, 0], x[1, 36] = torch.nan, torch.inf, torch.nan
    got = ops.linear(x, weight)
    assert got[:, 4].isnan().all() and got[1].isnan().all()
    rest = [c for c in range(21) if c not in (4, 9)]
    others = [r for r in range(num_rows) if r != 1]
    assert torch.equal(got[others][:, rest], wanted[others][:, rest])
    assert torch.equal(got[others, 9], x[others, 0].sign() * torch.inf)


@pytest.mark.parametrize("num_rows", [2, 60, 200])
def test_extreme_numbers_stay_what_they_are(ops: ModuleType, num_rows: int) -> None:
    weight = torch.tensor([[3e38, 0.0], [1e-40, 0.0], [-0.0, 0.0], [2.0**-126, 2.0**-126]])
    x = torch.tensor([[1.0, 1.0]]).repeat(num_rows, 1)
    got = ops.linear(x, weight)
    assert torch.equal(got, (x.double() @ weight.double().t()).float())
    assert ops.linear(x * 2, weight)[:, 0].isinf().all(), "an overflow is infinity, not a wrong number"


@pytest.mark.parametrize("num_rows", [1, 60, 200])
def test_strided_rows_and_a_given_output_are_served_in_place(ops: ModuleType, num_rows: int) -> None:
    wide = torch.randn(num_rows, 100)
    x, weight = wide[:, 3:53], torch.randn(40, 50)
    workspace = torch.full((num_rows + 1, 60), 7.0)
    out = workspace[:num_rows, :40]
    assert ops.linear(x, weight, None, None, out) is out
    assert_near(out, Product(x, weight, None, None))
    assert workspace[num_rows:].eq(7).all() and workspace[:, 40:].eq(7).all(), "wrote beside the output"
    assert ops.linear(x[None], weight).shape == (1, num_rows, 40)


@pytest.mark.parametrize("num_rows", [1, 60, 200])
def test_rows_without_numbers_give_the_bias(ops: ModuleType, num_rows: int) -> None:
    bias = torch.randn(21)
    assert torch.equal(ops.linear(torch.empty(num_rows, 0), torch.empty(21, 0), bias), bias.expand(num_rows, -1))


def test_no_rows_give_no_rows(ops: ModuleType) -> None:
    assert ops.linear(torch.empty(0, 8), torch.randn(3, 8)).shape == (0, 3)


@pytest.mark.parametrize("kind", [*KINDS, torch.float16], ids=str)
def test_a_product_to_float32_is_not_rounded_to_the_weights_dtype(ops: ModuleType, kind: torch.dtype) -> None:
    product = make_product(5, 96, 33, kind)._replace(bias=None)
    weight, _, scale = product.stored
    assert_near(ops.linear_to_float32(product.x, weight, scale), product)
    narrow = product._replace(x=product.x.to(torch.bfloat16 if kind == torch.int8 else kind))
    out = torch.full((5, 40), torch.nan)[:, 3:36]
    assert ops.linear_to_float32(narrow.x, weight, scale, out) is out
    assert_near(out, narrow._replace(x=narrow.x.float()))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_embeddings_are_the_rows_that_products_are_made_with(ops: ModuleType, kind: torch.dtype) -> None:
    ids = torch.tensor([32, 0, 0, 69, 31])
    product = make_product(1, 64, 70, kind)
    weight, _, scale = product.stored
    rows = product.weight.float() if scale is None else product.weight.float() * scale[:, None]
    assert torch.equal(ops.embed(ids, weight, scale, torch.float32), rows[ids])
    if scale is None:
        assert torch.equal(ops.embed(ids, weight, None, torch.bfloat16), rows[ids].bfloat16())
    else:
        groups = torch.rand(2, 70)
        wide = product.weight.float().view(70, 2, 32) * groups.t()[:, :, None]
        assert torch.equal(ops.embed(ids, weight, groups, torch.float32), wide.view(70, 64)[ids])
    assert ops.embed(ids[:0], weight, scale, torch.float32).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_a_narrow_dtype_are_torchs(ops: ModuleType, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 16).to(dtype), torch.randn(7, 16).to(dtype), torch.randn(7).to(dtype)
    assert torch.equal(ops.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
