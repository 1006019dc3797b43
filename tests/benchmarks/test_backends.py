"""What one streamed request is measured as, whoever serves it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.benchmarks.paced_server import Break, Event, PacedServer, Refusal, Script, choice, delta, usage
from vllm.benchmarks.backends import RequestMaker, RequestResult, send_request
from vllm.benchmarks.datasets import SampleRequest
from vllm.entrypoints.http_client import HttpClient
from vllm.exceptions import VLLMValidationError

GAP_S = 0.03


def measure(script: Script, *, count_tokens: Any = None) -> tuple[RequestResult, list[float]]:
    """Return one request's result, and when the server sent its events."""

    async def ask(url: str) -> RequestResult:
        async with HttpClient(url) as client:
            return await send_request(client, "/v1/completions", {}, 5, count_tokens=count_tokens)

    with PacedServer(script) as server:
        result = asyncio.run(ask(server.url))
        return result, server.sent_at[0]


def play(*events: Event, gap: float = 0.0) -> Script:
    async def script(body: dict[str, Any]) -> AsyncIterator[Event]:
        for event in events:
            if gap:
                await asyncio.sleep(gap)
            yield event

    return script


def assert_times(found: list[float], sent: list[float]) -> None:
    """An event is stamped after it was sent, and soon: a busy machine may take its time."""
    assert len(found) == len(sent)
    for arrived_at, sent_at in zip(found, sent, strict=True):
        assert 0 <= arrived_at - sent_at < 0.1


def test_the_times_of_a_slow_stream_are_those_of_its_events() -> None:
    words = [choice(" w") for _ in range(7)]
    result, sent = measure(play(*words, choice(" w", finish="length"), usage(11, 8), gap=GAP_S))
    assert result.is_success and (result.prompt_len, result.output_len, result.text) == (11, 8, " w" * 8)
    assert_times(result.token_times, sent[:8])
    assert result.ttft >= GAP_S and result.first_at == result.token_times[0]
    assert len(result.itls) == 7
    assert sum(result.itls) == pytest.approx(result.last_at - result.first_at)
    assert result.tpot == pytest.approx(sum(result.itls) / 7)
    assert sorted(result.itls)[3] == pytest.approx(GAP_S, abs=0.02)
    assert result.latency == pytest.approx(result.ttft + sum(result.itls))


def test_one_late_token_is_one_long_gap() -> None:
    async def stall(body: dict[str, Any]) -> AsyncIterator[Event]:
        for place in range(6):
            if place == 3:
                await asyncio.sleep(0.25)
            yield choice("x", finish="stop" if place == 5 else None)

    result, _ = measure(stall)
    assert max(result.itls) == result.itls[2] and 0.2 < result.itls[2] < 0.4
    assert sum(result.itls) - result.itls[2] < 0.15


def test_a_conversation_s_opening_event_is_no_token() -> None:
    events = (delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta(finish="stop"))
    result, sent = measure(play(*events, usage(3, 2), gap=GAP_S))
    assert_times(result.token_times, sent[1:3])
    assert (result.text, result.output_len, len(result.itls)) == ("ab", 2, 1)


def test_an_empty_last_event_counts_where_the_usage_says_it_held_a_token() -> None:
    events = (choice("a"), choice("b"), choice("", finish="stop"))
    with_token, sent = measure(play(*events, usage(3, 3), gap=GAP_S))
    assert_times(with_token.token_times, sent[:3])
    without, sent = measure(play(*events, usage(3, 2), gap=GAP_S))
    assert_times(without.token_times, sent[:2])
    for result in (with_token, without):
        assert result.is_success and len(result.itls) == len(result.token_times) - 1


def test_text_that_is_held_back_is_a_token_all_the_same() -> None:
    result, _ = measure(play(choice(""), choice("é"), choice("", finish="length"), usage(1, 3)))
    assert len(result.token_times) == 3 and result.text == "é"


def test_gaps_are_between_the_events_of_one_choice() -> None:
    async def two_choices(body: dict[str, Any]) -> AsyncIterator[Event]:
        for place in range(4):
            await asyncio.sleep(GAP_S)
            for index in range(2):
                yield choice("x", index, "length" if place == 3 else None)
        yield usage(5, 8)

    result, _ = measure(two_choices)
    assert result.num_choices == 2 and len(result.itls) == 6
    assert min(result.itls) > GAP_S / 2, "no gap from one choice to the other"
    assert result.tpot == pytest.approx((result.last_at - result.first_at) / 3)


def test_merged_tokens_are_one_event_and_all_of_them_in_the_count() -> None:
    result, _ = measure(play(choice("a"), choice("bcd"), choice("e", finish="length"), usage(2, 5), gap=GAP_S))
    assert (len(result.itls), result.output_len) == (2, 5)
    assert result.tpot == pytest.approx(sum(result.itls) / 4)


def test_without_usage_the_text_is_counted_or_the_events() -> None:
    events = (choice("aa"), choice("bb", finish="length"))
    assert measure(play(*events))[0].output_len == 2
    counted, _ = measure(play(*events), count_tokens=len)
    assert (counted.output_len, counted.prompt_len) == (4, 5)


def test_a_single_token_has_no_time_per_later_token() -> None:
    result, _ = measure(play(choice("a", finish="stop"), usage(1, 1)))
    assert result.is_success and result.tpot is None and result.itls == []


def refuse(status: int, message: str) -> Script:
    async def script(body: dict[str, Any]) -> AsyncIterator[Event]:
        raise Refusal(status, message)
        yield

    return script


async def cut(body: dict[str, Any]) -> AsyncIterator[Event]:
    yield choice("a")
    raise Break


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (refuse(503, "the queue is full"), "HTTP 503: the queue is full"),
        (play(choice("a"), {"error": {"message": "the engine died", "code": 500}}), "the engine died"),
        (play(choice("a"), "{not json"), "not what the API says"),
        (play(usage(3, 0)), "no token"),
        (cut, "broke in the middle"),
    ],
    ids=["refused", "error event", "no JSON", "nothing", "cut"],
)
def test_what_goes_wrong_is_a_failure_with_its_reason(script: Script, words: str) -> None:
    result, _ = measure(script)
    assert not result.is_success and words in result.error


def test_a_stream_that_just_stops_is_a_failure() -> None:
    """Such as that of a proxy that gave up: the connection ends well, the answer doesn't."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n')
        writer.close()

    async def ask() -> RequestResult:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            return await send_request(client, "/", {}, 1)

    assert "ended before the answer" in asyncio.run(ask()).error


def make(backend: str, **options: Any) -> RequestMaker:
    return RequestMaker(backend, "m", "/v1/x", **options)


def test_the_body_is_what_the_api_calls_for() -> None:
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    request = SampleRequest("hi", 1, 9)
    body = make("openai", logprobs=0, ignore_eos=True, sampling={"top_k": 3}).make_body(request)
    assert (
        body == {"model": "m", "prompt": "hi", "max_tokens": 9, "logprobs": 0, "ignore_eos": True, "top_k": 3} | streams
    )
    body = make("openai-chat", logprobs=2, extra_body={"stream_options": None}).make_body(request, "lora")
    assert body == {
        "model": "lora", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9,
        "logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": None,
    }  # fmt: skip
    assert make("openai").make_body(SampleRequest([1, 2], 2, None)) == {"model": "m", "prompt": [1, 2]} | streams
    with pytest.raises(VLLMValidationError, match="tokenizer"):
        make("openai-chat").make_body(SampleRequest([1, 2], 2, None))
