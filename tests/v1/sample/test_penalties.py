"""Penalties against a loop over the vocabulary."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from tests.v1.sample.reference import penalise
from vllm.v1.sample.ops.penalties import PenaltyRow, apply_penalties, make_penalties

CPU = torch.device("cpu")
VOCAB = 9
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
AMOUNTS = st.sampled_from([0.0, 0.3, -1.5, 2.0])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.lists(st.floats(-5, 5, width=32) | st.just(-np.inf), min_size=VOCAB, max_size=VOCAB),
            TOKENS.filter(bool),
            TOKENS,
            AMOUNTS,
            AMOUNTS,
            st.sampled_from([1.0, 1.3, 0.5]),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_penalties_equal_a_loop_over_the_vocabulary(rows: list) -> None:  # type: ignore[type-arg]
    logits = torch.tensor([row[0] for row in rows])
    penalties = make_penalties(
        [
            PenaltyRow(i, np.array(prompt + generated, np.int32), len(prompt), presence, frequency, repetition)
            for i, (_, prompt, generated, presence, frequency, repetition) in enumerate(rows)
        ],
        VOCAB,
        CPU,
    )
    if penalties is not None:
        apply_penalties(logits, penalties)
    for result, (row, prompt, generated, presence, frequency, repetition) in zip(logits, rows, strict=True):
        expected = penalise(np.array(row), prompt, generated, presence, frequency, repetition)
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_presence_and_frequency_leave_prompt_tokens_alone() -> None:
    row = PenaltyRow(0, np.array([1, 2, 3], np.int32), 3, presence=2.0, frequency=2.0, repetition=1.0)
    assert make_penalties([row], VOCAB, CPU) is None


def test_rows_that_do_not_ask_stay_as_they_are() -> None:
    logits = torch.ones(3, VOCAB)
    penalties = make_penalties([PenaltyRow(1, np.array([0, 4, 4], np.int32), 1, 0.5, 1.0, 2.0)], VOCAB, CPU)
    assert penalties is not None
    apply_penalties(logits, penalties)
    assert torch.equal(logits[[0, 2]], torch.ones(2, VOCAB))
    assert logits[1].tolist() == [0.5, 1, 1, 1, 0.5 - 2.5, 1, 1, 1, 1]
