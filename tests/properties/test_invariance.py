"""What a request gets does not depend on how the engine happens to run it."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.compare import assert_same_outputs, check_answer
from vllm import SamplingParams

VOCAB = 512
RELAXED = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

prompts = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=60)


@st.composite
def requests(draw, max_n: int = 4) -> tuple[dict, SamplingParams]:
    """A prompt and settings; greedy or seeded, with or without logprobs of either kind."""
    n = draw(st.integers(1, max_n))
    greedy = draw(st.booleans())
    return {"prompt_token_ids": draw(prompts)}, SamplingParams(
        n=n,
        temperature=0.0 if greedy else draw(st.sampled_from([0.7, 1.0, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9])),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=draw(st.integers(1, 12)),
        logprobs=VOCAB,  # so that a parting can be judged
        prompt_logprobs=draw(st.sampled_from([None, 0, 3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
    )


def run(llm, batch, **kwargs):
    return llm.generate([p for p, _ in batch], [s for _, s in batch], use_tqdm=False, **kwargs)


@RELAXED
@given(batch=st.lists(requests(), min_size=2, max_size=6))
def test_a_batch_of_many_equals_batches_of_one(make_llm, batch) -> None:
    llm = make_llm()
    together = run(llm, batch)
    for i, request in enumerate(batch):
        alone = run(llm, [request])[0]
        check_answer(together[i], VOCAB, request[1].prompt_logprobs)
        assert_same_outputs(together[i], alone, f"request {i}")


@RELAXED
@given(batch=st.lists(requests(), min_size=1, max_size=4), budget=st.sampled_from([16, 17, 31, 64]))
def test_the_chunk_size_does_not_matter(make_llm, batch, budget) -> None:
    want = run(make_llm(), batch)
    got = run(make_llm(max_num_batched_tokens=budget), batch)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert_same_outputs(a, b, f"request {i}")


@RELAXED
@given(batch=st.lists(requests(), min_size=1, max_size=4), block_size=st.sampled_from([1, 2, 5, 8, 32]))
def test_the_block_size_does_not_matter(make_llm, batch, block_size) -> None:
    want = run(make_llm(), batch)
    got = run(make_llm(block_size=block_size), batch)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert_same_outputs(a, b, f"request {i}")


@RELAXED
@given(batch=st.lists(requests(), min_size=3, max_size=8))
def test_preempted_equals_undisturbed(make_llm, tiny_pool_llm, batch) -> None:
    want = run(make_llm(), batch)
    got = run(tiny_pool_llm, batch)
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert_same_outputs(a, b, f"request {i}")


def test_the_tiny_pool_really_preempts(tiny_pool_llm) -> None:
    before = tiny_pool_llm.llm_engine.get_stats().num_preemptions
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outs = tiny_pool_llm.generate([{"prompt_token_ids": [5 + i] * 40} for i in range(6)], params, use_tqdm=False)
    assert all(len(o.outputs[0].token_ids) == 60 for o in outs)
    assert tiny_pool_llm.llm_engine.get_stats().num_preemptions > before


@RELAXED
@given(batch=st.lists(requests(), min_size=1, max_size=4))
def test_cached_equals_uncached(make_llm, batch) -> None:
    llm = make_llm()
    llm.reset_prefix_cache()
    cold = run(make_llm(enable_prefix_caching=False), batch)
    first, second = run(llm, batch), run(llm, batch)
    for i, (a, b, c) in enumerate(zip(cold, first, second, strict=True)):
        assert_same_outputs(a, b, f"request {i}, first time")
        assert_same_outputs(a, c, f"request {i}, from the cache")


def test_the_second_time_comes_from_the_cache(make_llm) -> None:
    llm = make_llm()
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": random.Random(4).choices(range(3, VOCAB), k=60)}
    params = SamplingParams(temperature=0, max_tokens=2)
    assert llm.generate(prompt, params)[0].num_cached_tokens == 0
    assert llm.generate(prompt, params)[0].num_cached_tokens == 48


@RELAXED
@given(request=requests(max_n=1), seed=st.sampled_from([0, 1, 2**64 - 2, 12345]))
def test_n_4_with_a_seed_equals_four_singles(make_llm, request, seed) -> None:
    llm = make_llm()
    prompt, params = request
    family = params.clone()
    family.n, family.seed, family.temperature = 4, seed, 1.0
    out = run(llm, [(prompt, family)])[0]
    assert [c.index for c in out.outputs] == [0, 1, 2, 3]
    for i, child in enumerate(out.outputs):
        single = family.clone()
        single.n, single.seed = 1, (seed + i) % 2**64
        alone = run(llm, [(prompt, single)])[0]
        if list(alone.outputs[0].token_ids) == list(child.token_ids):
            assert_same_outputs_of_child(alone.outputs[0], child)
        else:
            pytest.fail(f"child {i} parted from its single: {child.token_ids} against {alone.outputs[0].token_ids}")


def assert_same_outputs_of_child(single, child) -> None:
    assert single.text == child.text and single.finish_reason == child.finish_reason
    assert child.cumulative_logprob == pytest.approx(single.cumulative_logprob, abs=1e-3)


@RELAXED
@given(request=requests(max_n=1))
def test_a_full_row_sums_to_one(make_llm, request) -> None:
    import math

    prompt, params = request
    params = params.clone()
    params.logprobs = params.prompt_logprobs = -1
    out = run(make_llm(), [(prompt, params)])[0]
    for position in [*out.prompt_logprobs[1:], *out.outputs[0].logprobs]:
        assert len(position) == VOCAB
        assert sum(math.exp(e.logprob) for e in position.values()) == pytest.approx(1.0, abs=1e-4)


def test_a_repeated_script_repeats_and_two_calls_differ(tiny_folder) -> None:
    from vllm import LLM

    def script(seed: int) -> list[list[int]]:
        with LLM(str(tiny_folder), seed=seed, max_model_len=64, kv_cache_memory_bytes=4 << 20) as llm:
            params = SamplingParams(n=3, temperature=1.5, max_tokens=8, ignore_eos=True)
            return [
                list(c.token_ids)
                for _ in range(2)
                for c in llm.generate({"prompt_token_ids": [7, 8, 9]}, params)[0].outputs
            ]

    first = script(11)
    assert script(11) == first
    assert script(12) != first
    assert len(set(map(tuple, first))) == 6, "children of one call, or two calls, are the same"


def test_settings_are_read_at_admission_and_never_changed(make_llm) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    params.logprobs = 2
    params.prompt_logprobs = 1
    before = params.clone()
    out = make_llm().generate({"prompt_token_ids": [4, 5, 6]}, params)[0]
    check_answer(out, 2, 1)
    assert params == before
