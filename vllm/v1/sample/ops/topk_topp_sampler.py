"""Top-k, top-p and min-p: which tokens stay, for the rows that ask.

What stays is always a prefix of the row's falling order (logit before temperature, ties by token id, lowest first),
so a row's filters come down to one number, and equal filters keep equal tokens whatever the temperature rounds
together. Removed tokens get −inf, in place.
"""

from typing import NamedTuple

import numpy as np
import torch

# Top-p first looks at this many of the largest values; only rows whose mass lies deeper are sorted whole.
FIRST_WIDTH = 512
# Rows worked on at once: bounds the temporaries (about 10 and 40 bytes a logit).
MAX_ROWS = 64
MAX_SORTED_ROWS = 16


class Prefix(NamedTuple):
    """How much of a row's falling order stays."""

    num_kept: torch.Tensor  # [num_rows] int64, at least 1
    smallest: torch.Tensor  # [num_rows] float32, the smallest logit that stays


def apply_filters(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, before temperature
    rows: np.ndarray,  # [num_filtered] int64, rising: the rows that ask
    temperature: torch.Tensor,  # [num_filtered] float32
    top_k: torch.Tensor,  # [num_filtered] int64, vocab_size: off
    top_p: torch.Tensor,  # [num_filtered] float32, 1: off
    min_p: torch.Tensor,  # [num_filtered] float32, 0: off
) -> None:
    """Apply min-p, then top-k, then top-p on what the others left, renormalised."""
    for first in range(0, len(rows), MAX_ROWS):
        some = slice(first, first + MAX_ROWS)
        part = rows[some]
        is_adjacent = int(part[-1] - part[0]) == len(part) - 1
        index = slice(int(part[0]), int(part[-1]) + 1) if is_adjacent else torch.from_numpy(part).to(logits.device)
        chunk = logits[index]  # a view where the rows are adjacent
        if bool((min_p[some] > 0).any()):
            apply_min_p(chunk, temperature[some], min_p[some])
        apply_top_k_top_p(chunk, temperature[some], top_k[some], top_p[some])
        if not is_adjacent:
            logits[index] = chunk


def apply_min_p(logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor) -> None:
    """Remove tokens whose probability is below min_p times that of the most likely one."""
    gaps = (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]
    _remove(logits, gaps < min_p.log()[:, None])


def apply_top_k_top_p(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> None:
    """Keep the k largest; of these the smallest set that reaches the share p of their probability, at least one."""
    asking = ((top_k < logits.shape[1]) | (top_p < 1)).nonzero().squeeze(1)
    if len(asking) < len(logits):
        if len(asking):
            chunk = logits[asking]
            apply_top_k_top_p(chunk, temperature[asking], top_k[asking], top_p[asking])
            logits[asking] = chunk
        return
    prefix = find_prefix(logits, temperature, top_k, top_p)
    keep_prefix(logits, prefix)


def find_prefix(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> Prefix:
    """Return how much of each row stays; shapes as in apply_filters, every row asks for top-k or top-p."""
    vocab_size = logits.shape[1]
    top_k = top_k.clamp(1, vocab_size)
    wants_top_p = top_p < 1
    width = FIRST_WIDTH if bool(wants_top_p.any()) else int(top_k.max())
    prefix, is_settled = _find_within(logits, temperature, top_k, top_p, min(width, vocab_size))
    unsettled = (~is_settled).nonzero().squeeze(1)
    for rows in unsettled.split(MAX_SORTED_ROWS):
        if len(rows):
            deeper, _ = _find_within(logits[rows], temperature[rows], top_k[rows], top_p[rows], vocab_size)
            prefix.num_kept[rows] = deeper.num_kept
            prefix.smallest[rows] = deeper.smallest
    return prefix


def _find_within(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[Prefix, torch.Tensor]:
    """Look among each row's `width` largest; also returns which rows that settles, [num_rows] bool."""
    vocab_size = logits.shape[1]
    values = _find_largest(logits, width)
    largest = values[:, :1]
    # Sums in double: float32 drifts by more than a token's probability over a large vocabulary.
    weights = ((values - largest) / temperature[:, None]).exp().double()
    is_candidate = torch.arange(width, device=logits.device) < top_k[:, None]
    sums = (weights * is_candidate).cumsum(dim=1)
    total = sums[:, -1]
    is_cut = top_k <= width  # the candidates end within the width
    if not bool(is_cut.all()):
        whole = ((logits - largest) / temperature[:, None]).exp().sum(dim=1, dtype=torch.float64)
        total = torch.where(is_cut, total, whole)
    goal = total * top_p
    sums_before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    num_kept = ((sums_before < goal[:, None]) & is_candidate).sum(dim=1)
    num_kept = torch.where(top_p < 1, num_kept, top_k).clamp(1, width)
    is_settled = is_cut | ((top_k >= vocab_size) & (top_p < 1) & (sums[:, -1] >= goal))
    return Prefix(num_kept, values.gather(1, num_kept[:, None] - 1).squeeze(1)), is_settled


def _find_largest(logits: torch.Tensor, width: int) -> torch.Tensor:  # [num_rows, width] float32, falling
    """Return each row's `width` largest values."""
    if logits.device.type != "cpu":
        return torch.topk(logits, width, dim=1).values
    # numpy selects and sorts floats with SIMD: 4 to 7 times as fast as torch here (512 and all of 49,152).
    values = logits.numpy()
    if width < values.shape[1]:
        values = np.partition(values, values.shape[1] - width, axis=1)[:, -width:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def keep_prefix(logits: torch.Tensor, prefix: Prefix) -> None:
    """Remove all but the prefix; of tokens tied at its end the lowest ids stay."""
    is_below = logits < prefix.smallest[:, None]
    num_left = logits.shape[1] - is_below.view(torch.uint8).sum(dim=1, dtype=torch.int32)
    _remove(logits, is_below)
    crowded = ((num_left > prefix.num_kept) & (prefix.smallest > -torch.inf)).nonzero().squeeze(1)
    for rows in crowded.split(MAX_SORTED_ROWS):
        if len(rows):
            chunk = logits[rows]
            is_tied = chunk == prefix.smallest[rows][:, None]
            num_tied_kept = is_tied.sum(dim=1) - (num_left - prefix.num_kept)[rows]
            is_surplus = is_tied & (is_tied.cumsum(dim=1) > num_tied_kept[:, None])
            _remove(chunk, is_surplus)
            logits[rows] = chunk


def _remove(logits: torch.Tensor, is_removed: torch.Tensor) -> None:
    """Set what is removed to −inf; three times as fast as masked_fill_ on a CPU."""
    torch.where(is_removed, logits.new_tensor(-torch.inf), logits, out=logits)
