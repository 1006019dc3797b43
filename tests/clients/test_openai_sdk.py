"""The OpenAI SDK, unmodified: its answers are of its own types, and what it makes of logprobs is right."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.entrypoints.openai.client import Client

HI: list[Any] = [{"role": "user", "content": "hi"}]
PROMPT = "The capital of France is Paris, and"


@pytest.fixture(scope="module")
def sdk(model_server: Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{model_server.host}:{model_server.port}/v1", api_key="x", max_retries=0) as client:
        yield client


def check_type(answer: pydantic.BaseModel, *, beside: tuple[tuple[Any, ...], ...] = ()) -> None:
    """Hold an answer against the SDK's type of it, to the letter; `beside` are places where OpenAI's own differ."""
    text = json.dumps(answer.to_dict())  # type: ignore[attr-defined]
    try:
        type(answer).model_validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        wrong = {tuple("*" if isinstance(step, int) else step for step in item["loc"]) for item in error.errors()}
        assert wrong <= set(beside), error


# In echo the first token has no score, and a stream's pieces before the last have no finish reason: the types say
# neither, though the API's own answers are so.
ECHO = (("choices", "*", "logprobs", "token_logprobs", "*"), ("choices", "*", "logprobs", "top_logprobs", "*"))
OPEN = (("choices", "*", "finish_reason"),)


def check_completion_logprobs(logprobs: Any, num_top: int, *, echo: bool = False) -> None:
    """Lengths agree, values are log-probabilities, the alternatives fall and hold the chosen token."""
    length = len(logprobs.tokens)
    assert length == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset)
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for i in range(length):
        top, value = logprobs.top_logprobs[i], logprobs.token_logprobs[i]
        if echo and i == 0:
            assert top is None and value is None
            continue
        assert value <= 0 and math.isfinite(value) and value in top.values()
        assert num_top <= len(top) <= num_top + 1


def test_the_served_model(sdk: OpenAI) -> None:
    (model,) = sdk.models.list().data
    check_type(model)
    assert sdk.models.retrieve("smol").id == model.id == "smol"


def test_a_prompt_scored_by_echo(sdk: OpenAI) -> None:
    answer = sdk.completions.create(model="smol", prompt=PROMPT, max_tokens=1, echo=True, logprobs=3, temperature=0)
    check_type(answer, beside=ECHO)
    (choice,) = answer.choices
    assert answer.usage and choice.logprobs and choice.logprobs.tokens
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens + answer.usage.completion_tokens
    check_completion_logprobs(choice.logprobs, 3, echo=True)
    assert choice.text.startswith(PROMPT) and "".join(choice.logprobs.tokens) == choice.text


def test_choices_of_several_prompts_come_prompt_by_prompt(sdk: OpenAI) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, "logprobs": 0, "temperature": 1.0, "seed": 1}
    answer = sdk.completions.create(model="smol", prompt=["one", "two"], n=2, **fields)
    check_type(answer)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        check_completion_logprobs(choice.logprobs, 1)
    alone = sdk.completions.create(model="smol", prompt="two", n=2, **fields)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in answer.choices[2:]]
    assert answer.usage and answer.usage.completion_tokens == 16 and answer.usage.prompt_tokens == 2


def test_what_openai_does_not_know_goes_through_extra_body(sdk: OpenAI) -> None:
    extra = {"prompt_logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = sdk.completions.create(model="smol", prompt=[5, 600, 7], max_tokens=2, logprobs=1, extra_body=extra)
    check_type(answer)
    found = answer.choices[0].model_extra or {}
    first, *scored = found["prompt_logprobs"]
    assert first is None and [next(iter(entry)) for entry in scored] == ["600", "7"]
    for entry in scored:
        assert all({"logprob", "rank", "decoded_token"} <= set(value) for value in entry.values())
    assert found["prompt_token_ids"] == [5, 600, 7]
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens == [f"token_id:{token_id}" for token_id in found["token_ids"]]


@pytest.mark.parametrize("echo", [False, True], ids=["plain", "echo"])
def test_a_streamed_completion_is_the_whole_one(sdk: OpenAI, echo: bool) -> None:
    fields: dict[str, Any] = {"model": "smol", "prompt": PROMPT, "max_tokens": 6, "seed": 3, "n": 2}
    fields |= {"logprobs": 2, "echo": echo}
    whole = sdk.completions.create(**fields)
    texts: dict[int, str] = {0: "", 1: ""}
    tokens: dict[int, list[str]] = {0: [], 1: []}
    usage = None
    for event in sdk.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        check_type(event, beside=ECHO + OPEN)
        usage = event.usage or usage
        for piece in event.choices:
            texts[piece.index] += piece.text
            tokens[piece.index] += (piece.logprobs and piece.logprobs.tokens) or []
    for choice in whole.choices:
        assert choice.logprobs
        assert texts[choice.index] == choice.text and tokens[choice.index] == choice.logprobs.tokens
    assert usage and whole.usage and usage.total_tokens == whole.usage.total_tokens


def check_chat_content(content: list[Any], num_top: int) -> None:
    for entry in content:
        assert entry.logprob <= 0 and bytes(entry.bytes).decode(errors="replace") is not None
        assert len(entry.top_logprobs) == num_top
        values = [alternative.logprob for alternative in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


def test_chat_with_logprobs_and_n(sdk: OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": [{"type": "text", "text": "say 🙂 and é"}]}],
        max_completion_tokens=8,
        n=3,
        seed=5,
        logprobs=True,
        top_logprobs=2,
    )
    check_type(answer)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "length") and choice.logprobs and choice.logprobs.content
        check_chat_content(choice.logprobs.content, 2)
        shown = [entry for entry in choice.logprobs.content if entry.token != "<|im_end|>"]
        said = b"".join(bytes(entry.bytes or []) for entry in shown)
        assert said.decode(errors="replace") == choice.message.content
    assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat(sdk: OpenAI) -> None:
    fields: dict[str, Any] = {"max_completion_tokens": 6, "logprobs": True, "top_logprobs": 1, "temperature": 0}
    whole = sdk.chat.completions.create(model="smol", messages=HI, **fields)
    content: list[Any] = []
    text, usage = "", None
    options: Any = {"include_usage": True}
    for event in sdk.chat.completions.create(model="smol", messages=HI, **fields, stream=True, stream_options=options):
        check_type(event)
        if event.usage:
            usage = event.usage
            assert event.choices == []
        for piece in event.choices:
            text += piece.delta.content or ""
            content += (piece.logprobs and piece.logprobs.content) or []
    check_chat_content(content, 1)
    (choice,) = whole.choices
    assert choice.logprobs and choice.logprobs.content
    assert text == choice.message.content == "hi"
    assert [entry.token for entry in content] == [entry.token for entry in choice.logprobs.content]
    assert usage and usage.completion_tokens == len(content) == 2


def test_the_sdks_stream_helper_gathers_the_logprobs(sdk: OpenAI) -> None:
    options: dict[str, Any] = {"model": "smol", "messages": HI, "temperature": 0, "logprobs": True}
    with sdk.chat.completions.stream(**options, max_completion_tokens=4) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds
    (choice,) = final.choices
    assert choice.finish_reason == "stop" and choice.logprobs and choice.logprobs.content
    assert [entry.token for entry in choice.logprobs.content] == ["hi", "<|im_end|>"]


def test_the_sdk_refuses_an_answer_that_was_cut_and_still_has_its_logprobs(sdk: OpenAI) -> None:
    options: dict[str, Any] = {"model": "smol", "messages": HI, "temperature": 0, "logprobs": True}
    with (
        pytest.raises(openai.LengthFinishReasonError) as cut,
        sdk.chat.completions.stream(**options, max_completion_tokens=1) as stream,
    ):
        stream.get_final_completion()
    (choice,) = cut.value.completion.choices
    assert choice.finish_reason == "length" and choice.message.content == "hi"
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 1
    parsed = sdk.chat.completions.parse(**options, max_completion_tokens=4)
    assert parsed.choices[0].message.content == "hi"


def test_nulls_for_what_is_left_out(sdk: OpenAI) -> None:
    nulls = dict.fromkeys(("seed", "stop", "logprobs", "top_logprobs", "n", "logit_bias", "response_format", "tools"))
    answer = sdk.chat.completions.create(model="smol", messages=HI, max_tokens=1, extra_body=nulls)
    check_type(answer)
    nulls = dict.fromkeys(("seed", "stop", "logprobs", "n", "best_of", "suffix", "echo", "stream", "top_p"))
    check_type(sdk.completions.create(model="smol", prompt="a", max_tokens=1, extra_body=nulls))


def test_errors_are_the_sdks_own(sdk: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="another", prompt="x", max_tokens=1)
    assert missing.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("an/other")
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model="smol", prompt="x", max_tokens=1, logprobs=1000)
    assert refused.value.param == "logprobs" and "1000" in refused.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="smol", messages=HI, top_logprobs=2)
    assert refused.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        sdk.completions.create(model="smol", prompt="word " * 3000, max_tokens=1)
    with pytest.raises(openai.BadRequestError):  # before the first event of a stream
        list(sdk.completions.create(model="smol", prompt="x", temperature=-1, stream=True))


def test_many_at_once_from_one_event_loop(model_server: Client) -> None:
    async def ask() -> list[Any]:
        url = f"http://{model_server.host}:{model_server.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as sdk:
            calls = [
                sdk.completions.create(model="smol", prompt=PROMPT, max_tokens=4, seed=seed % 2, logprobs=1)
                for seed in range(16)
            ]
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert len({answer.choices[0].text for answer in answers[::2]}) == 1
    assert len({answer.id for answer in answers}) == 16
