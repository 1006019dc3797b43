"""Which part of a model this process holds, where several compute one together (tensor parallelism).

Whoever constructs a model says it, and its layers ask: `with tensor_parallel(rank, world_size): model = …`.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

_ranks: ContextVar[tuple[int, int]] = ContextVar("tensor_parallel_ranks", default=(0, 1))


class Share(NamedTuple):
    """What one rank holds of a dimension of a checkpoint's tensor."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, total: int) -> "Share":
        return cls(0, total, total)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


@contextlib.contextmanager
def tensor_parallel(rank: int, world_size: int) -> Iterator[None]:
    """Let layers that are constructed inside be those of `rank`, one of 0 … world_size − 1."""
    assert 0 <= rank < world_size, f"rank {rank} is not one of {world_size}"
    token = _ranks.set((rank, world_size))
    try:
        yield
    finally:
        _ranks.reset(token)


def take_share(total: int, unit: int = 1, *, may_repeat: bool = False) -> Share:
    """Return this rank's part of `total` rows or columns, of which each `unit` (a head's, a group's) stay together.

    may_repeat: where there are fewer units than ranks, neighbouring ranks hold the same one.

    Raises:
        ValueError: ranks would hold different amounts.
    """
    rank, world_size = _ranks.get()
    num_units = total // unit
    is_even = num_units % world_size == 0
    if total % unit or not (is_even or (may_repeat and world_size % num_units == 0)):
        raise ValueError(f"{total} in units of {unit} can't be split over {world_size} tensor-parallel ranks")
    first = rank * num_units // world_size
    return Share(first * unit, (first + max(1, num_units // world_size)) * unit, total)


def take_vocabulary_share(vocab_size: int) -> Share:
    """Return this rank's part of the vocabulary; where it can't be even, sizes differ by one."""
    rank, world_size = _ranks.get()
    return Share(rank * vocab_size // world_size, (rank + 1) * vocab_size // world_size, vocab_size)
