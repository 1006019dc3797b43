"""POST /v1/score/continuations and /generative_scoring."""

import json
import math
import pathlib
from typing import Any

import pytest
import torch

from tests.entrypoints.openai.client import Answer, Client
from tests.tiny_models import load_tiny_reference


def score(server: Client, contexts: Any, continuations: Any, **body: Any) -> Answer:
    body = {"contexts": contexts, "continuations": continuations} | body
    return server.send("POST", "/v1/score/continuations", body)


def compare(server: Client, **body: Any) -> Answer:
    return server.send("POST", "/generative_scoring", body)


@torch.inference_mode()
def compute_rows(folder: pathlib.Path, token_ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(load_tiny_reference(folder)(torch.tensor([token_ids])).logits[0].double(), -1)


def encode(server: Client, text: str) -> list[int]:
    tokens: list[int] = server.send("POST", "/tokenize", {"prompt": text}).json["tokens"]
    return tokens


CONTEXTS = ["the way they ", [5, 6, 7, *range(20, 60)], [5, 6, 7, *range(20, 59), 300]]
CONTINUATIONS = [["look", "said one"], [[9], [10, 11], [9]], [[12, 13, 14]]]


def test_continuations_have_the_reference_s_values(server: Client, tiny_model: pathlib.Path) -> None:
    answer = score(server, CONTEXTS, CONTINUATIONS).json
    assert (answer["object"], answer["model"], answer["id"][:6]) == ("list", "tiny", "score-")
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    num_tokens = 0
    for context, row, given in zip(CONTEXTS, answer["data"], CONTINUATIONS, strict=True):
        assert [entry["index"] for entry in row["scores"]] == list(range(len(given)))
        context_ids = encode(server, context.rstrip()) if isinstance(context, str) else context
        num_tokens += len(context_ids)
        for continuation, entry in zip(given, row["scores"], strict=True):
            ids = continuation
            if isinstance(context, str):
                ids = encode(server, context + continuation)[len(context_ids) :]
                assert entry["num_bytes"] == len(continuation)
            num_tokens += len(ids)
            rows = compute_rows(tiny_model, [*context_ids, *ids])[len(context_ids) - 1 : -1]
            want = [rows[i, token].item() for i, token in enumerate(ids)]
            assert entry["token_ids"] == ids and entry["logprobs"] == pytest.approx(want, abs=1e-4)
            assert entry["logprob"] == pytest.approx(sum(want), abs=1e-3)
            assert entry["is_greedy"] == (rows.argmax(-1).tolist() == ids) == all(r == 1 for r in entry["ranks"])
            assert entry["num_context_tokens"] == len(context_ids) and entry["num_cut_context_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
    assert answer["usage"]["completion_tokens"] == 0


def test_single_tokens_can_be_left_out_and_cuts_are_told(server: Client) -> None:
    row = score(server, [[5] * 300], [[[6, 7]]], return_tokens=False).json["data"][0]["scores"][0]
    assert "token_ids" not in row and "logprobs" not in row and row["num_cut_context_tokens"] == 46


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"contexts": "a"}, "contexts", "must be a list"),
        ({"contexts": []}, "contexts", "at least one"),
        ({"contexts": [5]}, "contexts", "contexts[0]"),
        ({"contexts": ["a", [True]]}, "contexts", "contexts[1]"),
        ({"contexts": ["a"] * 1025}, "contexts", "at most 1024"),
        ({"continuations": ["b"]}, "continuations", "continuations[0]"),
        ({"continuations": [[]]}, "continuations", "continuations[0]"),
        ({"continuations": [["b", 5]]}, "continuations", "continuations[0][1]"),
        ({"continuations": [["b"], ["c"]]}, "continuations", "1 contexts, 2 lists"),
        ({"continuations": [["b", ""]]}, "continuations", "continuations[0][1] is empty"),
        ({"continuations": [["b", [9999]]]}, "continuations", "from 0 to 511"),
        ({"continuations": [["b"] * 1025]}, "continuations", "at most 1024"),
        ({"contexts": [[5, -1]]}, "contexts", "from 0 to 511"),
        ({"tokenization": "both"}, "body.tokenization", "joint"),
        ({"cache_salt": ""}, "cache_salt", "empty"),
        ({"priority": 3}, "priority", "scheduling policy"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ],
)
def test_what_breaks_a_rule_is_refused_before_anything_is_scheduled(
    server: Client, body: dict[str, Any], param: str, message: str
) -> None:
    before = server.metric("prompt_tokens_total")
    answer = score(server, **({"contexts": ["a"], "continuations": [["b"]]} | body))
    assert (answer.status, answer.error["param"]) == (400, param), answer.text
    assert message in answer.error["message"]
    assert server.metric("prompt_tokens_total") == before


def test_missing_fields_unknown_models_and_full_queues(server: Client) -> None:
    answer = server.send("POST", "/v1/score/continuations", {"contexts": ["a"]})
    assert (answer.status, answer.error["param"]) == (400, "body.continuations")
    assert score(server, ["a"], [["b"]], model="other").status == 404
    many = [[3 + i % 500, i // 500 + 3] for i in range(1000)]
    full = score(server, many, [[[7]]] * 1000)
    assert full.status == 503 and "retry-after" in full.headers
    assert score(server, ["the"], [[" one"]]).status == 200


def test_labels_are_compared_among_themselves_or_over_the_vocabulary(server: Client, tiny_model: pathlib.Path) -> None:
    ids = [9, 300, 77]
    body = {"query": "the way ", "items": ["they", "all said"], "label_token_ids": ids}
    for changes, softmax, item_first in (
        ({}, True, False),
        ({"apply_softmax": False, "item_first": True}, False, True),
    ):
        answer = compare(server, **body, **changes).json
        num_tokens = 0
        for item, entry in zip(body["items"], answer["data"], strict=True):
            text = item + "the way " if item_first else "the way " + item
            token_ids = encode(server, text)
            num_tokens += len(token_ids)
            row = compute_rows(tiny_model, token_ids)[-1][torch.tensor(ids)]
            normalised = torch.log_softmax(row, -1)
            assert entry["score"] == pytest.approx((normalised if softmax else row)[0].exp().item(), abs=1e-4)
            labels = entry["labels"]
            assert [label["token_id"] for label in labels] == ids
            assert [label["logprob"] for label in labels] == pytest.approx(row.tolist(), abs=1e-4)
            assert [label["normalized_logprob"] for label in labels] == pytest.approx(normalised.tolist(), abs=1e-4)
        assert answer["usage"]["prompt_tokens"] == num_tokens
        assert [entry["object"] for entry in answer["data"]] == ["score", "score"]


def test_labels_as_texts_and_prompts_as_token_ids(server: Client) -> None:
    (the,) = encode(server, " the")
    by_text = compare(server, query=[5, 6], items=[[7], [8, 9]], labels=[" the", " one"]).json["data"]
    assert by_text[0]["labels"][0] | {"logprob": 0, "normalized_logprob": 0, "rank": 0} == {
        "label": " the",
        "token_id": the,
        "logprob": 0,
        "normalized_logprob": 0,
        "rank": 0,
    }
    total = sum(math.exp(label["normalized_logprob"]) for label in by_text[1]["labels"])
    assert total == pytest.approx(1)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"labels": [" the", " xyzzy", "qqq"]}, "labels", "qqq"),
        ({"labels": [" the"], "label_token_ids": [5]}, "label_token_ids", "exactly one"),
        ({}, "label_token_ids", "exactly one"),
        ({"label_token_ids": []}, "label_token_ids", "at least one"),
        ({"label_token_ids": [5, 512]}, "label_token_ids", "from 0 to 511"),
        ({"label_token_ids": [5, 5]}, "label_token_ids", "same token"),
        ({"label_token_ids": list(range(3, 132))}, "label_token_ids", "at most 128"),
        ({"label_token_ids": [5], "items": []}, "items", "at least one"),
        ({"label_token_ids": [5], "items": [[5]]}, "items", "both be strings"),
        ({"label_token_ids": [5], "items": ["a " * 400]}, "items", "maximum context length"),
        ({"label_token_ids": [5], "items": [""], "query": ""}, "items", "both empty"),
    ],
)
def test_labels_that_can_t_be_compared_are_refused(
    server: Client, body: dict[str, Any], param: str, message: str
) -> None:
    answer = compare(server, **({"query": "a", "items": ["b"]} | body))
    assert (answer.status, answer.error["param"]) == (400, param), answer.text
    assert message in answer.error["message"]


def test_the_routes_are_described(server: Client) -> None:
    document = server.get("/openapi.json").json
    for path, name in (
        ("/v1/score/continuations", "ScoreContinuationsRequest"),
        ("/generative_scoring", "GenerativeScoringRequest"),
    ):
        assert name in json.dumps(document["paths"][path]["post"])
        assert "add_special_tokens" in document["components"]["schemas"][name]["properties"]
