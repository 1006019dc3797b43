"""What the kernels must give, in numpy and float64, written for clearness alone; beside it the ops in plain torch."""

from typing import NamedTuple

import numpy as np

from vllm.ops.torch_reference import TorchReference

REFERENCE = TorchReference()


class RowOracle(NamedTuple):
    log_probs: np.ndarray  # [vocab_size] float64
    ranks: np.ndarray  # [vocab_size] int, from 1
    order: np.ndarray  # [vocab_size] token ids, first to last


def judge_row(logits: np.ndarray) -> RowOracle:
    """Judge one finite row of float32 logits."""
    wide = logits.astype(np.float64)
    largest = wide.max()
    log_sum_exp = largest + np.log(np.exp(wide - largest).sum())
    order = np.lexsort((np.arange(len(logits)), -(logits + np.float32(0))))
    ranks = np.empty(len(logits), dtype=np.int64)
    ranks[order] = np.arange(1, len(logits) + 1)
    return RowOracle(wide - log_sum_exp, ranks, order)


def is_close(values: np.ndarray, expected: np.ndarray) -> bool:
    """Say whether float32 values are within 2e-7 or a unit of their last place of the float64 ones."""
    with np.errstate(over="ignore"):  # what lies below float32 is −inf
        return np.allclose(values, expected.astype(np.float32), rtol=2.0**-23, atol=2e-7)


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox in Python's whole numbers, after the paper's figure."""
    mask = 0xFFFFFFFF
    words, (low, high) = list(counter), key
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [(second >> 32) ^ words[1] ^ low, second & mask, (first >> 32) ^ words[3] ^ high, first & mask]
        low, high = (low + 0x9E3779B9) & mask, (high + 0xBB67AE85) & mask
    return words
