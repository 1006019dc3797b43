"""Logprobs as columns: the numbers of OpenAI's form, read by the reader that the documentation shows."""

import base64
import pathlib
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.entrypoints.openai.client import Client
from vllm.entrypoints.openai.columnar import ColumnarLogprobs
from vllm.entrypoints.openai.logprobs import FLOOR
from vllm.logprobs import FlatLogprobs

DOCS = pathlib.Path(__file__).parents[3] / "docs" / "logprobs.md"
ASK = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
NAMED = {"return_tokens_as_token_ids": True}
COLUMNAR = {"logprobs_format": "columnar"}


def read_columns(answer: dict[str, Any]) -> list[dict[int, float]]:
    (code,) = re.findall(r"```python\n(import base64.*?)```", DOCS.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict[str, Any] = {}
    exec(code, names)
    rows: list[dict[int, float]] = names["read_columns"](answer)
    return rows


def read_openai(lists: dict[str, Any]) -> list[dict[int, float]]:
    """Return completions' lists, asked for with token ids as names, as the reader of columns does."""
    return [
        {int(name.removeprefix("token_id:")): value for name, value in (top or {}).items()}
        for top in lists["top_logprobs"]
    ]


def assert_close(one: list[dict[int, float]], other: list[dict[int, float]]) -> None:
    assert [list(row) for row in one] == [list(row) for row in other]
    for mine, theirs in zip(one, other, strict=True):
        assert list(mine.values()) == pytest.approx(list(theirs.values()), abs=1e-4)


def choices_of(client: Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.send("POST", path, body)
    assert answer.status == 200, answer.text
    choices: list[dict[str, Any]] = answer.json["choices"]
    return choices


def make_scores() -> FlatLogprobs:
    ids = np.array([3, 1, 4, 2, 9], np.int32)
    values = np.array([-0.5, -np.inf, -1e30, -0.25, -2.0], np.float32)
    return FlatLogprobs.from_arrays(np.array([0, 2, 5]), ids, values, ids + 10, num_none=1)


def test_columns_hold_every_number_exactly() -> None:
    columns = msgspec.json.decode(ColumnarLogprobs.of(make_scores()).encode())
    assert columns["format"] == "columnar"
    assert np.frombuffer(base64.b64decode(columns["offsets"]), "<i8").tolist() == [0, 0, 2, 5]
    assert np.frombuffer(base64.b64decode(columns["ranks"]), "<i4").tolist() == [13, 11, 14, 12, 19]
    rows = read_columns(columns)
    assert rows == [{}, {3: -0.5, 1: -np.inf}, {4: float(np.float32(-1e30)), 2: -0.25, 9: -2.0}]
    assert rows[1][1] < FLOOR


def test_columns_of_two_parts_are_those_of_the_whole() -> None:
    scores = make_scores()
    first, second = (ColumnarLogprobs.of(part) for part in (scores[:2], scores[2:]))
    assert first.followed_by(second) == ColumnarLogprobs.of(scores)
    nothing = ColumnarLogprobs.of(FlatLogprobs())
    assert nothing.followed_by(first) == first == first.followed_by(nothing)


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"n": 2, "temperature": 0.7, "seed": 1}, {"logprobs": -1}])
def test_completions_say_the_same_in_columns(server: Client, more: dict[str, Any]) -> None:
    body = {**ASK, "logprobs": 2, "prompt_logprobs": 1, **more}
    plain = choices_of(server, "/v1/completions", {**body, **NAMED})
    columnar = choices_of(server, "/v1/completions", {**body, **COLUMNAR})
    for choice, columns in zip(plain, columnar, strict=True):
        assert columns["text"] == choice["text"]
        assert_close(read_columns(columns["logprobs"]), read_openai(choice["logprobs"]))
        prompt = [
            {int(token_id): entry["logprob"] for token_id, entry in (position or {}).items()}
            for position in choice["prompt_logprobs"]
        ]
        assert_close(read_columns(columns["prompt_logprobs"]), prompt)


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"n": 2, "temperature": 0.7, "seed": 1}])
def test_streamed_columns_joined_are_the_whole(server: Client, more: dict[str, Any]) -> None:
    body = {**ASK, **COLUMNAR, "logprobs": 2, **more}
    whole = choices_of(server, "/v1/completions", body)
    answer = server.send("POST", "/v1/completions", {**body, "stream": True})
    joined: dict[int, list[dict[int, float]]] = {}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            joined.setdefault(choice["index"], []).extend(read_columns(choice["logprobs"]))
    for choice in whole:
        assert_close(joined[choice["index"]], read_columns(choice["logprobs"]))


@pytest.mark.parametrize("streams", [False, True])
def test_chat_says_the_same_in_columns(server: Client, streams: bool) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0, "ignore_eos": True, "stream": streams}
    answers = []
    for extra in (NAMED, COLUMNAR):
        answer = server.send("POST", "/v1/chat/completions", {**body, **extra})
        assert answer.status == 200, answer.text
        answers.append(answer.events[:-1] if streams else [answer.json])
    plain, columnar = ([choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
                       for events in answers)  # fmt: skip
    entries = [entry for part in plain for entry in part["content"]]
    rows = [row for part in columnar for row in read_columns(part)]
    assert len(rows) == len(entries) == 4
    for row, entry in zip(rows, entries, strict=True):
        assert next(iter(row)) == int(entry["token"].removeprefix("token_id:"))
        assert next(iter(row.values())) == pytest.approx(entry["logprob"], abs=1e-4)
        listed = {int(top["token"].removeprefix("token_id:")) for top in entry["top_logprobs"]}
        assert listed <= set(row)
    prompts = [event["prompt_logprobs"] for event in answers[1] if event.get("prompt_logprobs")]
    assert len(prompts) == 1 and read_columns(prompts[0])[0] == {}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_format_is_refused_by_name(server: Client, path: str) -> None:
    body = {**ASK, "messages": [{"role": "user", "content": "hi"}], "logprobs_format": "arrow"}
    answer = server.send("POST", path, body)
    assert answer.status == 400 and answer.error["param"] == "logprobs_format"
    assert "openai, columnar" in answer.error["message"] and "'arrow'" in answer.error["message"]
    assert server.send("POST", path, {**body, "logprobs_format": 3}).status == 400
    assert server.send("POST", path, {**body, "logprobs_format": None}).status == 200


def test_nothing_asked_gives_no_columns(server: Client) -> None:
    (choice,) = choices_of(server, "/v1/completions", {**ASK, **COLUMNAR})
    assert choice["logprobs"] is None and choice["prompt_logprobs"] is None
