"""AsyncLLM with a real core process on a tiny random model."""

import asyncio
import os
import pathlib
import signal
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import uvloop

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client_mp import cut
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.queue_limits import QueueLimits
from vllm.v1.messages import (
    DecodeBatchTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    PromptScores,
    RowRange,
    SchedulerStats,
)

Result = TypeVar("Result")
KINDS = list(RequestOutputKind)
PROMPT = [5, 6, 7, 8]


def start(folder: pathlib.Path, **settings: Any) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(str(folder), max_model_len=64, max_logprobs=-1, kv_cache_memory_bytes=4 << 20, **settings)
    )


@pytest.fixture(scope="module")
def async_engine(tiny_folder: pathlib.Path) -> Iterator[AsyncLLM]:
    engine = start(tiny_folder)
    yield engine
    engine.shutdown()


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run in a loop of its own, with an end even if the engine hangs."""
    return asyncio.run(asyncio.wait_for(work, 60))


def ask(
    engine: AsyncLLM, request_id: str = "a", prompt: Any = PROMPT, **fields: Any
) -> AsyncGenerator[RequestOutput, None]:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 3, **fields})
    return engine.generate(prompt, params, request_id)


async def read(stream: AsyncGenerator[RequestOutput, None], pause: float | None = None) -> list[RequestOutput]:
    outputs = []
    async for output in stream:
        outputs.append(output)
        if pause is not None:
            await asyncio.sleep(pause)
    return outputs


async def is_idle(engine: AsyncLLM) -> bool:
    """Say whether nothing is left of any request, here or in the core."""
    stats = await engine.get_stats()
    here = (
        engine.num_unfinished_requests,
        engine._collectors,
        engine._limits._unanswered,
        engine._client.num_in_flight,
    )
    return here == (0, {}, {}, 0) and (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


async def wait_until_idle(engine: AsyncLLM) -> None:
    while not await is_idle(engine):
        await asyncio.sleep(0.01)


def join(outputs: list[RequestOutput]) -> dict[int, dict[str, Any]]:
    """Put deltas together, by child."""
    joined: dict[int, dict[str, Any]] = {}
    for output in outputs:
        for part in output.outputs:
            child = joined.setdefault(part.index, {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None})
            assert child["finish_reason"] is None, "a child that had ended was told of again"
            child["text"] += part.text
            child["token_ids"] += part.token_ids
            child["logprobs"] += list(part.logprobs)
            child["finish_reason"] = part.finish_reason
    return joined


def as_joined(output: RequestOutput) -> dict[int, dict[str, Any]]:
    return {
        part.index: {
            "text": part.text,
            "token_ids": list(part.token_ids),
            "logprobs": list(part.logprobs),
            "finish_reason": part.finish_reason,
        }
        for part in output.outputs
    }


# ---------------------------------------------------------------- outputs


def test_each_kind_tells_the_same_story(async_engine: AsyncLLM) -> None:
    async def work() -> list[list[RequestOutput]]:
        streams = [ask(async_engine, kind.name, n=3, logprobs=2, prompt_logprobs=1, output_kind=kind) for kind in KINDS]
        return await asyncio.gather(*map(read, streams))

    cumulative, delta, final = run(work())
    assert len(final) == 1 and final[0].finished
    expected = as_joined(final[0])
    assert list(expected) == [0, 1, 2]
    assert join(delta) == expected
    last = {part.index: part for output in cumulative for part in output.outputs}
    assert {i: as_joined(RequestOutput("", None, None, None, [last[i]], True))[i] for i in last} == expected
    assert [output.finished for output in delta] == [False] * (len(delta) - 1) + [True]
    assert len(final[0].prompt_logprobs) == len(PROMPT) and len(delta[0].prompt_logprobs) == len(PROMPT)


def test_a_slow_reader_finds_outputs_merged_and_none_lost(async_engine: AsyncLLM) -> None:
    async def work() -> tuple[list[RequestOutput], list[RequestOutput]]:
        fields = {"n": 3, "max_tokens": 40, "logprobs": 2, "prompt_logprobs": 2}
        stream = ask(async_engine, **fields, output_kind=RequestOutputKind.DELTA)
        slow = [await anext(stream)]
        await wait_until_done(async_engine)
        slow += await read(stream)
        return slow, await read(ask(async_engine, **fields, output_kind=RequestOutputKind.FINAL_ONLY))

    async def wait_until_done(engine: AsyncLLM) -> None:
        while engine.num_unfinished_requests:
            await asyncio.sleep(0.01)

    slow, (final,) = run(work())
    assert len(slow) == 2, "what came while the reader slept should be one output"
    assert join(slow) == as_joined(final)


def test_fifty_at_once_are_answered_as_if_each_were_alone(async_engine: AsyncLLM) -> None:
    def ask_one(i: int) -> AsyncGenerator[RequestOutput, None]:
        prompt = [5 + i % 7] * (1 + i % 11)
        return ask(async_engine, "same id", prompt, n=1 + i % 3, seed=i, logprobs=1, output_kind=KINDS[i % 3])

    async def work() -> None:
        together = await asyncio.gather(*(read(ask_one(i), pause=0.002 if i % 5 == 0 else None) for i in range(50)))
        assert all(outputs[-1].finished for outputs in together)
        for i in (1, 22, 46):  # of the kind DELTA
            (alone,) = [join(await read(ask_one(i)))]
            for index, child in join(together[i]).items():
                assert child["token_ids"] == alone[index]["token_ids"]
        assert await is_idle(async_engine)

    run(work())


def test_outputs_are_handled_in_slices_that_add_up() -> None:
    outputs = EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id=str(i), new_token_ids=[i], rows=RowRange(i, i + 1)) for i in range(7)],
        prompt_scores=[PromptScores(request_id="0", rows=RowRange(0, 1))],
        stats=SchedulerStats(num_running=7),
        timestamp=2.0,
    )
    slices = cut(outputs, 3)
    assert [len(part.outputs) for part in slices] == [3, 3, 1]
    assert [output for part in slices for output in part.outputs] == outputs.outputs
    assert [bool(part.prompt_scores) for part in slices] == [True, False, False]
    assert [part.stats for part in slices] == [None, None, outputs.stats]
    assert cut(outputs, 7) == [outputs]


@pytest.mark.parametrize("num_outputs", [0, 2, 4])
def test_sequences_that_just_go_on_are_cut_like_the_others(num_outputs: int) -> None:
    outputs = EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id=f"o{i}", new_token_ids=[i]) for i in range(num_outputs)],
        prompt_scores=[PromptScores(request_id="0", rows=RowRange(0, 1))],
        decode_batch=DecodeBatchTokens(request_ids=list("abcde"), token_ids=[5, 6, 7, 8, 9], rows=[3, 2, 1, 0]),
        stats=SchedulerStats(num_running=7),
    )
    slices = cut(outputs, 3)
    assert all(len(part.list_outputs()) <= 3 for part in slices)
    assert [output for part in slices for output in part.list_outputs()] == outputs.list_outputs()
    assert [part.prompt_scores for part in slices] == [outputs.prompt_scores, *([[]] * (len(slices) - 1))]
    assert [part.stats for part in slices] == [*([None] * (len(slices) - 1)), outputs.stats]
    assert cut(outputs, num_outputs + 5) == [outputs]


def test_small_slices_change_nothing(async_engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> list[list[RequestOutput]]:
        fields = {"n": 5, "logprobs": 2, "output_kind": RequestOutputKind.DELTA}
        return await asyncio.gather(*(read(ask(async_engine, **fields)) for _ in range(2)))

    whole = run(work())
    monkeypatch.setenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "2")
    assert [{i: child["token_ids"] for i, child in join(outputs).items()} for outputs in run(work())] == [
        {i: child["token_ids"] for i, child in join(outputs).items()} for outputs in whole
    ]


def test_uvloop_serves_as_well(async_engine: AsyncLLM) -> None:
    outputs = uvloop.run(asyncio.wait_for(read(ask(async_engine, logprobs=-1)), 60))
    assert isinstance(outputs[-1].outputs[0].logprobs, FlatLogprobs)
    assert len(outputs[-1].outputs[0].logprobs[0]) == 512


def test_a_long_text_is_tokenised_as_a_short_one(async_engine: AsyncLLM) -> None:
    text = "a few words " * 500

    async def work() -> None:
        parsed = await async_engine._tokenize(text, None, None)
        assert parsed.token_ids == async_engine.tokenizer.encode(text)
        with pytest.raises(VLLMValidationError, match="64"):
            await read(ask(async_engine, prompt=text))

    run(work())


def test_the_text_of_a_prompt_of_ids_may_be_told(async_engine: AsyncLLM) -> None:
    async def work() -> RequestOutput:
        params = SamplingParams(max_tokens=1)
        return [out async for out in async_engine.generate({"prompt_token_ids": PROMPT}, params, "a", prompt_text="t")][
            -1
        ]

    out = run(work())
    assert out.prompt == "t" and out.prompt_token_ids == PROMPT


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("num_read", [0, 2])
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_reader_that_goes_away_frees_everything(async_engine: AsyncLLM, how: str, num_read: int) -> None:
    async def work() -> None:
        stream = ask(async_engine, n=4, max_tokens=50, logprobs=5, output_kind=RequestOutputKind.DELTA)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)  # it is admitted
        assert async_engine.num_unfinished_requests == 1
        if num_read:
            await reader
            reader = asyncio.create_task(anext(stream))
        if how == "close":
            await asyncio.wait([reader])
            await stream.aclose()
        else:
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
            await stream.aclose()
        assert async_engine.num_unfinished_requests == 0
        await wait_until_idle(async_engine)

    run(work())


def test_a_loop_that_ends_in_the_middle_leaves_the_engine_good_for_the_next(async_engine: AsyncLLM) -> None:
    async def leave() -> None:
        streams = [ask(async_engine, max_tokens=50) for _ in range(3)]
        await asyncio.gather(*map(anext, streams))
        asyncio.create_task(read(streams[0]))

    run(leave())
    run(wait_until_idle(async_engine))
    assert run(read(ask(async_engine)))[-1].finished


def test_an_aborted_request_ends_with_a_last_output(async_engine: AsyncLLM) -> None:
    async def work() -> None:
        streams = [ask(async_engine, "twice", n=2, max_tokens=50, output_kind=kind) for kind in KINDS]
        other = asyncio.create_task(read(ask(async_engine, "other")))
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        while async_engine.num_unfinished_requests < 4:
            await asyncio.sleep(0)
        await async_engine.abort(["twice", "unknown"])
        for outputs in await asyncio.gather(*readers):
            assert outputs[-1].finished
            assert {part.finish_reason for part in outputs[-1].outputs} == {"abort"}
        assert (await other)[-1].outputs[0].finish_reason == "length"
        await wait_until_idle(async_engine)

    run(work())


def test_what_a_caller_does_wrong_is_raised_at_the_first_step(async_engine: AsyncLLM) -> None:
    async def work() -> None:
        wrong = [
            (ask(async_engine, prompt=[]), VLLMValidationError),
            (ask(async_engine, prompt=[999_999]), VLLMValidationError),
            (ask(async_engine, prompt=[5] * 64), VLLMValidationError),
            (ask(async_engine, prompt=3), TypeError),
            (async_engine.generate("a", {"n": 1}, "a"), TypeError),  # type: ignore[arg-type]
            (async_engine.generate("a", SamplingParams(), "a", lora_request=object()), VLLMUnsupportedError),
            (async_engine.generate("a", SamplingParams(), "a", data_parallel_rank=1), VLLMUnsupportedError),
        ]
        for stream, kind in wrong:
            with pytest.raises(kind):
                await read(stream)
        assert await is_idle(async_engine)

    run(work())


def test_a_refusal_by_the_core_ends_its_request_only(async_engine: AsyncLLM) -> None:
    async def work() -> None:
        await async_engine._call(EngineCore.pause, "test")  # or the first request could be finished before the second
        reader, other = (asyncio.create_task(read(ask(async_engine, name))) for name in ("a", "other"))
        while async_engine.num_unfinished_requests < 2:
            await asyncio.sleep(0)
        (internal_id,) = [key for key in async_engine._collectors if key.startswith("a-")]
        request = async_engine._output_processor._parents[internal_id]
        duplicate = async_engine._input_processor.process("a", request.prompt_token_ids, SamplingParams()).core_request
        async_engine._client._send_request(type(duplicate)(**{**_fields(duplicate), "request_id": internal_id}))
        with pytest.raises(VLLMValidationError, match="in use"):
            await reader
        await async_engine._call(EngineCore.resume, "test")
        assert (await other)[-1].finished
        await wait_until_idle(async_engine)

    def _fields(request: Any) -> dict[str, Any]:
        return {name: getattr(request, name) for name in request.__struct_fields__}

    run(work())


# ---------------------------------------------------------------- queue limits


def note(limits: QueueLimits, **stats: int) -> None:
    limits.note_outputs(EngineCoreOutputs(outputs=[], prompt_scores=[], stats=SchedulerStats(**stats)))


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "in_flight", "num_more", "fits"),
    [
        (0, 0, 0, 6, True),  # four run and two wait
        (0, 0, 0, 7, False),
        (0, 0, 6, 1, False),  # on their way to the core
        (4, 1, 0, 1, True),
        (4, 1, 0, 2, False),  # n counts
        (1, 2, 0, 1, False),  # seats are free, but not memory: whoever comes now waits behind them
    ],
)
def test_the_queue_holds_as_many_sequences_as_it_may(
    num_running: int, num_waiting: int, in_flight: int, num_more: int, fits: bool
) -> None:
    limits = QueueLimits(2, None, num_seats=4)
    note(limits, num_running=num_running, num_waiting=num_waiting)
    if fits:
        limits.check(num_more, 10_000, in_flight)
    else:
        with pytest.raises(Exception, match="max_num_queued_reqs") as caught:
            limits.check(num_more, 1, in_flight)
        assert type(caught.value).__name__ == "QueueOverflowError"


def test_a_limit_must_be_a_number() -> None:
    for limit in (-1, 1.5, True):
        with pytest.raises(VLLMValidationError, match="max_num_queued_tokens"):
            QueueLimits(None, limit, 4)  # type: ignore[arg-type]


def test_a_full_queue_refuses_at_the_door_and_counts_it(
    async_engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        monkeypatch.setattr(async_engine, "_limits", QueueLimits(None, 6, num_seats=256))
        first = ask(async_engine, prompt=[5] * 20, max_tokens=40)  # none waits: it enters, however long
        reader = asyncio.create_task(anext(first))
        await asyncio.sleep(0)
        with pytest.raises(Exception, match="20 prompt tokens wait and 6 may"):
            await read(ask(async_engine, "second"))
        await reader  # its first output: nothing waits any more
        assert (await read(ask(async_engine, "third")))[-1].finished
        await first.aclose()
        monkeypatch.setattr(async_engine, "_limits", QueueLimits(0, None, num_seats=3))
        with pytest.raises(Exception, match="max_num_queued_reqs"):
            async_engine.check_queue_limits(4, 1)
        await wait_until_idle(async_engine)

    run(work())
    text = async_engine.metrics.render().decode()
    assert 'reason="max_num_queued_tokens"} 1.0' in text and 'reason="max_num_queued_reqs"} 1.0' in text


# ---------------------------------------------------------------- control


def test_a_pause_holds_new_requests_back(async_engine: AsyncLLM) -> None:
    async def work() -> None:
        open_reader = asyncio.create_task(read(ask(async_engine, max_tokens=50)))
        while not async_engine.num_unfinished_requests:
            await asyncio.sleep(0)
        await async_engine.pause_generation()
        assert await async_engine.is_paused()
        assert (await open_reader)[-1].outputs[0].finish_reason == "abort"
        held_back = asyncio.create_task(read(ask(async_engine)))
        await asyncio.sleep(0.05)
        assert not held_back.done() and not async_engine.num_unfinished_requests
        await async_engine.resume_generation()
        assert (await held_back)[-1].finished and not await async_engine.is_paused()

    run(work())


def test_a_pause_can_wait_for_what_is_open(async_engine: AsyncLLM) -> None:
    async def work() -> None:
        readers = [asyncio.create_task(read(ask(async_engine, max_tokens=20 + i))) for i in range(3)]
        while async_engine.num_unfinished_requests < 3:
            await asyncio.sleep(0)
        await async_engine.pause_generation(mode="wait")
        assert not async_engine.num_unfinished_requests
        await async_engine.resume_generation()
        assert [outputs[-1].outputs[0].finish_reason for outputs in await asyncio.gather(*readers)] == ["length"] * 3

    run(work())


def test_a_pause_can_keep_what_is_open_where_it_is(async_engine: AsyncLLM) -> None:
    async def work() -> None:
        stream = ask(async_engine, max_tokens=50, output_kind=RequestOutputKind.DELTA)
        outputs = [await anext(stream)]
        await async_engine.pause_generation(mode="keep", clear_cache=False)
        before = (await async_engine.get_stats()).num_computed_positions
        await asyncio.sleep(0.1)
        assert (await async_engine.get_stats()).num_computed_positions == before
        await async_engine.resume_generation()
        outputs += await read(stream)
        final = await read(ask(async_engine, max_tokens=50, output_kind=RequestOutputKind.FINAL_ONLY))
        tokens = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
        assert tokens == list(final[0].outputs[0].token_ids)

    run(work())


@pytest.mark.parametrize("level", [0, 1])
def test_a_sleeping_engine_answers_after_it_wakes(async_engine: AsyncLLM, level: int) -> None:
    async def work() -> None:
        reader = asyncio.create_task(read(ask(async_engine, max_tokens=50)))
        while not async_engine.num_unfinished_requests:
            await asyncio.sleep(0)
        await async_engine.sleep(level, mode="keep")
        assert await async_engine.is_sleeping()
        num_halted = async_engine.num_unfinished_requests  # 1, unless the core was faster; what it finished is here
        later = asyncio.create_task(read(ask(async_engine, "b")))
        await asyncio.sleep(0.05)
        assert async_engine.num_unfinished_requests == num_halted + 1 and not later.done()
        await async_engine.wake_up()
        assert not await async_engine.is_sleeping()
        assert (await reader)[-1].finished and (await later)[-1].finished

    run(work())


def test_control_refuses_what_it_does_not_know(async_engine: AsyncLLM) -> None:
    async def work() -> None:
        with pytest.raises(VLLMValidationError, match="level"):
            await async_engine.sleep(5)
        with pytest.raises(VLLMValidationError, match="mode"):
            await async_engine.pause_generation(mode="later")
        with pytest.raises(VLLMUnsupportedError, match="name"):
            await async_engine.collective_rpc(print)
        with pytest.raises(VLLMValidationError, match="tags"):
            await async_engine.wake_up(["nothing"])
        assert await async_engine.reset_prefix_cache() is True
        assert not await async_engine.is_paused()
        await async_engine.check_health()

    run(work())


def test_metrics_count_a_request_once_and_its_tokens_all(async_engine: AsyncLLM) -> None:
    def value(name: str) -> float:
        lines = async_engine.metrics.render().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    async def work() -> None:
        await read(ask(async_engine, n=3, max_tokens=4))
        await async_engine.do_log_stats()

    before = {name: value(name) for name in ("request_success_total", "generation_tokens_total", "prompt_tokens_total")}
    run(work())
    assert value("request_success_total") - before["request_success_total"] == 1
    assert value("generation_tokens_total") - before["generation_tokens_total"] == 12
    assert value("prompt_tokens_total") - before["prompt_tokens_total"] == len(PROMPT)
    assert value("num_requests_running") == 0


# ---------------------------------------------------------------- death


def test_a_killed_core_fails_everyone_within_a_second(tiny_folder: pathlib.Path) -> None:
    engine = start(tiny_folder)
    times = []

    async def fail(work: Any) -> None:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await work
        times.append(time.monotonic())

    async def work() -> None:
        streams = [ask(engine, n=1 + i % 3, max_tokens=50, output_kind=KINDS[i % 3]) for i in range(20)]
        readers = [asyncio.create_task(fail(read(stream))) for stream in streams]
        while engine.num_unfinished_requests < 20:
            await asyncio.sleep(0)
        await engine.pause_generation(mode="keep")  # so that none ends before the core does
        call = asyncio.create_task(fail(engine.pause_generation(mode="wait")))
        held_back = asyncio.create_task(fail(read(ask(engine, "held back"))))
        await asyncio.sleep(0)
        assert engine.is_running and not engine.errored
        killed = time.monotonic()
        os.kill(engine._client.pid, signal.SIGKILL)
        await asyncio.gather(*readers, call, held_back)
        assert max(times) - killed < 1
        for dead in (engine.check_health(), read(ask(engine)), engine.reset_prefix_cache(), engine.abort("a")):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await dead

    run(work())
    assert engine.errored and not engine.is_running and "SIGKILL" in str(engine.dead_error)
    assert engine.num_unfinished_requests == 0
    engine.shutdown()


def test_a_shutdown_ends_requests_and_process_and_may_be_repeated(tiny_folder: pathlib.Path) -> None:
    engine = start(tiny_folder)
    pid = engine._client.pid

    async def work() -> None:
        reader = asyncio.create_task(read(ask(engine, max_tokens=50)))
        while not engine.num_unfinished_requests:
            await asyncio.sleep(0)
        started = time.monotonic()
        engine.shutdown()
        assert time.monotonic() - started < 1.5
        with pytest.raises(EngineDeadError, match="shut down"):
            await reader
        with pytest.raises(EngineDeadError, match="shut down"):
            await read(ask(engine))

    run(work())
    engine.shutdown()
    assert not os.path.exists(f"/proc/{pid}")
    assert not engine.is_running and not engine.errored
