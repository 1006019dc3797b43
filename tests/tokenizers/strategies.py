"""Hypothesis strategies over the ids of the tiny tokenizers."""

import itertools

from hypothesis import strategies as st

from tests.tiny_tokenizers import FIRST_BYTE_ID

# Any ids, with whole characters of several bytes (a token a byte) strewn in: chance alone seldom completes one.
_runs = st.integers(0, 511).map(lambda token_id: [token_id]) | st.sampled_from("éÿ你😀").map(
    lambda character: [FIRST_BYTE_ID + byte for byte in character.encode()]
)
token_id_lists = st.lists(_runs, max_size=12).map(lambda runs: list(itertools.chain.from_iterable(runs)))
