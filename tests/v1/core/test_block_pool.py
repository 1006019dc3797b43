import pytest

from vllm.v1.core.block_pool import BlockPool


def test_blocks_without_a_prefix_go_first_then_the_prefix_left_longest_ago() -> None:
    pool = BlockPool(5)
    table = pool.take(5)
    for block_id in table[:3]:
        pool.remember(block_id, b"%d" % block_id)
    pool.release([table[1]])
    pool.release([table[3]])
    pool.release([table[0]])
    pool.release([table[4], table[2]])
    assert pool.take(5) == [table[4], table[3], table[1], table[0], table[2]]


def test_the_end_of_a_prefix_is_given_away_before_its_beginning() -> None:
    pool = BlockPool(3)
    table = pool.take(3)
    for block_id in table:
        pool.remember(block_id, b"%d" % block_id)
    pool.release(table)
    assert pool.take(3) == table[::-1]


def test_a_block_that_is_written_again_can_no_longer_be_found() -> None:
    pool = BlockPool(1)
    pool.remember(pool.take(1)[0], b"old")
    pool.release([0])
    assert pool.find(b"old") == 0
    pool.take(1)
    assert pool.find(b"old") is None


def test_a_found_block_stays_while_any_owner_is_left() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.remember(block_id, b"prefix")
    pool.release([block_id])
    pool.touch([block_id])
    pool.touch([block_id])
    assert pool.num_free == 1
    pool.release([block_id])
    assert pool.num_free == 1
    pool.release([block_id])
    assert pool.num_free == 2


def test_the_first_block_with_a_prefix_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.remember(first, b"prefix")
    pool.remember(second, b"prefix")
    pool.release([second])
    pool.take(1)
    assert pool.find(b"prefix") == first


def test_a_release_without_an_owner_is_our_fault_and_caught() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 has no owner"):
        pool.release([0])
