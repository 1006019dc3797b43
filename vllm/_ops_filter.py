"""Top-k, top-p and min-p: the part of the door (vllm/_custom_ops.py) that decides which tokens may be drawn."""

import torch

from vllm._ops_library import check_status, load_library
from vllm._ops_reference import iterate_chunks, make_sort_keys


def filter_rows(
    logits: torch.Tensor,  # [num_rows, vocab_size] float32, row stride free, before temperature; changed in place
    rows: torch.Tensor,  # [num_filtered] int64, each once: the rows that ask
    temperature: torch.Tensor,  # [num_filtered] float32, above 0
    top_k: torch.Tensor,  # [num_filtered] int64, vocab_size or more: off
    top_p: torch.Tensor,  # [num_filtered] float32, 1: off
    min_p: torch.Tensor,  # [num_filtered] float32, 0: off
) -> None:
    """Set to −inf what min-p, then top-k, then top-p (of what the others left, renormalised) remove.

    What stays is a prefix of the row's falling order (ties: lowest id first) of one token or more:
    those with logit − max ≥ temperature · log(min_p), in float64; of these the top_k first; of these the fewest whose
    weights exp((logit − max) / temperature), float32 added up in float64, reach top_p of the sum of all of them.
    A row that is not finite stays as it is. What stays depends on nothing but the row and its settings.

    Raises:
        IndexError: a row isn't there.
    """
    assert logits.dtype == torch.float32 and logits.dim() == 2, f"logits must be float32 rows; got {logits.dtype}"
    assert logits.stride(1) == 1 or logits.shape[1] == 1, "the vocabulary must be contiguous"
    assert rows.dtype == top_k.dtype == torch.int64, "rows and top_k must be int64"
    assert temperature.dtype == top_p.dtype == min_p.dtype == torch.float32, "the settings must be float32"
    assert rows.shape == temperature.shape == top_k.shape == top_p.shape == min_p.shape, "one setting a row"
    library = load_library() if logits.is_cpu else None
    if library is None:
        return filter_rows_reference(logits, rows, temperature, top_k, top_p, min_p)
    columns = [column.contiguous() for column in (rows, temperature, top_k, top_p, min_p)]
    status = library.vllm_filter_rows(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        *(column.data_ptr() for column in columns),
        rows.shape[0],
        torch.get_num_threads(),
    )
    check_status(status)


def filter_rows_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    """Filter by sorting whole rows; see `filter_rows`."""
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
