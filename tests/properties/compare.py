"""Comparing what two runs of the engine say about the same request."""

import numpy as np
import pytest

from vllm import RequestOutput

TOLERANCE = 1e-4
GAP = 1e-4  # two runs may choose different tokens only where the two best (noisy) values lie within this


def assert_same_positions(one, other, where: str = "") -> None:
    """Check two lists of positions entry by entry: ids, ranks where values are apart, values to 1e-4."""
    assert (one is None) == (other is None), where
    if one is None:
        return
    assert len(one) == len(other), where
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if a is None or b is None:
            assert a is b, f"{where} position {i}"
            continue
        assert next(iter(a)) == next(iter(b)), f"{where} position {i}: the chosen token"
        shared = set(a) & set(b)
        for token in shared:
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=TOLERANCE), (
                f"{where} position {i} token {token}"
            )
        # An alternative may change places with a neighbour that is within rounding, nothing else.
        if set(a) != set(b):
            lowest = min(e.logprob for e in a.values())
            for token in set(a) ^ set(b):
                value = (a if token in a else b)[token].logprob
                assert abs(value - lowest) <= 2 * TOLERANCE, f"{where} position {i}: token {token} is in one row only"


def assert_same_outputs(one: RequestOutput, other: RequestOutput, where: str = "") -> None:
    """Check two finished answers to the same request: tokens, reasons, logprobs."""
    assert_same_positions(one.prompt_logprobs, other.prompt_logprobs, f"{where} prompt")
    assert len(one.outputs) == len(other.outputs)
    for a, b in zip(one.outputs, other.outputs, strict=True):
        name = f"{where} choice {a.index}"
        assert a.index == b.index
        if list(a.token_ids) != list(b.token_ids):
            assert_parted_at_a_near_tie(a, b, name)
            continue
        assert a.text == b.text, name
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), name
        assert_same_positions(a.logprobs, b.logprobs, name)
        if a.cumulative_logprob is not None:
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=TOLERANCE * (1 + len(a.token_ids)))


def assert_parted_at_a_near_tie(a, b, where: str) -> None:
    """Two runs may part only where the two tokens' values nearly tie; greedy runs say so by their logprobs."""
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    assert first is not None, f"{where}: one is a beginning of the other"
    assert a.logprobs is not None, f"{where}: parted at {first}, and nothing shows whether it was a near tie"
    x, y = a.token_ids[first], b.token_ids[first]
    row_a, row_b = a.logprobs[first], b.logprobs[first]
    assert y in row_a and x in row_b, f"{where}: parted at {first} on unlikely tokens"
    gap = abs(row_a[x].logprob - row_a[y].logprob)
    assert gap <= GAP, f"{where}: parted at {first} with a gap of {gap}"


def check_answer(out: RequestOutput, logprobs: int | None, prompt_logprobs: int | None) -> None:
    """Check what holds of every answer: lengths, order, sums, ranks."""
    if prompt_logprobs is None:
        assert out.prompt_logprobs is None
    else:
        assert len(out.prompt_logprobs) == len(out.prompt_token_ids) and out.prompt_logprobs[0] is None
        for i in range(1, len(out.prompt_token_ids)):
            check_row(out.prompt_logprobs[i], out.prompt_token_ids[i], prompt_logprobs)
    for completion in out.outputs:
        if logprobs is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
            continue
        assert len(completion.logprobs) == len(completion.token_ids)
        for position, token in zip(completion.logprobs, completion.token_ids, strict=True):
            check_row(position, token, logprobs)
        total = sum(p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def check_row(position: dict, chosen: int, num_top: int) -> None:
    entries = list(position.items())
    assert entries[0][0] == chosen
    others = [entry for token, entry in entries if token != chosen]
    assert [e.logprob for e in others] == sorted((e.logprob for e in others), reverse=True)
    ranks = sorted(e.rank for e in position.values())
    if num_top == 0:
        assert len(entries) == 1
    elif position[chosen].rank <= num_top:
        assert ranks == list(range(1, len(entries) + 1)) and len(entries) <= num_top
    else:
        assert ranks[:-1] == list(range(1, num_top + 1)) and ranks[-1] == position[chosen].rank
    assert all(np.isfinite(e.logprob) for e in position.values())
