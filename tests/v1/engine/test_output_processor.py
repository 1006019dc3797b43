"""The output processor on hand-made steps; the real engine drives it in test_llm_engine.py and tests/properties."""

import asyncio
import logging
import random

import numpy as np
import pytest

from tests.v1.engine.steps import Bench, Move, params, token, value_of
from vllm.config import VllmConfig
from vllm.logprobs.block import WholeRows
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR
A, B, C, D = (token(char) for char in "abcd")


@pytest.fixture(params=[False, True], ids=["outputs", "table"])
def bench(request: pytest.FixtureRequest, tiny_config: VllmConfig, tiny_tokenizer: Tokenizer) -> Bench:
    return Bench(tiny_config, tiny_tokenizer, uses_table=request.param)


# ---------------------------------------------------------------- one sequence


def test_each_kind_tells_the_same_story(bench: Bench) -> None:
    told = {}
    for kind in RequestOutputKind:
        (child,) = bench.add(params(kind))
        steps = [bench.step(Move(child, [A])), bench.step(Move(child, [B])), bench.step(Move(child, [C], LENGTH))]
        told[kind] = [out.outputs[0] for step in steps for out in step.request_outputs]
    assert [c.text for c in told[CUMULATIVE]] == ["a", "ab", "abc"]
    assert [c.text for c in told[DELTA]] == ["a", "b", "c"]
    assert [c.text for c in told[FINAL_ONLY]] == ["abc"]
    for kind, completions in told.items():
        assert [c.finish_reason for c in completions] == [None] * (len(completions) - 1) + ["length"], kind
        assert all(len(c.logprobs) == len(c.token_ids) for c in completions), kind
        assert completions[-1].cumulative_logprob == pytest.approx(sum(map(value_of, (A, B, C)))), kind
    assert [c.cumulative_logprob for c in told[DELTA]] == [c.cumulative_logprob for c in told[CUMULATIVE]]


def test_an_earlier_output_does_not_grow(bench: Bench) -> None:
    (child,) = bench.add(params(CUMULATIVE))
    first = bench.step(Move(child, [A])).request_outputs[0].outputs[0]
    bench.step(Move(child, [B], LENGTH))
    assert (list(first.token_ids), first.text, len(first.logprobs)) == ([A], "a", 1)
    assert first.logprobs[0][A].decoded_token == "a"


def test_nothing_asked_gives_nothing(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, logprobs=None))
    (out,) = bench.step(Move(child, [A], LENGTH), scored=False).request_outputs
    assert (out.outputs[0].logprobs, out.outputs[0].cumulative_logprob, out.prompt_logprobs) == (None, None, None)


def test_given_ids_count_as_asked(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, logprobs=None, logprob_token_ids=[5, 6]))
    (out,) = bench.step(Move(child, [A], LENGTH)).request_outputs
    assert out.outputs[0].cumulative_logprob == pytest.approx(value_of(A))
    assert list(out.outputs[0].logprobs[0]) == [A, 5, 6]


def test_whole_vocabulary_rows_come_in_their_own_block(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, logprobs=-1))
    values = np.log(np.full((1, 512), 1 / 512, np.float32))
    full = [WholeRows(np.array([A], np.int32), values, np.arange(1, 513, dtype=np.int32)[None])]
    output = EngineCoreOutput(request_id=child, new_token_ids=[A], full_rows=full, finish_reason=LENGTH)
    (out,) = bench.outputs.process_outputs(EngineCoreOutputs(outputs=[output], prompt_scores=[])).request_outputs
    assert len(out.outputs[0].logprobs[0]) == 512
    assert out.outputs[0].cumulative_logprob == pytest.approx(-np.log(512))


def test_the_end_token_is_kept_and_its_text_is_hidden(bench: Bench) -> None:
    for field, shown in ((False, "a"), (True, "ab")):
        (child,) = bench.add(params(FINAL_ONLY, stop_token_ids=[B], include_stop_str_in_output=field))
        (out,) = [*bench.step(Move(child, [A])).request_outputs, *bench.step(Move(child, [B], STOP, B)).request_outputs]
        completion = out.outputs[0]
        assert (completion.text, list(completion.token_ids), completion.stop_reason) == (shown, [A, B], B)
        assert len(completion.logprobs) == 2


def test_prompt_logprobs_come_whole_and_once_in_deltas(bench: Bench) -> None:
    for kind in (CUMULATIVE, DELTA):
        (child,) = bench.add(params(kind, prompt_logprobs=2), prompt="abcd")
        assert bench.step(prompt_rows=[B]).request_outputs == []  # no output before the first token
        (first,) = bench.step(Move(child, [A]), prompt_rows=[C, D]).request_outputs
        (second,) = bench.step(Move(child, [A], LENGTH)).request_outputs
        assert len(first.prompt_logprobs) == 4 and first.prompt_logprobs[0] is None
        assert [next(iter(first.prompt_logprobs[i])) for i in (1, 2, 3)] == [B, C, D]
        assert second.prompt_logprobs == (first.prompt_logprobs if kind is CUMULATIVE else [])


def test_scoring_alone_ends_with_an_empty_completion(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, prompt_logprobs=0, max_tokens=0), prompt="abc")
    (out,) = bench.step(Move(child, [], LENGTH), prompt_rows=[B, C]).request_outputs
    (completion,) = out.outputs
    assert (completion.text, list(completion.token_ids), completion.finish_reason) == ("", [], "length")
    assert (completion.cumulative_logprob, len(completion.logprobs)) == (0.0, 0)
    assert out.finished and len(out.prompt_logprobs) == 3


def test_stream_interval_keeps_the_first_and_the_last(bench: Bench) -> None:
    for kind in (CUMULATIVE, DELTA):
        (child,) = bench.add(params(kind, stream_interval=3))
        outs = []
        for i in range(9):
            outs += bench.step(Move(child, [A], LENGTH if i == 8 else None)).request_outputs
        lengths = [len(out.outputs[0].token_ids) for out in outs]
        assert lengths == ([1, 4, 7, 9] if kind is CUMULATIVE else [1, 3, 3, 2])
        assert all(len(out.outputs[0].logprobs) == len(out.outputs[0].token_ids) for out in outs)


def test_what_comes_after_the_end_is_passed_over(bench: Bench) -> None:
    (child,) = bench.add(params(CUMULATIVE))
    bench.step(Move(child, [A], LENGTH))
    assert bench.step(Move(child, [B])).request_outputs == []
    assert not bench.outputs.has_unfinished_requests()


# ---------------------------------------------------------------- stop strings


def test_a_stop_string_ends_the_sequence_and_the_core_is_told(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, stop=["bc"]))
    assert bench.step(Move(child, [A])).ids_to_abort == []
    assert bench.step(Move(child, [B])).ids_to_abort == []
    step = bench.step(Move(child, [C]))
    assert step.ids_to_abort == [child]
    completion = step.request_outputs[0].outputs[0]
    assert (completion.text, list(completion.token_ids), completion.finish_reason) == ("a", [A, B, C], "stop")
    assert (completion.stop_reason, len(completion.logprobs)) == ("bc", 3)


def test_tokens_after_the_completing_one_are_dropped_with_their_rows(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, stop=["b"]))
    (out,) = bench.step(Move(child, [A, B, C, D])).request_outputs
    completion = out.outputs[0]
    assert (list(completion.token_ids), len(completion.logprobs)) == ([A, B], 2)
    assert completion.cumulative_logprob == pytest.approx(value_of(A) + value_of(B))


def test_a_stop_string_at_the_last_token_is_a_stop_and_no_abort(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, stop=["b"]))
    step = bench.step(Move(child, [A, B], LENGTH))
    assert step.ids_to_abort == []
    assert step.request_outputs[0].outputs[0].finish_reason == "stop"


def test_text_that_could_become_a_stop_string_is_held_back_and_its_logprobs_are_not(bench: Bench) -> None:
    (child,) = bench.add(params(DELTA, stop=["bcd"]))
    outs = [bench.step(Move(child, [t], LENGTH if t == A else None)).request_outputs[0] for t in (D, B, C, A)]
    completions = [out.outputs[0] for out in outs]
    assert "".join(c.text for c in completions) == "dbca"
    assert completions[1].text == "" and len(completions[1].logprobs) == 1


# ---------------------------------------------------------------- errors and aborts


@pytest.fixture
def engine_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_an_error_fails_the_whole_family_with_a_warning(
    bench: Bench, kind: RequestOutputKind, engine_log: pytest.LogCaptureFixture
) -> None:
    children = bench.add(params(kind, n=3))
    family = bench.last.core_request.request_id
    bench.step(Move(children[0], [A], LENGTH), Move(children[1], [B]))
    (out,) = bench.step(Move(family, [], ERROR, error="row 3 held NaN")).request_outputs
    assert out.finished
    told = {c.index: c.finish_reason for c in out.outputs}
    assert told == ({0: "length"} if kind is FINAL_ONLY else {}) | {1: "error", 2: "error"}
    assert "row 3 held NaN" in engine_log.text
    assert not bench.outputs.has_unfinished_requests()


def test_an_error_leaves_others_alone(bench: Bench) -> None:
    (bad,) = bench.add(params(FINAL_ONLY), request_id="bad")
    (good,) = bench.add(params(FINAL_ONLY), request_id="good")
    outs = bench.step(Move(bad, [], ERROR, error="NaN"), Move(good, [A], LENGTH)).request_outputs
    assert {out.request_id: out.outputs[0].finish_reason for out in outs} == {"bad": "error", "good": "length"}


def test_no_half_list_of_prompt_logprobs_survives_an_early_end(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, prompt_logprobs=0), prompt="abcd")
    bench.step(prompt_rows=[B])
    (out,) = bench.step(Move(child, [], ERROR, error="NaN")).request_outputs
    assert out.prompt_logprobs is None


def test_missing_prompt_rows_are_never_passed_on_in_silence(bench: Bench) -> None:
    (child,) = bench.add(params(FINAL_ONLY, prompt_logprobs=0), prompt="abcd")
    with pytest.raises(AssertionError, match="missing"):
        bench.step(Move(child, [A], LENGTH), prompt_rows=[B])


def test_an_abort_tells_the_core_the_family_and_the_engine_nothing(bench: Bench) -> None:
    children = bench.add(params(CUMULATIVE, n=2), request_id="mine")
    family = bench.last.core_request.request_id
    bench.step(Move(children[0], [A]))
    assert bench.outputs.abort_requests(["mine", "never heard of"]) == [family]
    assert bench.step(Move(children[0], [B]), Move(children[1], [B])).request_outputs == []
    assert bench.outputs.abort_requests(["mine", family]) == []


def test_an_id_that_is_live_twice_is_aborted_twice(bench: Bench) -> None:
    bench.add(params(CUMULATIVE), request_id="twin")
    (second,) = bench.add(params(CUMULATIVE), request_id="twin")
    (out,) = bench.step(Move(second, [A])).request_outputs
    assert out.request_id == "twin"
    assert len(bench.outputs.abort_requests(["twin"])) == 2
    assert not bench.outputs.has_unfinished_requests()


def test_an_aborted_reader_gets_a_last_output_with_what_there_was(bench: Bench) -> None:
    sink = RequestOutputCollector(FINAL_ONLY)
    children = bench.add(params(FINAL_ONLY, n=2, stop=["xyz"]), request_id="r", sink=sink)
    bench.step(Move(children[0], [A], LENGTH), Move(children[1], [B]))
    assert sink.get_nowait() is None
    bench.outputs.abort_requests(["r"])
    out = sink.get_nowait()
    assert out is not None and out.finished
    assert [(c.finish_reason, c.text) for c in out.outputs] == [("length", "a"), ("abort", "b")]


def test_a_failed_request_raises_at_its_reader(bench: Bench) -> None:
    sink = RequestOutputCollector(DELTA)
    (child,) = bench.add(params(DELTA), sink=sink)
    bench.step(Move(child, [A]))
    bench.step(Move(child, [], ERROR, error="row 3 held NaN"))
    with pytest.raises(EngineGenerateError, match="row 3"):
        sink.get_nowait()


# ---------------------------------------------------------------- slow readers


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_no_child_is_lost_doubled_or_overwritten_however_slow_the_reader(
    bench: Bench, kind: RequestOutputKind, seed: int
) -> None:
    chance = random.Random(seed)
    sink = RequestOutputCollector(kind)
    children = bench.add(params(kind, n=4, prompt_logprobs=0), prompt="ab", sink=sink)
    wanted = {i: [chance.choice([A, B, C, D]) for _ in range(chance.randint(1, 6))] for i in range(4)}
    left = {i: list(tokens) for i, tokens in wanted.items()}
    seen: list[RequestOutput] = []
    prompt_rows = [B]
    while left:
        moves = []
        for i in chance.sample(sorted(left), chance.randint(1, len(left))):
            next_token = left[i].pop(0)
            moves.append(Move(children[i], [next_token], None if left[i] else LENGTH))
            if not left[i]:
                del left[i]
        assert bench.step(*moves, prompt_rows=prompt_rows).request_outputs == []
        prompt_rows = []
        if chance.random() < 0.4 and (out := sink.get_nowait()) is not None:
            seen.append(out)
    if (out := sink.get_nowait()) is not None:
        seen.append(out)
    assert [out.finished for out in seen] == [False] * (len(seen) - 1) + [True]
    assert len(seen[0].prompt_logprobs) == 2
    for i, tokens in wanted.items():
        told = [c for out in seen for c in out.outputs if c.index == i]
        got = [t for c in told for t in c.token_ids] if kind is DELTA else list(told[-1].token_ids)
        assert got == tokens
        assert [c.finish_reason for c in told] == [None] * (len(told) - 1) + ["length"]
        assert all(len(c.logprobs) == len(c.token_ids) for c in told)
        assert told[-1].cumulative_logprob == pytest.approx(sum(map(value_of, tokens)))


def test_a_waiting_reader_wakes_up(bench: Bench) -> None:
    async def read() -> RequestOutput:
        sink = RequestOutputCollector(CUMULATIVE)
        (child,) = bench.add(params(CUMULATIVE), sink=sink)
        asyncio.get_running_loop().call_soon(bench.step, Move(child, [A], LENGTH))
        return await asyncio.wait_for(sink.get(), timeout=5)

    assert asyncio.run(read()).outputs[0].text == "a"


# ---------------------------------------------------------------- statistics


def test_statistics_are_kept_only_when_asked(tiny_config: VllmConfig, tiny_tokenizer: Tokenizer) -> None:
    quiet, counting = Bench(tiny_config, tiny_tokenizer), Bench(tiny_config, tiny_tokenizer, log_stats=True)
    for bench in (quiet, counting):
        children = bench.add(params(CUMULATIVE, n=2))
        (first,) = bench.step(Move(children[0], [A]), Move(children[1], [A])).request_outputs
        (last,) = bench.step(Move(children[0], [A], LENGTH), Move(children[1], [A], LENGTH)).request_outputs
    assert first.metrics is not None and last.metrics is not None
    assert (first.metrics.num_generation_tokens, last.metrics.num_generation_tokens) == (2, 4)
    (child,) = quiet.add(params(CUMULATIVE))
    assert quiet.step(Move(child, [A])).request_outputs[0].metrics is None


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_statistics_count_the_tokens_of_sequences_that_just_go_on(
    tiny_config: VllmConfig, tiny_tokenizer: Tokenizer, kind: RequestOutputKind
) -> None:
    bench = Bench(tiny_config, tiny_tokenizer, uses_table=True, log_stats=True)
    (child,) = bench.add(params(kind))
    outs = [out for move in (Move(child, [A]), Move(child, [B]), Move(child, [C], LENGTH))
            for out in bench.step(move).request_outputs]  # fmt: skip
    counts = [out.metrics.num_generation_tokens for out in outs]
    assert counts == ([3] if kind is FINAL_ONLY else [1, 2, 3]), "an earlier output's figures must not move on"


@pytest.mark.parametrize("num_steps", [1, 2, 3, 20, 600])
def test_quiet_sequences_lose_nothing_whatever_ends_their_going_on(
    tiny_config: VllmConfig, tiny_tokenizer: Tokenizer, num_steps: int
) -> None:
    """Scored or not, alone or children, for hundreds of steps; then one ends, one is aborted, and the others go on."""
    bench = Bench(tiny_config, tiny_tokenizer, uses_table=True, log_stats=True)
    sink = RequestOutputCollector(FINAL_ONLY)
    scored = [*bench.add(params(FINAL_ONLY, n=2)), *bench.add(params(FINAL_ONLY), request_id="aborted", sink=sink)]
    plain = bench.add(params(FINAL_ONLY, logprobs=None), request_id="plain")
    draw = random.Random(num_steps)
    took: dict[str, list[int]] = {child: [] for child in scored + plain}

    def go_on(*, ending: str = "") -> list[RequestOutput]:
        moves = []
        for child, tokens in took.items():
            tokens.append(draw.randrange(100, 500))
            moves.append(Move(child, tokens[-1:], LENGTH if child == ending else None, is_scored=child not in plain))
        return bench.step(*moves).request_outputs

    for _ in range(num_steps):
        assert go_on() == []
    assert go_on(ending=scored[0]) == [], "its sibling goes on"
    done = {scored[0]: took.pop(scored[0])}
    assert go_on() == [] and go_on() == []
    bench.outputs.abort_requests(["aborted"])
    done[scored[2]] = took.pop(scored[2])
    for _ in range(3):
        assert go_on() == []
    (family,) = go_on(ending=scored[1])
    done[scored[1]] = took.pop(scored[1])
    (alone,) = go_on(ending=plain[0])
    aborted = sink.get_nowait()
    assert aborted is not None
    for child, completion in zip(scored, [*family.outputs, *aborted.outputs], strict=True):
        tokens = done[child]
        assert list(completion.token_ids) == tokens
        assert [list(row) for row in completion.logprobs] == [list(dict.fromkeys((t, 5, 6))) for t in tokens]
        total = 0.0
        for token_id in tokens:
            total += value_of(token_id)
        assert completion.cumulative_logprob == total, "added one after the other"
    assert list(alone.outputs[0].token_ids) == took[plain[0]] and alone.outputs[0].logprobs is None
    assert family.metrics is not None
    assert family.metrics.num_generation_tokens == len(done[scored[0]]) + len(done[scored[1]])


def test_a_delta_knows_the_tokens_before_it(bench: Bench) -> None:
    """A character that began in an earlier delta is completed, in the text and in the row's own text."""
    first, second = 3 + 0xC3, 3 + 0xA9  # the two bytes of é
    (child,) = bench.add(params(DELTA))
    outs = [bench.step(Move(child, [t])).request_outputs[0].outputs[0] for t in (A, first, second)]
    assert [c.text for c in outs] == ["a", "", "é"]
    assert [c.logprobs[0][t].decoded_token for c, t in zip(outs, (A, first, second), strict=True)] == ["a", "", "é"]
