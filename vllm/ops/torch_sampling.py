"""Scores, draws and filters of rows of logits in plain torch, for any device; also the oracle of the kernels' tests.

Rows are taken in chunks, so that the scratch memory does not grow with the batch.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

_CHUNK_ELEMENTS = 1 << 22  # 32 MiB of 64-bit scratch
_ID_MASK = 0xFFFFFFFF

_PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


class ScoredEntries(NamedTuple):
    """Entries of scored rows: the chosen token first; past `num_entries[row]` they are (−1, −inf, 0)."""

    token_ids: torch.Tensor  # [num_rows, width] int32
    values: torch.Tensor  # [num_rows, width] float32: log-probabilities, or logits; NaN log-probabilities if not finite
    ranks: torch.Tensor  # [num_rows, width] int32, from 1
    num_entries: torch.Tensor  # [num_rows] int32
    is_finite: torch.Tensor  # [num_rows] bool: no NaN, no +inf, not −inf throughout


def iterate_chunks(num_rows: int, row_elements: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(row_elements, 1))
    for first in range(0, max(num_rows, 1), step):  # one empty chunk for no rows: it gives the results their shapes
        yield slice(first, min(first + step, num_rows))


def _compute_normaliser(logits: torch.Tensor, is_finite: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp of each row, [num_rows, 1] float64; NaN where a row is not finite."""
    largest = logits.amax(dim=-1, keepdim=True)
    total = torch.exp(logits - largest).sum(dim=-1, keepdim=True, dtype=torch.float64)
    return torch.where(is_finite[:, None], largest.double() + total.log(), torch.nan)


def _compute_values(
    logits: torch.Tensor, entries: torch.Tensor, as_logits: bool, is_finite: torch.Tensor
) -> torch.Tensor:
    if as_logits:
        return entries
    return (entries.double() - _compute_normaliser(logits, is_finite)).float()


def _count_before(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return how many tokens come before each row's `token_ids` [num_rows, 1]: [num_rows] int64."""
    mine = logits.gather(1, token_ids)
    lower = torch.arange(logits.shape[1], device=logits.device) < token_ids
    return ((logits > mine) | ((logits == mine) & lower)).sum(dim=1)


def make_sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that fall in the order of tokens: larger logit first, lower id first among equals."""
    bits = (logits + 0.0).view(torch.int32).long()  # adding 0 turns −0 into +0
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered << 32) | (_ID_MASK - ids)


def _pack_entries(
    logits: torch.Tensor,
    token_ids: torch.Tensor,  # [num_rows, width] int64, chosen first
    ranks: torch.Tensor,  # [num_rows, width] int64
    keeps: torch.Tensor,  # [num_rows, width] bool
    as_logits: bool,
) -> ScoredEntries:
    """Close the gaps that entries left out make, and add the values."""
    is_finite = logits.amax(dim=-1).isfinite()
    order = torch.argsort((~keeps).int(), dim=1, stable=True)
    keeps, token_ids, ranks = keeps.gather(1, order), token_ids.gather(1, order), ranks.gather(1, order)
    values = _compute_values(logits, logits.gather(1, token_ids.clamp(min=0)), as_logits, is_finite)
    return ScoredEntries(
        token_ids.where(keeps, -1).int(),
        values.where(keeps, -torch.inf),
        ranks.where(keeps, 0).int(),
        keeps.sum(dim=1).int(),
        is_finite,
    )


def _join(chunks: list[ScoredEntries]) -> ScoredEntries:
    return ScoredEntries(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _check_ids(token_ids: torch.Tensor, lowest: int, vocab_size: int) -> None:
    """Raise IndexError for ids outside the vocabulary; on a device, where looking costs a wait, the gather checks."""
    if token_ids.device.type == "cpu" and ((token_ids < lowest) | (token_ids >= vocab_size)).any():
        raise IndexError(f"token ids must lie in a vocabulary of {vocab_size}")


def _pad(entries: ScoredEntries, width: int) -> ScoredEntries:
    missing = (0, width - entries.token_ids.shape[1])
    return entries._replace(
        token_ids=torch.nn.functional.pad(entries.token_ids, missing, value=-1),
        values=torch.nn.functional.pad(entries.values, missing, value=-torch.inf),
        ranks=torch.nn.functional.pad(entries.ranks, missing),
    )


def _multiply_wide(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low 32 bits of the product; int64 wraps around, which leaves the 64 bits right."""
    product = words * factor
    return (product >> 32) & _ID_MASK, product & _ID_MASK


def _compute_gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Return the noise of random bits: float32, computed in float64 and rounded once."""
    v = ((bits.double() + 0.5) * 2.0**-32).float().clamp(max=1.0 - 2.0**-24).double()
    return (-torch.log(-torch.log1p(-v))).float()


def compute_exp(x: torch.Tensor) -> torch.Tensor:  # float32, ≤ 0
    """Return exp(x), to the bit what the kernels compute: each step rounds once (csrc/cpu/variant/stretch.h)."""
    bounded = x.clamp(min=-87.33)
    n = (bounded * 1.44269504).round()
    r = (bounded - n * 0.693145751953125) - n * 1.428606765330187e-06
    p = torch.full_like(x, 1.3926184e-03)
    for coefficient in (8.363179e-03, 4.1666556e-02, 1.6666576e-01, 0.5):
        p = p * r + coefficient
    p = (p * r) * r + (r + 1.0)
    return torch.where(x >= -87.33, torch.ldexp(p, n), 0.0)


class TorchSampling:
    """The operations on rows of logits."""

    def score_rows(
        self, logits: torch.Tensor, chosen: torch.Tensor, num_top: torch.Tensor, max_top: int, as_logits: bool
    ) -> ScoredEntries:
        """Score each row's chosen token and its most likely ones."""
        vocab_size = logits.shape[1]
        _check_ids(chosen, 0, vocab_size)
        if num_top.device.type == "cpu" and ((num_top < 0) | (num_top.clamp(max=vocab_size) > max_top)).any():
            raise ValueError(f"num_top must be from 0 to max_top = {max_top}")
        width = min(max_top, vocab_size)
        columns = torch.arange(width, device=logits.device)
        chunks = []
        for rows in iterate_chunks(*logits.shape):
            part, ids = logits[rows], chosen[rows, None].long()
            top_ids = make_sort_keys(part).topk(width, dim=1).indices
            keeps = (columns < num_top[rows, None]) & (top_ids != ids)
            entries = _pack_entries(
                part,
                torch.cat([ids, top_ids], dim=1),
                torch.cat([_count_before(part, ids)[:, None] + 1, (columns + 1).expand_as(top_ids)], dim=1),
                torch.cat([torch.ones_like(ids, dtype=torch.bool), keeps], dim=1),
                as_logits,
            )
            chunks.append(_pad(entries, 1 + max_top))
        return _join(chunks)

    def score_given_ids(
        self, logits: torch.Tensor, chosen: torch.Tensor, given: torch.Tensor, as_logits: bool
    ) -> ScoredEntries:
        """Score each row's chosen token and the ids given."""
        _check_ids(chosen, 0, logits.shape[1])
        _check_ids(given, -1, logits.shape[1])
        chunks = []
        for rows in iterate_chunks(*logits.shape):
            part = logits[rows]
            ids = torch.cat([chosen[rows, None].long(), given[rows].long()], dim=1)
            keeps = ids >= 0
            for column in range(1, ids.shape[1]):
                keeps[:, column] &= (ids[:, :column] != ids[:, column, None]).all(dim=1)
            ranks = [_count_before(part, ids[:, column, None].clamp(min=0)) + 1 for column in range(ids.shape[1])]
            chunks.append(_pack_entries(part, ids, torch.stack(ranks, dim=1), keeps, as_logits))
        return _join(chunks)

    def score_full_rows(self, logits: torch.Tensor, as_logits: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Score every token of each row."""
        values = torch.empty_like(logits, memory_format=torch.contiguous_format)
        ranks = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
        is_finite = logits.amax(dim=-1).isfinite()
        places = torch.arange(1, logits.shape[1] + 1, dtype=torch.int32, device=logits.device)
        for rows in iterate_chunks(*logits.shape):
            part = logits[rows]
            values[rows] = _compute_values(part, part, as_logits, is_finite[rows])
            order = make_sort_keys(part).argsort(dim=1, descending=True)
            ranks[rows] = torch.empty_like(ranks[rows]).scatter_(1, order, places.expand_as(order))
        return values, ranks, is_finite

    def argmax_rows(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the id of each row's largest logit."""
        is_finite = logits.amax(dim=-1).isfinite()
        return logits.where(logits == logits, -torch.inf).argmax(dim=-1).int(), is_finite

    def philox_bits(self, seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return the 32 random bits of each token: [num_draws, vocab_size] int64.

        Philox4x32-10 (Salmon et al. 2011): key = the seed's halves, counter = (token // 4, the position's halves, 0),
        and the word of a token is output[token % 4].
        """
        seeds, positions = seeds[:, None], positions[:, None]
        counters = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seeds.device)
        zeros = torch.zeros(seeds.shape[0], counters.shape[0], dtype=torch.int64, device=seeds.device)
        words = [counters + zeros, (positions & _ID_MASK) + zeros, ((positions >> 32) & _ID_MASK) + zeros, zeros]
        keys = [seeds & _ID_MASK, (seeds >> 32) & _ID_MASK]
        for _ in range(_PHILOX_ROUNDS):
            high_0, low_0 = _multiply_wide(words[0], _PHILOX_FACTORS[0])
            high_2, low_2 = _multiply_wide(words[2], _PHILOX_FACTORS[1])
            words = [high_2 ^ words[1] ^ keys[0], low_2, high_0 ^ words[3] ^ keys[1], low_0]
            keys = [(key + step) & _ID_MASK for key, step in zip(keys, _PHILOX_KEY_STEPS, strict=True)]
        return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]

    def draw_rows(
        self, logits: torch.Tensor, row_of_draw: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Draw tokens by Gumbel-max."""
        vocab_size = logits.shape[1]
        if row_of_draw.device.type == "cpu" and ((row_of_draw < 0) | (row_of_draw >= logits.shape[0])).any():
            raise IndexError(f"row_of_draw must lie among {logits.shape[0]} rows")
        token_ids = torch.empty(row_of_draw.shape[0], dtype=torch.int32, device=logits.device)
        for draws in iterate_chunks(row_of_draw.shape[0], vocab_size):
            rows = logits.index_select(0, row_of_draw[draws].long())
            noisy = rows + _compute_gumbel(self.philox_bits(seeds[draws], positions[draws], vocab_size))
            token_ids[draws] = noisy.where(noisy == noisy, -torch.inf).argmax(dim=-1).int()
        return token_ids

    def filter_rows(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> None:
        """Filter by sorting whole rows."""
        if rows.device.type == "cpu" and ((rows < 0) | (rows >= logits.shape[0])).any():
            raise IndexError(f"rows must lie among {logits.shape[0]}")
        columns = torch.arange(logits.shape[1], device=logits.device)
        for some in iterate_chunks(rows.shape[0], logits.shape[1]):
            part = logits[rows[some]]
            divisor = temperature[some, None]
            order = make_sort_keys(part).argsort(dim=1, descending=True)
            values = part.gather(1, order)
            largest = values[:, :1]
            lowest_gap = divisor.double() * min_p[some, None].double().log()
            stays = (values.double() - largest.double() >= lowest_gap) & (columns < top_k[some, None])
            sums = compute_exp((values - largest) / divisor).where(stays, 0).double().cumsum(dim=1)
            sums_before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
            is_needed = sums_before < sums[:, -1:] * top_p[some, None].double()
            stays &= is_needed | (top_p[some, None] >= 1)
            stays[:, 0] = True
            is_kept = torch.empty_like(stays).scatter_(1, order, stays) | ~part.amax(dim=1, keepdim=True).isfinite()
            logits[rows[some]] = part.where(is_kept, -torch.inf)
