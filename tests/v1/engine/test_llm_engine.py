"""LLMEngine with the real core on a tiny random model."""

import logging
import pathlib
import random

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine


def finish(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def count_used_blocks(engine: LLMEngine) -> int:
    return engine.get_stats().num_used_blocks


def long(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **fields})


def test_a_step_without_requests_brings_nothing(engine: LLMEngine) -> None:
    assert engine.step() == []


def test_an_aborted_request_says_nothing_more_and_leaves_nothing_behind(engine: LLMEngine) -> None:
    engine.add_request("a", [5, 6, 7], long(n=3))
    engine.add_request("b", [5, 6, 7], long(max_tokens=4))
    engine.step()
    engine.abort_request("a")
    assert {out.request_id for out in finish(engine)} == {"b"}
    engine.step()
    assert count_used_blocks(engine) == 0


def test_either_id_aborts(engine: LLMEngine) -> None:
    own_id = engine.add_request("a", [5, 6, 7], long())
    assert own_id != "a"
    engine.abort_request([own_id])
    assert not engine.has_unfinished_requests()


def test_one_id_may_be_live_twice(engine: LLMEngine) -> None:
    for first in (5, 9):
        engine.add_request("same", [first, 6, 7], long(max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY))
    outputs = finish(engine)
    assert [out.request_id for out in outputs] == ["same", "same"]
    assert {out.prompt_token_ids[0] for out in outputs} == {5, 9}


@pytest.mark.parametrize("seed", range(2))
def test_what_is_read_at_the_end_is_what_was_streamed(tiny_folder: pathlib.Path, seed: int) -> None:
    """Requests come and go beside each other, prompts that are scored in chunks among them; some are aborted."""
    draw = random.Random(seed)
    script = []
    for number in range(16):
        prompt = [draw.randrange(10, 400) for _ in range(draw.choice((3, 5, 80)))]
        fields = {
            "max_tokens": draw.randrange(10, 40),
            "n": draw.choice((1, 1, 2)),
            "logprobs": draw.choice((2, 2, 2, None)),
            "prompt_logprobs": 2 if len(prompt) > 5 else None,
            "temperature": draw.choice((0.0, 1.0)),
            "seed": number,
        }
        script.append((draw.choice((0, 2, 5, 9)), str(number), prompt, fields, draw.random() < 0.1))

    def run(kind: RequestOutputKind) -> dict[tuple[str, int], list[CompletionOutput]]:
        engine = LLMEngine.from_engine_args(
            EngineArgs(str(tiny_folder), max_num_batched_tokens=16, max_num_seqs=8, max_model_len=128)
        )
        told: dict[tuple[str, int], list[CompletionOutput]] = {}

        def note(outputs: list[RequestOutput]) -> None:
            for output in outputs:
                for completion in output.outputs:
                    told.setdefault((output.request_id, completion.index), []).append(completion)

        for num_steps, request_id, prompt, fields, is_aborted in script:
            for _ in range(num_steps):
                note(engine.step())
            engine.add_request(request_id, prompt, long(output_kind=kind, **fields))
            if is_aborted:
                note(engine.step())
                engine.abort_request(request_id)
        note(finish(engine))
        assert count_used_blocks(engine) == 0
        engine.shutdown()
        return {key: completions for key, completions in told.items() if completions[-1].finish_reason is not None}

    at_the_end, streamed = run(RequestOutputKind.FINAL_ONLY), run(RequestOutputKind.DELTA)
    assert len(at_the_end) > 12
    for key, (whole,) in at_the_end.items():
        deltas = streamed[key]
        assert list(whole.token_ids) == [token_id for delta in deltas for token_id in delta.token_ids]
        assert whole.text == "".join(delta.text for delta in deltas)
        assert whole.cumulative_logprob == deltas[-1].cumulative_logprob
        rows = None if whole.logprobs is None else list(whole.logprobs)
        assert rows == (None if rows is None else [row for delta in deltas for row in delta.logprobs])


def test_a_stop_string_frees_the_sequence_in_the_core(engine: LLMEngine) -> None:
    """The core can't see text: it would go on to max_tokens."""
    free = finish_one(engine, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, min_tokens=3))
    stop = free.outputs[0].text[-4:]
    assert len(stop) == 4
    before = engine.get_stats().num_computed_positions
    stopped = finish_one(engine, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[stop[:2]]))
    ran = engine.get_stats().num_computed_positions - before
    completion = stopped.outputs[0]
    assert completion.finish_reason == "stop" and completion.stop_reason == stop[:2]
    assert free.outputs[0].text.startswith(completion.text) and stop[:2] not in completion.text
    assert ran < 3 + 20
    engine.step()
    assert count_used_blocks(engine) == 0


def finish_one(engine: LLMEngine, params: SamplingParams) -> RequestOutput:
    engine.add_request("r", [5, 6, 7], params)
    return finish(engine)[-1]


def test_a_step_that_raises_ends_everything_and_the_engine_goes_on(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.model_executor.driver_worker.model_runner
    expected = finish_one(engine, long(temperature=0)).outputs[0].token_ids
    for moment in (0, 3):
        engine.add_request("a", [5, 6, 7], long(n=2, seed=0))
        engine.add_request("b", [5, 6, 7], long())
        for _ in range(moment):
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(runner, "execute_model", lambda step: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        assert not engine.has_unfinished_requests()
        assert finish_one(engine, long(temperature=0)).outputs[0].token_ids == expected
        engine.step()
        assert count_used_blocks(engine) == 0


def test_the_model_length_is_the_one_that_fits(tiny_folder: pathlib.Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(str(tiny_folder), num_gpu_blocks_override=4, block_size=16))
    assert engine.model_config.max_model_len == engine.vllm_config.model_config.max_model_len == 64
    with pytest.raises(VLLMValidationError, match="maximum model length of 64"):
        engine.add_request("r", [5] * 65, SamplingParams())


def test_weights_handed_over_change_the_answer_and_forget_the_cache(tiny_folder: pathlib.Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(str(tiny_folder), max_model_len=64, max_logprobs=-1))
    prompt = list(range(10, 50))
    params = SamplingParams(max_tokens=1, logprobs=-1, temperature=0)

    def first_row() -> dict:
        engine.add_request("r", prompt, params)
        out = finish(engine)[-1]
        return {token: entry.logprob for token, entry in out.outputs[0].logprobs[0].items()}

    before = first_row()
    model = engine.model_executor.driver_worker.model_runner.model
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = next(w for n, w in model.named_parameters() if n.endswith("qkv_proj.weight"))[:48].clone()
    assert len(model.load_weights([(name, weight * 2)])) == 1
    assert engine.reset_prefix_cache() is True
    after = first_row()
    assert max(abs(before[token] - after[token]) for token in before) > 0.01
    model.load_weights([(name, weight)])
    assert first_row() == pytest.approx(before, abs=1e-4)


def test_sleep_ends_requests_and_waking_gives_the_same_answers(engine: LLMEngine) -> None:
    expected = finish_one(engine, long(temperature=0)).outputs[0].token_ids
    for level in (1, 2):
        engine.add_request("a", [5, 6, 7], long())
        engine.step()
        engine.sleep(level)
        assert engine.is_sleeping() and not engine.has_unfinished_requests()
        engine.wake_up(tags=["weights"])
        assert engine.is_sleeping()
        engine.wake_up(tags=["kv_cache"])
        assert not engine.is_sleeping()
        assert finish_one(engine, long(temperature=0)).outputs[0].token_ids == expected
    with pytest.raises(VLLMValidationError, match="mode"):
        engine.sleep(mode="nap")


def test_the_start_says_what_it_settled(tiny_folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    try:
        LLMEngine.from_engine_args(
            EngineArgs(str(tiny_folder), max_model_len=64, served_model_name="tiny", num_gpu_blocks_override=5)
        )
    finally:
        logging.getLogger("vllm").propagate = False
    line = next(record.getMessage() for record in caplog.records if "ready" in record.getMessage())
    for word in ("tiny", "float32", "cpu", "80 KV tokens", "thread", " s"):
        assert word in line


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"request_id": 7}, TypeError),
        ({"params": None}, TypeError),
        ({"prompt": 3.5}, TypeError),
        ({"priority": "high"}, VLLMValidationError),
        ({"lora_request": object()}, VLLMUnsupportedError),
    ],
)
def test_wrong_arguments_are_refused(engine: LLMEngine, fields: dict, error: type[Exception]) -> None:
    arguments = {"request_id": "r", "prompt": [5], "params": SamplingParams(), **fields}
    with pytest.raises(error):
        engine.add_request(**arguments)
    assert not engine.has_unfinished_requests()


def test_after_shutdown_requests_are_refused(tiny_folder: pathlib.Path) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(str(tiny_folder), max_model_len=64))
    engine.add_request("a", [5], SamplingParams())
    engine.shutdown()
    engine.shutdown()
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.add_request("b", [5], SamplingParams())
