"""What a request may hold: each refusal names its field, and what asks for nothing passes."""

from typing import Any

import pytest
from pydantic import ValidationError

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.errors import ApiError, to_api_error
from vllm.entrypoints.openai.request_body import parse_request
from vllm.entrypoints.openai.sampling import SamplingDefaults
from vllm.entrypoints.openai.unserved import UNSERVED_FIELDS
from vllm.exceptions import VLLMError
from vllm.sampling_params import RequestOutputKind, SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]


def read_completion(**fields: Any) -> CompletionRequest:
    request = parse_request({"prompt": "x", **fields}, CompletionRequest)
    request.check()
    return request


def read_chat(**fields: Any) -> ChatCompletionRequest:
    request = parse_request({"messages": MESSAGES, **fields}, ChatCompletionRequest)
    request.check()
    return request


def make_params(request: CompletionRequest, config: dict[str, Any] | None = None) -> SamplingParams:
    return SamplingDefaults(config or {}).make_params(request)


def refusal_of(read: Any, **fields: Any) -> ApiError:
    with pytest.raises((ValidationError, VLLMError)) as caught:
        request = read(**fields)
        if isinstance(request, CompletionRequest):
            make_params(request)
    return to_api_error(caught.value)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logprobs": -2}, "logprobs", "`logprobs` must be a positive value or -1."),
        ({"logprobs": "three"}, "logprobs", "`logprobs` must be an integer."),
        ({"logprobs": 1.5}, "logprobs", "`logprobs` must be an integer."),
        ({"prompt_logprobs": -2}, "prompt_logprobs", "`prompt_logprobs` must be a positive value or -1."),
        ({"prompt_logprobs": "x"}, "prompt_logprobs", "`prompt_logprobs` must be an integer."),
        ({"stream_options": {"include_usage": True}}, "stream_options", "Stream options can only be defined when"),
        ({"prompt": None}, "prompt", "Either prompt or prompt_embeds must be provided and non-empty."),
        ({"prompt": []}, "prompt", "at least one prompt"),
        ({"prompt": {"a": 1}}, "prompt", "must be a string"),
        ({"prompt": [1, "a"]}, "prompt", "must be a string"),
        ({"prompt": [True]}, "prompt", "must be a string"),
        ({"prompt": [[1], "a"]}, "prompt", "must be a string"),
        ({"prompt": ["a"] * 1025}, "prompt", "VLLM_MAX_COMPLETION_PROMPTS"),
        ({"prompt": ["a"] * 100, "n": 1000}, "n", "prompts × n"),
        ({"n": 0}, "n", "n must be at least 1"),
        ({"n": 10**7}, "n", "n must be at most"),
        ({"n": "many"}, "body.n", "valid integer"),
        ({"best_of": 1, "n": 2}, "best_of", "at least n=2"),
        ({"best_of": 3, "n": 2, "stream": True}, "best_of", "can't be streamed"),
        ({"best_of": 10**7}, "best_of", "at most"),
        ({"best_of": 2, "max_tokens": 0}, "best_of", "samples nothing"),
        ({"n": 2, "max_tokens": 0}, "n", "samples nothing"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "needs `logprobs`"),
        ({"logprob_token_ids": [1], "logprobs": 1, "max_tokens": 0}, "logprob_token_ids", "generates none"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": [1]}, "stop", "list of strings"),
        ({"stop": "a" * 2000}, "stop", "at most 1024 characters"),
        ({"stop": ""}, "stop", "empty string"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"top_p": 0}, "top_p", "top_p must be"),
        ({"seed": 2**64}, "body.seed", "less than or equal"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode", "must be one of"),
        ({"request_id": "x" * 300}, "body.request_id", "at most 256"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"prompt_logprobs_start": 3}, "prompt_logprobs_start", "needs prompt_logprobs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_completions_request_is_refused_by_the_name_of_its_field(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal_of(read_completion, **fields)
    assert (error.status, error.param) == (400, param)
    assert words in error.message and len(error.message) < 3000


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"top_logprobs": 2}, "top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true."),
        ({"top_logprobs": -2, "logprobs": True}, "top_logprobs", "`top_logprobs` must be a positive value or -1."),
        ({"logprobs": 5}, "body.logprobs", "boolean"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "needs `logprobs: true`"),
        ({"continue_final_message": True}, "continue_final_message", "Cannot set both"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "field of the request"),
        ({"messages": None}, "body.messages", "valid list"),
        ({"messages": ["hi"]}, "body.messages.0", "valid dictionary"),
        ({"stream_options": {}}, "stream_options", "Stream options"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_chat_request_is_refused_by_the_name_of_its_field(fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal_of(read_chat, **fields)
    assert (error.status, error.param) == (400, param) and words in error.message


@pytest.mark.parametrize("read", [read_completion, read_chat], ids=["completions", "chat"])
def test_the_refusal_of_vllm_s_start_names_the_start_of_prompt_logprobs(read: Any) -> None:
    error = refusal_of(read, prompt_logprob_start=0, prompt_logprobs=1)
    assert (error.status, error.param) == (400, "prompt_logprob_start")
    assert "prompt_logprobs_start is the first token that prompt_logprobs scores" in error.message


def test_a_missing_field_reads_as_the_real_server_says_it() -> None:
    with pytest.raises(ValidationError) as caught:
        parse_request({"model": "m", "max_tokens": 2}, ChatCompletionRequest)
    assert to_api_error(caught.value).body()["error"] == {
        "message": "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
        "'input': '<dict of 2 items>'}",
        "type": "Bad Request",
        "param": "body.messages",
        "code": 400,
    }


# What an unserved field holds when it asks for something.
ASKING: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "repetition_detection": {"max_pattern_size": 3},
    "modalities": ["audio"],
    "tool_choice": "required",
    "function_call": {"name": "f"},
    "verbosity": "high",
    "length_penalty": 0.5,
    "thinking_token_budget": 10,
    "routed_experts_prompt_start": 4,
}


@pytest.mark.parametrize("name", sorted(UNSERVED_FIELDS))
@pytest.mark.parametrize("read", [read_completion, read_chat], ids=["completions", "chat"])
def test_a_field_that_is_not_served_is_refused_by_name_and_passes_when_it_asks_for_nothing(
    read: Any, name: str
) -> None:
    error = refusal_of(read, **{name: ASKING.get(name, {"some": "thing"})})
    assert (error.status, error.param) == (400, name) and f"`{name}`" in error.message
    for neutral in (None, [], {}, "", False):
        read(**{name: neutral})


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"tool_choice": "auto", "tools": []},
        {"length_penalty": 1.0},
        {"modalities": ["text"]},
        {"repetition_detection": {"max_pattern_size": 0}},
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True},
        {"something_new": [1, 2]},
        {"stop": None, "seed": None, "n": None, "temperature": None, "logprobs": None, "stream": None, "model": None},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_asks_for_nothing_passes(fields: dict[str, Any]) -> None:
    read_completion(**fields)
    read_chat(**fields)


def test_a_completions_client_may_say_true_for_one_and_false_for_none() -> None:
    assert read_completion(logprobs=True).logprobs == 1
    assert read_completion(logprobs=False).logprobs is None
    assert read_completion(logprobs=0).logprobs == 0


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_every_form_of_a_prompt_is_a_list_of_prompts(prompt: Any, read: Any) -> None:
    assert read_completion(prompt=prompt).prompt == read


def test_an_echo_with_logprobs_scores_the_prompt_too() -> None:
    assert read_completion(echo=True, logprobs=3).prompt_logprobs_count == 3
    assert read_completion(echo=True, logprobs=3, prompt_logprobs=1).prompt_logprobs_count == 1
    assert read_completion(echo=True).prompt_logprobs_count is None
    assert read_completion(logprobs=3).prompt_logprobs_count is None
    assert read_chat(echo=True, logprobs=True, top_logprobs=2).prompt_logprobs_count == 2


def test_a_request_stands_before_the_model_and_the_model_before_the_engine() -> None:
    config = {"temperature": 0.2, "top_p": 0.9, "top_k": 50, "max_new_tokens": 8, "do_sample": True}
    params = make_params(read_completion(top_p=0.5, max_tokens=None), config)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.2, 0.5, 50, 8)
    params = make_params(read_completion())
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert make_params(read_completion(stream=True)).output_kind is RequestOutputKind.DELTA
