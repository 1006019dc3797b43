"""Refusals of a running server: status, body and header, before anything is scheduled."""

import contextlib
from typing import Any

import pytest

from tests.entrypoints.openai.client import Client


@pytest.mark.parametrize(
    ("raw", "headers", "words"),
    [
        (b"{not json", {}, "not valid JSON"),
        (b"", {}, "not valid JSON"),
        (b'"text"', {}, "JSON object"),
        (b'{"prompt": NaN}', {}, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', {}, "not valid JSON"),
        (b"\xff\xfe", {}, "not valid JSON"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", {}, "not valid JSON"),
        (b'{"prompt": "a"}', {"Content-Type": "text/plain"}, "Content-Type must be application/json"),
    ],
    ids=["broken", "empty", "no object", "nan", "lone surrogate", "no utf-8", "deep", "content type"],
)
def test_a_body_that_is_no_json_object_is_400(server: Client, raw: bytes, headers: dict[str, str], words: str) -> None:
    answer = server.send("POST", "/v1/completions", raw=raw, headers=headers)
    assert answer.status == 400 and words in answer.error["message"]
    assert set(answer.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"prompt": [1, 99999999]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": [[1], []]}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [5] * 257}, 400, "input_tokens"),
        ({"prompt": "a" * 100_000}, 400, "input_tokens"),
        ({"logprobs": 600, "max_tokens": 9}, 200, None),
        ({"priority": 1}, 400, "priority"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"stop_token_ids": [100000]}, 400, "stop_token_ids"),
        ({"allowed_token_ids": []}, 400, "allowed_token_ids"),
        ({"logprob_token_ids": [7] * 129, "logprobs": 0}, 400, "logprob_token_ids"),
        ({"truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, 400, "truncation_side"),
        ({"n": 16384, "logprobs": -1, "max_tokens": 100}, 400, "logprobs"),
        ({"request_id": "a\nb"}, 400, "request_id"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_the_model_can_not_do_is_refused_by_name(
    server: Client, fields: dict[str, Any], status: int, param: str | None
) -> None:
    answer = server.complete(**fields)
    assert answer.status == status
    if param is not None:
        assert answer.error["param"] == param and answer.error["code"] == status


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_look_for(server: Client) -> None:
    message = server.complete(prompt=[5] * 300).error["message"]
    assert message.startswith("This model's maximum context length is 256 tokens.") and "300" in message


def test_one_bad_prompt_of_several_leaves_none_running(server: Client) -> None:
    server.wait_until_idle()
    before = server.metric("request_params_n_count")
    assert server.complete(prompt=[[5, 6], [9999]]).status == 400
    assert server.complete(prompt=[[5, 6], [5] * 256]).status == 400
    assert server.metric("num_requests_running") == 0 and server.metric("request_params_n_count") == before


def test_a_chat_names_its_own_fields(server: Client) -> None:
    assert server.chat(messages=[]).error["param"] == "messages"
    assert server.chat(messages=[{"content": "x"}]).error["param"] == "messages"
    assert server.chat(chat_template="{{ messages }}").error["param"] == "chat_template"
    assert server.chat(reasoning_effort="high").error["param"] == "reasoning_effort"
    refused = server.chat(logprobs=True, top_logprobs=-1, n=16384, max_tokens=100)
    assert refused.error["param"] == "top_logprobs"


def test_unknown_paths_and_methods_have_openai_bodies(server: Client) -> None:
    assert server.get("/nothing").error["code"] == 404
    wrong = server.send("PUT", "/v1/completions")
    assert wrong.status == 405 and wrong.error["code"] == 405 and wrong.headers["allow"] == "POST"


def test_a_body_that_is_too_large_is_413(server: Client) -> None:
    with contextlib.closing(server.connect()) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(2**40))
        connection.endheaders()
        assert connection.getresponse().status == 413


def test_a_body_that_grows_too_large_is_413(server: Client) -> None:
    with contextlib.closing(server.connect()) as connection:
        chunk = b"a" * 2**20
        connection.request("POST", "/v1/completions", iter([b'{"prompt": "', *[chunk] * 33, b'"}']),
                           {"Content-Type": "application/json"}, encode_chunked=True)  # fmt: skip
        response = connection.getresponse()
        assert response.status == 413 and b"--max-request-body-bytes" in response.read()


def test_nothing_of_it_was_our_fault(server: Client) -> None:
    assert server.get("/health").status == 200
    assert server.complete().status == 200
