"""Top-k, top-p and min-p without a sort, against the rule written out with one; threads, batches, instruction sets."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.kernels.oracle import REFERENCE
from tests.v1.sample.reference import count_kept, falling_order
from vllm.ops import api
from vllm.ops.torch_sampling import compute_exp

INF = float("inf")
VOCAB_SIZES = [1, 2, 7, 33, 1000, 1025, 4999]


class Case(NamedTuple):
    """Arguments of filter_rows."""

    logits: torch.Tensor
    rows: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def make_rows(vocab_size: int) -> torch.Tensor:
    """One row of each kind that has broken a filter somewhere."""
    generator = torch.Generator().manual_seed(vocab_size)
    noise = torch.randn(vocab_size, generator=generator)
    some = torch.rand(vocab_size, generator=generator) < 0.3
    some[0] = False
    return torch.stack(
        [
            noise * 3,
            noise * 0.01,  # flat: the end lies deep in the row
            (noise * 2).round(),  # ties en masse
            torch.zeros(vocab_size),
            torch.where(some, -0.0, 0.0),
            noise.masked_fill(some, -INF),
            noise * 1e-40,
            noise * 1e37,
            noise - 1e30,
            torch.linspace(-30, 30, vocab_size) if vocab_size > 1 else noise,
            noise.index_fill(0, torch.tensor(vocab_size - 1), 60.0),
            torch.full((vocab_size,), -3e38).index_fill(0, torch.tensor(vocab_size // 2), 3e38),
        ]
    )


def make_case(logits: torch.Tensor, seed: int) -> Case:
    """Settings at random, each filter on in about half of the rows, for the rows in any order."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, vocab_size = logits.shape

    def toss() -> torch.Tensor:
        return torch.rand(num_rows, generator=generator)

    return Case(
        logits,
        torch.randperm(num_rows, generator=generator),
        toss() * 2 + 0.05,
        torch.where(toss() < 0.5, vocab_size, (toss() * vocab_size).long() + 1),
        torch.where(toss() < 0.4, 1.0, toss().clamp(min=1e-6) ** 0.3),
        torch.where(toss() < 0.6, 0.0, toss() ** 3),
    )


def run(filter_rows: Callable[..., None], case: Case) -> torch.Tensor:
    logits = case.logits.clone()
    filter_rows(logits, *case[1:])
    return logits


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_what_stays_is_to_the_token_what_sorting_finds(ops: ModuleType, vocab_size: int) -> None:
    for seed in range(8):
        case = make_case(make_rows(vocab_size), seed)
        assert torch.equal(run(ops.filter_rows, case), run(REFERENCE.filter_rows, case)), seed


def test_a_whole_vocabulary_is_filtered_as_by_sorting() -> None:
    case = make_case(make_rows(49152), 0)
    for top_k, top_p, min_p in ((49152, 0.9, 0.0), (5000, 1.0, 0.0), (49152, 0.999, 0.01), (50, 0.9, 0.0)):
        num_rows = len(case.rows)
        case = case._replace(
            top_k=torch.full((num_rows,), top_k),
            top_p=torch.full((num_rows,), top_p),
            min_p=torch.full((num_rows,), min_p),
        )
        assert torch.equal(run(api.filter_rows, case), run(REFERENCE.filter_rows, case))


@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_what_stays_follows_the_definition_in_float64(ops: ModuleType, scale: float) -> None:
    row = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * scale
    settings = [(0.7, 5000, 0.9, 0.0), (1.0, 3000, 1.0, 0.0), (1.3, 40, 0.5, 0.0), (1.0, 5000, 1.0, 0.1)]
    for temperature, top_k, top_p, min_p in settings:
        tensors = [torch.tensor([value]) for value in (0, temperature, top_k, top_p, min_p)]
        logits = row[None].clone()
        ops.filter_rows(logits, *tensors)
        kept = np.flatnonzero(logits[0].numpy() > -INF)
        assert set(kept) == set(falling_order(row.numpy())[: len(kept)])
        assert abs(len(kept) - count_kept(row.numpy(), temperature, top_k, top_p, min_p)) <= 1


def test_the_exponential_of_the_rule_is_the_exponential() -> None:
    x = -torch.linspace(0, 100, 100_001)
    expected = np.exp(x.numpy().astype(np.float64))
    expected[x.numpy() < np.float32(-87.33)] = 0
    assert np.allclose(compute_exp(x).numpy(), expected, rtol=1.3e-7, atol=0)


def test_rows_that_are_not_finite_and_rows_that_do_not_ask_stay_as_they_are(ops: ModuleType) -> None:
    logits = torch.zeros(5, 40)
    logits[0, 3] = float("nan")
    logits[1, 3] = INF
    logits[2] = -INF
    before = logits.clone()
    asking = torch.tensor([2, 1, 0, 4])
    ops.filter_rows(logits, asking, torch.ones(4), torch.full((4,), 2), torch.full((4,), 0.9), torch.full((4,), 0.5))
    assert torch.equal(logits[:4].nan_to_num(7), before[:4].nan_to_num(7))
    assert logits[4].tolist() == [0.0, 0.0, *[-INF] * 38]


def test_rows_that_are_not_there_are_refused(ops: ModuleType) -> None:
    for bad in (-1, 2):
        settings = torch.ones(1), torch.tensor([1]), torch.ones(1), torch.zeros(1)
        with pytest.raises(IndexError, match="row"):
            ops.filter_rows(torch.zeros(2, 8), torch.tensor([bad]), *settings)


def test_rows_may_lie_apart(ops: ModuleType) -> None:
    wide = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    case = make_case(wide[:, :64].clone(), 1)
    ops.filter_rows(wide[:, :64], *case[1:])
    assert torch.equal(wide[:, :64], run(ops.filter_rows, case))
    assert (wide[:, 64:] > -INF).all()


def test_what_stays_depends_on_neither_threads_nor_batch_mates() -> None:
    case = make_case(make_rows(20_000), 3)
    torch.set_num_threads(1)
    together = run(api.filter_rows, case)
    for place, row in enumerate(case.rows.tolist()):
        alone = Case(case.logits[row : row + 1], torch.tensor([0]), *(c[place : place + 1] for c in case[2:]))
        assert torch.equal(run(api.filter_rows, alone)[0], together[row])
    for num_threads in (2, 3, 8):
        torch.set_num_threads(num_threads)
        assert torch.equal(run(api.filter_rows, case), together), num_threads


def test_instruction_sets_keep_the_same_tokens(on_each_variant: Callable[[Callable[[], Any]], list[Any]]) -> None:
    case = make_case(make_rows(3001), 5)
    kept = on_each_variant(lambda: run(api.filter_rows, case))
    assert all(torch.equal(kept[0], other) for other in kept[1:])
