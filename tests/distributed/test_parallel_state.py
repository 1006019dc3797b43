"""Which part of rows and columns a tensor-parallel rank holds."""

import pytest

from vllm.distributed.parallel_state import (
    Share,
    take_share,
    take_vocabulary_share,
    tensor_parallel,
)


def take_all(world_size: int, total: int, unit: int = 1, *, may_repeat: bool = False) -> list[Share]:
    shares = []
    for rank in range(world_size):
        with tensor_parallel(rank, world_size):
            shares.append(take_share(total, unit, may_repeat=may_repeat))
    return shares


def test_one_rank_holds_everything() -> None:
    assert take_share(12, 4) == Share.whole(12) == take_vocabulary_share(12)


def test_the_ranks_hold_inside_the_with_statement_only() -> None:
    with pytest.raises(RuntimeError), tensor_parallel(2, 3):
        assert take_share(12) == Share(8, 12, 12)
        raise RuntimeError
    assert take_share(12) == Share.whole(12)


def test_shares_follow_each_other_in_whole_units() -> None:
    assert take_all(3, 24, 4) == [Share(0, 8, 24), Share(8, 16, 24), Share(16, 24, 24)]


def test_fewer_heads_than_ranks_are_held_by_neighbouring_ranks() -> None:
    assert take_all(4, 16, 8, may_repeat=True) == [Share(0, 8, 16)] * 2 + [Share(8, 16, 16)] * 2
    assert take_all(3, 8, 8, may_repeat=True) == [Share(0, 8, 8)] * 3


@pytest.mark.parametrize(
    ("world_size", "total", "unit", "may_repeat"),
    [(2, 9, 3, True), (2, 10, 4, True), (4, 16, 8, False), (3, 16, 8, True), (2, 2, 4, True)],
)
def test_shares_of_different_sizes_are_refused(world_size: int, total: int, unit: int, may_repeat: bool) -> None:
    with pytest.raises(ValueError, match=f"{total} in units of {unit} can't be split over {world_size}"):
        take_all(world_size, total, unit, may_repeat=may_repeat)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_vocabulary_is_held_once_and_nearly_evenly(world_size: int) -> None:
    shares = []
    for rank in range(world_size):
        with tensor_parallel(rank, world_size):
            shares.append(take_vocabulary_share(50))
    assert [token for share in shares for token in range(share.start, share.stop)] == list(range(50))
    assert max(share.size for share in shares) - min(share.size for share in shares) <= 1
