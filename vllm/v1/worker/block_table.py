"""Which KV blocks hold each row's sequence, as one host array."""

import numpy as np


class BlockTable:
    """A row a request; entries beyond a row's number of blocks are stale and never read."""

    def __init__(self, max_num_reqs: int, max_blocks: int) -> None:
        self.block_ids = np.zeros((max_num_reqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_reqs, dtype=np.int32)

    def set_row(self, row: int, block_ids: list[int]) -> None:
        self.num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: list[int]) -> None:
        first = int(self.num_blocks[row])
        end = first + len(block_ids)
        assert end <= self.block_ids.shape[1], f"a table holds {self.block_ids.shape[1]} blocks; row {row} gets {end}"
        self.block_ids[row, first:end] = block_ids
        self.num_blocks[row] = end

    def find_slots(
        self,
        rows: np.ndarray,  # [num] int64
        positions: np.ndarray,  # [num] int64
        block_size: int,
    ) -> np.ndarray:  # [num] int64
        """Return block id · block_size + place of each position; −1 where the row's table is shorter."""
        index, places = np.divmod(positions, block_size)
        slots = self.block_ids[rows, index].astype(np.int64) * block_size + places
        return np.where(index < self.num_blocks[rows], slots, -1)

    def move(self, source: int, target: int) -> None:
        num_blocks = self.num_blocks[source]
        self.block_ids[target, :num_blocks] = self.block_ids[source, :num_blocks]
        self.num_blocks[target] = num_blocks

    def take_rows(self, rows: np.ndarray, max_blocks: int) -> np.ndarray:  # [num_rows] → [num_rows, max_blocks] int32
        """Return a copy of the first `max_blocks` entries of `rows`."""
        return self.block_ids[rows, :max_blocks]
