"""Streams: joined they are the whole answer; a reader may be slow or go away."""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.entrypoints.openai.client import Answer, Client, assert_same

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "chosen only": {"logprobs": 0, "temperature": 0},
    "echo": {"echo": True, "logprobs": 1},
    "echo of token ids": {"echo": True, "logprobs": 1, "prompt": [1, 300, 270, 2, 244]},
    "n": {"n": 3, "logprobs": 1},
    "greedy n": {"n": 2, "temperature": 0, "logprobs": 1},
    "prompts and n": {"prompt": ["the", "and of the", "was"], "n": 2, "logprobs": 1, "echo": True},
    "stop": {"logprobs": 1, "max_tokens": 12, "stop": ["e", "on"]},
    "stop kept": {"logprobs": 1, "max_tokens": 12, "stop": ["e", "on"], "include_stop_str_in_output": True},
    "special tokens shown": {"logprobs": 1, "skip_special_tokens": False, "logit_bias": {"2": 30}},
    "end token": {"logprobs": 1, "logit_bias": {"2": 12}, "max_tokens": 20},
    "stop token": {"logprobs": 1, "stop_token_ids": list(range(100, 300)), "max_tokens": 20},
    "merged deltas": {"logprobs": 1, "stream_interval": 3, "max_tokens": 10},
    "prompt logprobs": {"prompt_logprobs": 1, "n": 2},
    "score only": {"prompt_logprobs": 1, "max_tokens": 0, "echo": True, "logprobs": 1},
    "score only, nothing asked": {"max_tokens": 0},
    "token names": {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True},
    "given ids": {"logprobs": 0, "logprob_token_ids": [300, 5, 7]},
    "emoji": {"prompt": "😀你", "logprobs": 1, "max_tokens": 12, "echo": True},
}


def join_completion(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Return what the pieces of each choice come to."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            choice = choices.setdefault(
                piece["index"], {"text": "", "logprobs": None, "token_ids": None, "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "nothing comes after the end"
            choice["text"] += piece["text"]
            for name, values in (piece["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"].setdefault(name, []).extend(values)
            if piece["token_ids"] is not None:
                choice["token_ids"] = (choice["token_ids"] or []) + piece["token_ids"]
            choice |= {name: piece[name] for name in ("finish_reason", "stop_reason")}
            if "prompt_logprobs" in piece:
                choice["prompt_logprobs"] = piece["prompt_logprobs"]
    return choices


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_a_completion_joined_are_the_whole(server: Client, name: str) -> None:
    fields = {"max_tokens": 6} | CASES[name]
    whole = server.complete(**fields).json
    streamed = server.complete(**fields, stream=True, stream_options={"include_usage": True})
    assert streamed.status == 200 and streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last, done = streamed.events
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"] == {name: value for name, value in whole["usage"].items() if value is not None}
    joined = join_completion(events)
    assert sorted(joined) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        piece = joined[choice["index"]]
        for key in ("text", "logprobs", "token_ids", "finish_reason", "stop_reason"):
            assert_same(piece[key], choice[key], key)
        if "prompt_logprobs" in fields:
            assert_same(piece["prompt_logprobs"], choice["prompt_logprobs"])
        else:
            assert "prompt_logprobs" not in piece


CHAT_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "n": {"n": 3, "logprobs": True},
    "stop": {"logprobs": True, "top_logprobs": 1, "max_tokens": 12, "stop": ["e", "on"]},
    "end token": {"logprobs": True, "logit_bias": {"2": 12}, "max_tokens": 20},
    "merged deltas": {"logprobs": True, "stream_interval": 4, "max_tokens": 10},
    "prompt logprobs": {"prompt_logprobs": 1, "n": 2, "return_token_ids": True, "return_prompt_text": True},
    "score only": {"prompt_logprobs": 0, "max_tokens": 0},
    "token names": {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
}


@pytest.mark.parametrize("name", CHAT_CASES)
def test_pieces_of_a_chat_joined_are_the_whole(server: Client, name: str) -> None:
    fields = {"max_tokens": 6} | CHAT_CASES[name]
    whole = server.chat(**fields).json
    *events, last, done = server.chat(**fields, stream=True, stream_options={"include_usage": True}).events
    assert done == "[DONE]"
    assert last["usage"] == {name: value for name, value in whole["usage"].items() if value is not None}
    n = fields.get("n", 1)
    for index, event in enumerate(events[:n]):
        (first,) = event["choices"]
        assert first["index"] == index and first["delta"] == {"role": "assistant", "content": ""}
    head = events[0]
    for key in ("prompt_token_ids", "prompt_text"):
        assert head[key] == whole[key], key
    assert_same(head.get("prompt_logprobs"), whole["prompt_logprobs"])
    for choice in whole["choices"]:
        pieces = [piece for event in events for piece in event["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["delta"]["content"] for piece in pieces) == choice["message"]["content"]
        content = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert_same(content, (choice["logprobs"] or {}).get("content") or [])
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert pieces[-1]["stop_reason"] == choice["stop_reason"]


def test_usage_comes_only_when_asked_for_and_grows_when_continuous(server: Client) -> None:
    *events, _ = server.complete(stream=True).events
    assert all("usage" not in event for event in events)
    assert [("system_fingerprint" in event) for event in events] == [False] * (len(events) - 1) + [True]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = server.complete(stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 4


def test_an_error_before_the_first_event_has_a_status(server: Client) -> None:
    refused = server.complete(stream=True, prompt=[9999])
    assert refused.status == 400 and refused.error["param"] == "prompt"
    refused = server.complete(stream=True, logprobs=1000, max_tokens=200, n=1000)
    assert refused.status == 400 and "entries" in refused.error["message"]


# ---------------------------------------------------------------- readers


def open_stream(client: Client, path: str = "/v1/completions", **body: Any) -> Any:
    connection = client.connect()
    fields = {"prompt": "the way", "stream": True, "ignore_eos": True} | body
    connection.request("POST", path, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    return connection


def test_a_slow_reader_loses_nothing(server: Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "logprobs": 2, "n": 2, "seed": 3, "ignore_eos": True}
    whole = server.complete(**fields).json
    with contextlib.closing(open_stream(server, **fields)) as connection:
        response = connection.getresponse()
        data = response.read(200)
        time.sleep(0.5)
        data += response.read()
    *events, done = Answer(200, {}, data.decode()).events
    assert done == "[DONE]"
    joined = join_completion(events)
    for choice in whole["choices"]:
        assert_same(joined[choice["index"]]["logprobs"], choice["logprobs"])


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("prompt", ["the way", ["a", "b", "c"]], ids=["one prompt", "several"])
def test_a_client_that_goes_away_ends_all_that_it_started(server: Client, stream: bool, prompt: Any) -> None:
    server.wait_until_idle()
    before = server.metric("generation_tokens_total")
    aborted = server.metric("request_success_total", finished_reason="abort")
    connection = open_stream(server, prompt=prompt, n=4, max_tokens=200, stream=stream)
    if stream:
        connection.getresponse().read(10)
    else:
        while server.metric("generation_tokens_total") == before:
            time.sleep(0.02)
    connection.close()
    server.wait_until_closed()
    count = 1 if isinstance(prompt, str) else len(prompt)
    assert server.metric("request_success_total", finished_reason="abort") == aborted + count, "each request once"
    assert server.metric("generation_tokens_total") - before < count * 4 * 200
    assert server.get("/load").json == {"server_load": 0}
    assert server.metric("kv_cache_usage_perc") == 0


def test_a_client_that_goes_away_at_once_leaves_nothing(server: Client) -> None:
    for _ in range(5):
        open_stream(server, n=4, max_tokens=200).close()
    server.wait_until_closed()
    assert server.get("/load").json == {"server_load": 0}


def test_many_at_once_are_each_answered_as_if_alone(server: Client) -> None:
    alone = [server.complete(seed=seed, logprobs=1).json["choices"] for seed in range(4)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda i: server.complete(seed=i % 4, logprobs=1), range(100)))
    assert {answer.status for answer in answers} == {200}
    for i, answer in enumerate(answers):
        (choice,), (expected,) = answer.json["choices"], alone[i % 4]
        assert choice["text"] == expected["text"]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_full_queue_is_503_and_the_server_goes_on(server: Client) -> None:
    refused = server.complete(n=400, prompt=["a", "b"], max_tokens=1)
    assert refused.status == 503 and refused.headers["retry-after"] == "1"
    assert refused.error["type"] == "Service Unavailable" and refused.error["code"] == 503
    assert server.complete().status == 200
