"""What trainers, harnesses and load generators send over HTTP, and which parts of the answers they read."""

import math
from typing import Any

import pytest

from tests.entrypoints.openai.client import Client


def test_a_trainers_rollouts(tiny_server: Client) -> None:
    """A trainer sends token ids, and reads ids and logprobs of equal length, prompt by prompt."""
    prompts = [[5, 6, 7], [8, 9], [10]]
    for num_logprobs in (0, 3):
        body: dict[str, Any] = {"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 5, "temperature": 1.0}
        body |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": num_logprobs}
        answer = tiny_server.complete(**body, return_token_ids=True, return_tokens_as_token_ids=True)
        assert answer.status == 200, answer.text
        choices = answer.json["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [p for p in prompts for _ in range(2)]
        for choice in choices:
            ids, logprobs = choice["token_ids"], choice["logprobs"]
            assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in ids]
            assert len(ids) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
            assert all(value <= 0 for value in logprobs["token_logprobs"])


def test_a_harness_scores_token_prompts(tiny_server: Client) -> None:
    """lm-eval's request: exactly one entry beyond the prompt, end token or not; greedy is float equality."""
    for token_id in (None, 2):
        bias = {} if token_id is None else {"logit_bias": {str(token_id): 100}}
        body: dict[str, Any] = {"model": "tiny", "prompt": [[1, 20, 30], [1, 40]], "temperature": 0, "max_tokens": 1}
        answer = tiny_server.complete(**body, **bias, logprobs=1, seed=1234, echo=True).json
        for choice, length in zip(answer["choices"], (3, 2), strict=True):
            logprobs = choice["logprobs"]
            assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == length + 1
            for value, top in list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]:
                assert value in top.values() and max(top.values()) >= value


def test_what_a_harness_probes(tiny_server: Client) -> None:
    assert tiny_server.get("/tokenizer_info").status == 200
    tokens = tiny_server.send("POST", "/tokenize", {"model": "tiny", "prompt": "the way"}).json["tokens"]
    text = tiny_server.send("POST", "/detokenize", {"model": "tiny", "tokens": tokens}).json["prompt"]
    assert text.endswith("the way")


def test_an_evaluator_reads_prompt_logprobs(tiny_server: Client) -> None:
    """inspect-ai takes the first JSON key of a position as the actual token, and every value as a finite number."""
    completion = tiny_server.complete(model="tiny", prompt=[7, 8, 9], prompt_logprobs=2).json["choices"][0]
    chat = tiny_server.chat(model="tiny", prompt_logprobs=2, return_token_ids=True).json
    for positions, ids in ((completion["prompt_logprobs"], [7, 8, 9]), (chat["prompt_logprobs"], None)):
        ids = chat["prompt_token_ids"] if ids is None else ids
        assert positions[0] is None and len(positions) == len(ids)
        assert [int(next(iter(entries))) for entries in positions[1:]] == ids[1:]
        assert all(math.isfinite(entry["logprob"]) for entries in positions[1:] for entry in entries.values())
    refused = tiny_server.complete(model="tiny", prompt=[5] * 1000)
    assert refused.status == 400 and "maximum context length" in refused.error["message"]


def test_a_load_generators_stream(tiny_server: Client) -> None:
    assert tiny_server.get("/health").status == 200
    name = tiny_server.get("/v1/models").json["data"][0]["id"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = tiny_server.complete(model=name, stream=True, logprobs=True, stream_options=options, ignore_eos=True)
    *events, done = streamed.events
    assert done == "[DONE]" and events[-1]["usage"]["completion_tokens"] == 4
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == sorted(
        event["usage"]["completion_tokens"] for event in events[:-1]
    )
    assert all(len(event["choices"][0]["logprobs"]["tokens"]) >= 1 for event in events[:-1])
    parts = [{"role": "user", "content": [{"type": "text", "text": "the way"}]}]
    body = {"model": name, "messages": parts, "stream": True, "stream_options": options, "max_tokens": 3}
    answer = tiny_server.send("POST", "/v1/chat/completions", body)
    assert answer.status == 200 and answer.events[-1] == "[DONE]"


@pytest.mark.parametrize("n", [1, 4])
def test_nulls_are_as_good_as_nothing(tiny_server: Client, n: int) -> None:
    nulls = dict.fromkeys(("stop", "logprobs", "best_of", "logit_bias", "user", "suffix"))
    assert len(tiny_server.complete(model="tiny", n=n, **nulls).json["choices"]) == n
