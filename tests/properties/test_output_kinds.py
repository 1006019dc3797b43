"""The same request in each output kind, driven through LLMEngine.step."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.test_invariance import VOCAB, requests
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

RELAXED = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def drive(engine, request_id: str, prompt: dict, params: SamplingParams) -> list[RequestOutput]:
    """Run one request alone to its end and return every output it gave, in order."""
    engine.add_request(request_id, prompt, params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {o.request_id for o in outputs} == {request_id}
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def by_kind(engine, prompt: dict, params: SamplingParams) -> dict[RequestOutputKind, list[RequestOutput]]:
    runs = {}
    for kind in RequestOutputKind:
        own = params.clone()
        own.output_kind = kind
        runs[kind] = drive(engine, f"request-{kind.name}", prompt, own)
    return runs


def as_dicts(positions) -> list | None:
    return None if positions is None else [None if p is None else dict(p) for p in positions]


@RELAXED
@given(request=requests(), stop=st.sampled_from([None, None, ["e"], [" t", "a"]]))
def test_deltas_joined_equal_the_last_cumulative_and_the_final(make_llm, request, stop) -> None:
    prompt, params = request
    params = params.clone()
    params.logprobs, params.stop = 3, stop or []
    params = SamplingParams(
        **{f: getattr(params, f) for f in params.__struct_fields__ if f != "output_text_buffer_length"}
    )
    runs = by_kind(make_llm().llm_engine, prompt, params)
    finals = runs[RequestOutputKind.FINAL_ONLY]
    assert len(finals) == 1
    final = finals[0]
    assert [c.index for c in final.outputs] == list(range(params.n))

    for child in final.outputs:
        deltas = [c for o in runs[RequestOutputKind.DELTA] for c in o.outputs if c.index == child.index]
        assert "".join(c.text for c in deltas) == child.text
        assert [t for c in deltas for t in c.token_ids] == list(child.token_ids)
        assert all(len(c.logprobs) == len(c.token_ids) for c in deltas)
        assert [p for c in deltas for p in as_dicts(c.logprobs)] == as_dicts(child.logprobs)
        assert deltas[-1].cumulative_logprob == pytest.approx(child.cumulative_logprob)
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (child.finish_reason, child.stop_reason)
        assert [c.finish_reason for c in deltas[:-1]] == [None] * (len(deltas) - 1)

        snapshots = [c for o in runs[RequestOutputKind.CUMULATIVE] for c in o.outputs if c.index == child.index]
        assert snapshots[-1].text == child.text and list(snapshots[-1].token_ids) == list(child.token_ids)
        assert as_dicts(snapshots[-1].logprobs) == as_dicts(child.logprobs)
        lengths = [len(c.token_ids) for c in snapshots]
        assert lengths == sorted(lengths), "an earlier output has grown"
        assert all(len(c.logprobs) == len(c.token_ids) for c in snapshots)

    for kind, outputs in runs.items():
        first, later = outputs[0], outputs[1:]
        assert as_dicts(first.prompt_logprobs) == as_dicts(final.prompt_logprobs), kind
        for out in later:
            if kind is RequestOutputKind.DELTA:
                assert not out.prompt_logprobs, "prompt logprobs came twice"
            else:
                assert as_dicts(out.prompt_logprobs) == as_dicts(final.prompt_logprobs)


def test_a_child_is_not_reported_again_after_its_end(make_llm) -> None:
    params = SamplingParams(
        n=3, seed=1, temperature=1.5, max_tokens=8, min_tokens=1, stop_token_ids=list(range(0, VOCAB, 7))
    )
    params.output_kind = RequestOutputKind.CUMULATIVE
    outputs = drive(make_llm().llm_engine, "r", {"prompt_token_ids": [9, 8, 7]}, params)
    ended: set[int] = set()
    for out in outputs:
        for child in out.outputs:
            assert child.index not in ended
            if child.finish_reason is not None:
                ended.add(child.index)
    assert ended == {0, 1, 2}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("prompt_logprobs", [None, 2])
def test_max_tokens_0_scores_and_makes_nothing(make_llm, kind, prompt_logprobs) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=prompt_logprobs, logprobs=1)
    params.output_kind = kind
    engine = make_llm().llm_engine
    engine.reset_prefix_cache()
    before = engine.get_stats().num_computed_positions
    outputs = drive(engine, "r", {"prompt_token_ids": list(range(5, 45))}, params)
    assert len(outputs) == 1
    (child,) = outputs[0].outputs
    assert (list(child.token_ids), child.text, child.finish_reason, child.cumulative_logprob) == ([], "", "length", 0.0)
    assert len(child.logprobs) == 0
    ran = engine.get_stats().num_computed_positions - before
    assert ran == (39 if prompt_logprobs else 0)
    if prompt_logprobs:
        assert len(outputs[0].prompt_logprobs) == 40
