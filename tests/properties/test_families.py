"""n by fork: one prompt pass, children that end by themselves, nothing held at the end."""

import pytest

from tests.properties.compare import assert_same_positions
from vllm import SamplingParams


def count_run_positions(llm, prompt: list[int], params: SamplingParams) -> int:
    before = llm.llm_engine.get_stats().num_computed_positions
    llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return llm.llm_engine.get_stats().num_computed_positions - before


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_the_prompt_is_computed_once_for_n_children(make_llm, length, caching, prompt_logprobs) -> None:
    llm = make_llm(enable_prefix_caching=caching)
    llm.reset_prefix_cache()
    prompt = [3 + (7 * i + length) % 500 for i in range(length)]
    params = SamplingParams(n=10, seed=5, max_tokens=1, prompt_logprobs=prompt_logprobs)
    assert length <= count_run_positions(llm, prompt, params) <= length + 10


def test_n_may_exceed_the_seats(make_llm) -> None:
    llm = make_llm(max_num_seqs=3)
    out = llm.generate(
        {"prompt_token_ids": [5] * 20}, SamplingParams(n=40, seed=0, temperature=1.5, max_tokens=6, ignore_eos=True)
    )[0]
    assert [c.index for c in out.outputs] == list(range(40))
    assert all(len(c.token_ids) == 6 for c in out.outputs)
    assert len({tuple(c.token_ids) for c in out.outputs}) > 20


def test_greedy_children_are_computed_once(make_llm) -> None:
    llm = make_llm()
    prompt = [11, 12, 13, 14]
    one = count_run_positions(llm, prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    many = count_run_positions(llm, prompt, SamplingParams(n=5, temperature=0, max_tokens=8, ignore_eos=True))
    assert many == one
    out = llm.generate({"prompt_token_ids": prompt}, SamplingParams(n=5, temperature=0, max_tokens=8, logprobs=1))[0]
    assert [c.index for c in out.outputs] == [0, 1, 2, 3, 4]
    assert len({(tuple(c.token_ids), c.text, c.cumulative_logprob) for c in out.outputs}) == 1


def test_a_fork_under_a_full_pool_still_ends_right(make_llm, tiny_pool_llm) -> None:
    params = SamplingParams(n=6, seed=3, temperature=1.2, max_tokens=40, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": [20 + i] * 37} for i in range(3)]
    want = make_llm().generate(prompts, params)
    before = tiny_pool_llm.llm_engine.get_stats().num_preemptions
    got = tiny_pool_llm.generate(prompts, params)
    assert tiny_pool_llm.llm_engine.get_stats().num_preemptions > before
    for a, b in zip(want, got, strict=True):
        assert_same_positions(a.prompt_logprobs, b.prompt_logprobs)
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert list(x.token_ids) == list(y.token_ids)
            assert_same_positions(x.logprobs, y.logprobs)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_abort_of_the_parent_ends_all_children_and_frees_everything(make_llm, steps) -> None:
    engine = make_llm(max_num_seqs=4, max_num_batched_tokens=16).llm_engine
    engine.reset_prefix_cache()
    params = SamplingParams(n=9, seed=2, max_tokens=50, ignore_eos=True)
    engine.add_request("family", {"prompt_token_ids": [6] * 30}, params)
    for _ in range(steps):
        engine.step()
    engine.abort_request(["family"])
    assert not engine.has_unfinished_requests()
    engine.step()
    stats = engine.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_every_block_is_free_after_a_mixed_batch(make_llm) -> None:
    llm = make_llm()
    params = [SamplingParams(n=1 + i % 4, seed=i, max_tokens=1 + i, stop=["e"], logprobs=i % 3) for i in range(12)]
    llm.generate([{"prompt_token_ids": [30 + i] * (5 + 3 * i)} for i in range(12)], params)
    stats = llm.llm_engine.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


def test_one_bad_prompt_is_named_and_nothing_is_left_running(make_llm) -> None:
    llm = make_llm()
    good = {"prompt_token_ids": [5, 6, 7]}
    with pytest.raises(ValueError, match=r"prompt.*2.*600") as caught:
        llm.generate([good, good, {"prompt_token_ids": [5, 600]}], SamplingParams(max_tokens=4))
    assert caught.value.parameter
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate(good, SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


def test_a_request_that_cannot_fit_is_refused_at_the_door(make_llm) -> None:
    llm = make_llm()
    for prompt, params in [
        ([5] * 129, SamplingParams(max_tokens=1)),
        ([5] * 128, SamplingParams(max_tokens=1)),
        ([], SamplingParams()),
    ]:
        with pytest.raises(ValueError):
            llm.generate({"prompt_token_ids": prompt}, params)
    out = llm.generate({"prompt_token_ids": [5] * 128}, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert len(out.prompt_logprobs) == 128
