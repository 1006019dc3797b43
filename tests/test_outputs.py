"""Merging outputs of one request, and the forms in which a prompt may come."""

import copy
from typing import Any

import numpy as np
import pytest

from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.inputs import ParsedPrompt, TextPrompt, TokensPrompt, parse_prompt, parse_prompts
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput


def make_scores(token_ids: list[int]) -> FlatLogprobs:
    count = len(token_ids)
    return FlatLogprobs.from_arrays(
        np.arange(count + 1), np.array(token_ids, np.int32), -np.array(token_ids, np.float32), np.ones(count, np.int32)
    )


def make_delta(index: int, token_ids: list[int], total: float, reason: str | None = None) -> CompletionOutput:
    text = "".join(chr(97 + token_id) for token_id in token_ids)
    return CompletionOutput(index, text, token_ids, total, make_scores(token_ids), finish_reason=reason)


def make_output(*completions: CompletionOutput, finished: bool = False, **fields: Any) -> RequestOutput:
    return RequestOutput("7", "p", [1, 2], fields.pop("prompt_logprobs", None), list(completions), finished, **fields)


def test_deltas_joined_equal_the_whole_and_nothing_that_was_handed_out_changes() -> None:
    pieces = [
        make_output(make_delta(0, [1, 2], -3.0), make_delta(1, [5], -5.0), prompt_logprobs=[None, {2: Logprob(-1.0)}]),
        make_output(make_delta(1, [6], -11.0, "stop"), prompt_logprobs=[]),
        make_output(make_delta(2, [9], -9.0, "length"), make_delta(0, [3], -6.0, "stop"), finished=True),
    ]
    handed_out = copy.deepcopy([piece.outputs for piece in pieces])
    first_completion = pieces[0].outputs[0]
    merged = pieces[0]
    merged.add(pieces[1], aggregate=True)
    merged.add(pieces[2], aggregate=True)
    assert merged.finished and merged.prompt_logprobs == [None, {2: Logprob(-1.0)}]
    assert [completion.index for completion in merged.outputs] == [0, 1, 2]
    first, second, third = merged.outputs
    assert (first.text, list(first.token_ids), first.cumulative_logprob) == ("bcd", [1, 2, 3], -6.0)
    assert first.logprobs == make_scores([1, 2, 3]) and first.finish_reason == "stop" and first.finished()
    assert (second.text, list(second.token_ids), second.finish_reason) == ("fg", [5, 6], "stop")
    assert third == handed_out[2][0]
    assert first_completion == handed_out[0][0], "a delta that somebody holds must not grow"
    assert pieces[1].outputs == handed_out[1] and pieces[2].outputs == handed_out[2]


def test_cumulative_outputs_replace_those_of_their_index_and_keep_the_others() -> None:
    merged = make_output(make_delta(0, [1], -1.0), make_delta(1, [5], -5.0))
    merged.add(make_output(make_delta(1, [5, 6], -11.0)), aggregate=False)
    assert merged.outputs == [make_delta(0, [1], -1.0), make_delta(1, [5, 6], -11.0)]
    assert not merged.finished


@pytest.mark.parametrize(
    ("one", "two", "joined"),
    [
        (None, None, None),
        ([], [], []),
        (make_scores([1]), [], make_scores([1])),
        ([], make_scores([1]), make_scores([1])),
        (make_scores([1]), make_scores([2]), make_scores([1, 2])),
        (make_scores([1]).to_list(), make_scores([2]), make_scores([1, 2])),
        (make_scores([1]), make_scores([2]).to_list(), make_scores([1, 2])),
    ],
)
def test_logprobs_of_any_container_join(one: Any, two: Any, joined: Any) -> None:
    merged = make_output(CompletionOutput(0, "", [], None, one))
    merged.add(make_output(CompletionOutput(0, "", [], None, two)), aggregate=True)
    assert merged.outputs[0].logprobs == joined
    assert isinstance(joined, FlatLogprobs) or merged.outputs[0].logprobs is not one or one is None or one == []


def test_the_positional_order_of_the_outputs_is_vllms() -> None:
    output = RequestOutput("id", "text", [1], None, [], True, "m", "l", "e", [2], 3, 4)
    assert (output.metrics, output.lora_request, output.encoder_prompt, output.encoder_prompt_token_ids) == (
        "m", "l", "e", [2],
    )  # fmt: skip
    assert (output.num_cached_tokens, output.num_cache_creation_tokens) == (3, 4)
    with pytest.raises(TypeError):
        RequestOutput("id", "text", [1], None, [], True, num_cached_token=3)  # type: ignore[call-arg]
    completion = CompletionOutput(0, "t", [1], -1.0, None, None, "stop", 5)
    assert (completion.routed_experts, completion.finish_reason, completion.stop_reason) == (None, "stop", 5)
    assert "request_id='id'" in repr(output) and "finish_reason='stop'" in repr(completion)


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("prompts", "parsed"),
    [
        ("hi", [ParsedPrompt("hi", None, None)]),
        ("", [ParsedPrompt("", None, None)]),
        ([1, 2], [ParsedPrompt(None, [1, 2], None)]),
        ((1, 2), [ParsedPrompt(None, [1, 2], None)]),
        (np.array([1, 2]), [ParsedPrompt(None, [1, 2], None)]),
        ([np.int64(1), 2], [ParsedPrompt(None, [1, 2], None)]),
        (np.array([[1, 2], [3, 4]]), [ParsedPrompt(None, [1, 2], None), ParsedPrompt(None, [3, 4], None)]),
        ([np.array([1]), np.array([2])], [ParsedPrompt(None, [1], None), ParsedPrompt(None, [2], None)]),
        ({"prompt": "hi"}, [ParsedPrompt("hi", None, None)]),
        (TextPrompt(prompt="hi", cache_salt="s"), [ParsedPrompt("hi", None, "s")]),
        (TokensPrompt(prompt_token_ids=[1]), [ParsedPrompt(None, [1], None)]),
        ({"prompt_token_ids": [1], "prompt": "hi"}, [ParsedPrompt("hi", [1], None)]),
        ({"prompt_token_ids": np.array([1, 2])}, [ParsedPrompt(None, [1, 2], None)]),
        ({"prompt": None, "prompt_token_ids": [], "multi_modal_data": {}}, [ParsedPrompt(None, [], None)]),
        ({"prompt": "hi", "prompt_embeds": None, "mm_processor_kwargs": None}, [ParsedPrompt("hi", None, None)]),
        ([], []),
        ((p for p in ["a", [1]]), [ParsedPrompt("a", None, None), ParsedPrompt(None, [1], None)]),
        (
            ["a", [1, 2], {"prompt": "b"}, []],
            [
                ParsedPrompt("a", None, None),
                ParsedPrompt(None, [1, 2], None),
                ParsedPrompt("b", None, None),
                ParsedPrompt(None, [], None),
            ],
        ),
    ],
)
def test_each_form_of_a_prompt_or_a_batch_is_understood(prompts: Any, parsed: list[ParsedPrompt]) -> None:
    found = parse_prompts(prompts)
    assert found == parsed
    assert all(type(t) is int for prompt in found for t in prompt.token_ids or [])


def test_the_parsed_ids_are_a_list_of_their_own() -> None:
    token_ids = [1, 2]
    parsed = parse_prompt({"prompt_token_ids": token_ids})
    token_ids.append(3)
    assert parsed.token_ids == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "kind", "text"),
    [
        ({"prompt_embeds": [1.0]}, VLLMUnsupportedError, "prompt 1: prompt_embeds is not served"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, VLLMUnsupportedError, "prompt 1: multi_modal_data"),
        ({"prompt": "a", "mm_processor_kwargs": {"x": 1}}, VLLMUnsupportedError, "mm_processor_kwargs"),
        ({"encoder_prompt": "a", "decoder_prompt": "b"}, VLLMUnsupportedError, "encoder_prompt"),
        ({"promt": "a"}, VLLMValidationError, "prompt 1 has an unknown key 'promt'"),
        ({}, VLLMValidationError, "prompt 1 needs prompt or prompt_token_ids"),
        ({"prompt": 5}, VLLMValidationError, "prompt 1: prompt must be a str; got int"),
        ({"prompt": "a", "cache_salt": 5}, VLLMValidationError, "cache_salt must be a str"),
        ({"prompt": "a", "cache_salt": ""}, VLLMValidationError, "cache_salt must not be empty"),
        ({"prompt_token_ids": "12"}, VLLMValidationError, "prompt 1: token ids must be a list of integers; got str"),
        ({"prompt_token_ids": 12}, VLLMValidationError, "prompt 1: token ids must be a list of integers; got int"),
        ([1, 2.5], VLLMValidationError, "prompt 1: token ids must be integers; got float"),
        ([1, "a"], VLLMValidationError, "prompt 1: token ids must be integers; got str"),
        ([1, True], VLLMValidationError, "prompt 1: token ids must be integers; got bool"),
        ([np.array([1]), 2], VLLMValidationError, "prompt 1: token ids must be integers; got ndarray"),
        (np.array([1.5]), VLLMValidationError, "prompt 1: token ids must be integers; got float"),
        (5, TypeError, "prompt 1 must be a str"),
        (None, TypeError, "prompt 1 must be a str"),
        (b"a", TypeError, "prompt 1 must be a str"),
    ],
)
def test_a_wrong_prompt_is_refused_with_its_index(prompt: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        parse_prompts(["fine", prompt])


@pytest.mark.parametrize("prompts", [None, 5, b"ab"])
def test_what_is_no_prompt_at_all_is_a_type_error(prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompts must be a prompt or a list of prompts"):
        parse_prompts(prompts)
