"""`prompt_logprobs_start`: scores from there on, None before, and only the rows that they need."""

import pytest

from tests.properties.compare import assert_same_positions
from vllm import SamplingParams

PROMPT = [3 + (11 * i) % 500 for i in range(40)]


@pytest.mark.parametrize("start", [0, 1, 2, 15, 16, 17, 33, 39, 40])
@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("budget", [256, 7])
def test_entries_before_the_start_are_none_and_the_others_as_ever(make_llm, start, max_tokens, budget) -> None:
    llm = make_llm(max_num_batched_tokens=budget)
    whole = make_llm(enable_prefix_caching=False).generate(
        {"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=2)
    )[0]
    llm.reset_prefix_cache()
    before = llm.llm_engine.get_stats()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=2, prompt_logprobs_start=start)
    out = llm.generate({"prompt_token_ids": PROMPT}, params)[0]
    after = llm.llm_engine.get_stats()
    first = max(start, 1)
    assert len(out.prompt_logprobs) == 40 and all(entry is None for entry in out.prompt_logprobs[:first])
    assert_same_positions(list(whole.prompt_logprobs)[first:], list(out.prompt_logprobs)[first:])
    assert list(out.outputs[0].token_ids) == list(whole.outputs[0].token_ids)
    assert after.num_scored_prompt_rows - before.num_scored_prompt_rows == 40 - first
    ran = after.num_computed_positions - before.num_computed_positions
    assert ran == (39 if start < 40 else 0) + (max_tokens - 1 + (1 if start < 40 else 40) if max_tokens else 0)


def test_the_text_of_a_late_start_is_that_of_its_own_tokens(make_llm) -> None:
    llm = make_llm()
    both = [
        llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=0, prompt_logprobs=1, **start))[0]
        for start in ({}, {"prompt_logprobs_start": 20})
    ]
    whole, late = (out.prompt_logprobs for out in both)
    assert [dict(p)[t].decoded_token for p, t in zip(late[20:], PROMPT[20:], strict=True)] == [
        dict(p)[t].decoded_token for p, t in zip(whole[20:], PROMPT[20:], strict=True)
    ]
