"""Offline `decoded_token` and HTTP's tokens and bytes are one: the same request, asked both ways, says the same."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.entrypoints.openai.client import Client
from vllm import LLM, RequestOutput, SamplingParams
from vllm.logprobs import LogprobsOnePosition

BYTE = 3  # the id of byte 0 in the tiny tokenizer
PARTS = [BYTE + byte for byte in "😀é你".encode()]  # no whole character among them
WAY = "the way"

CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 12},
    "whole vocabulary": {"max_tokens": 4, "logprobs": -1},
    "cut inside a character": {"max_tokens": 5, "allowed_token_ids": PARTS},
    "cut after one byte": {"max_tokens": 1, "allowed_token_ids": [BYTE + 0xF0, BYTE + 0xE4]},
    "bytes that complete nothing": {"max_tokens": 9, "allowed_token_ids": [BYTE + 0x80, BYTE + 0xF0, BYTE + 97]},
    "a prompt that ends inside a character": {"prompt": [300, BYTE + 0xF0, BYTE + 0x9F], "allowed_token_ids": PARTS},
    "cut by a stop string": {"max_tokens": 40, "stop": ["e", "on", "�"]},
    "cut by a stop string that is kept": {"max_tokens": 40, "stop": ["e"], "include_stop_str_in_output": True},
    "a stop token inside a character": {
        "stop_token_ids": [BYTE + 0x9F],
        "allowed_token_ids": [BYTE + 0xF0, BYTE + 0x9F],
    },
    "special tokens": {"allowed_token_ids": [0, 1, 2, BYTE + 0xF0, BYTE + 97], "ignore_eos": True, "max_tokens": 9},
    "special tokens shown": {
        "allowed_token_ids": [0, 1, 2, BYTE + 0xF0, BYTE + 97],
        "ignore_eos": True,
        "max_tokens": 9,
        "skip_special_tokens": False,
    },
    "given ids": {"logprobs": 0, "logprob_token_ids": [BYTE + 0x98, 300, BYTE + 97], "allowed_token_ids": PARTS},
    "n": {"n": 3, "allowed_token_ids": PARTS, "max_tokens": 6},
    "greedy n": {"n": 2, "temperature": 0, "allowed_token_ids": PARTS},
    "only scored": {"prompt": [300, BYTE + 0xF0, BYTE + 0x9F], "max_tokens": 0},
    "a prompt with special tokens": {"prompt": [1, BYTE + 0xE4, 2, BYTE + 0xBD, BYTE + 0xA0, 300], "max_tokens": 2},
}


@pytest.fixture(scope="module")
def llm(tiny_model: pathlib.Path) -> Iterator[LLM]:
    yield LLM(str(tiny_model), max_model_len=256, max_logprobs=-1)


def prepare(name: str) -> dict[str, Any]:
    return {"prompt": WAY, "max_tokens": 6, "seed": 11, "temperature": 1.0, "logprobs": 3} | CASES[name]


def ask_offline(llm: LLM, fields: dict[str, Any]) -> RequestOutput:
    fields = {"prompt_logprobs": 2} | fields
    prompt = fields.pop("prompt")
    given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else {"prompt": prompt}
    (output,) = llm.generate([given], SamplingParams(**fields), use_tqdm=False)
    return output


def texts_of(positions: Any) -> list[dict[int, str]]:
    """Return each position's texts by id, the chosen token first."""
    return [{token_id: entry.decoded_token for token_id, entry in (position or {}).items()} for position in positions]


def join_lists(pieces: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}


def ask_completion(server: Client, fields: dict[str, Any], is_streamed: bool) -> list[Any]:
    """Return (text, lists, prompt_logprobs) of each choice."""
    answer = server.complete(**{"prompt_logprobs": 2} | fields, stream=is_streamed)
    assert answer.status == 200, answer.text
    if not is_streamed:
        choices = answer.json["choices"]
        return [(choice["text"], choice["logprobs"], choice["prompt_logprobs"]) for choice in choices]
    pieces = [piece for event in answer.events[:-1] for piece in event["choices"]]
    found = []
    for index in range(fields.get("n", 1)):
        own = [piece for piece in pieces if piece["index"] == index]
        text = "".join(piece["text"] for piece in own)
        found.append((text, join_lists([piece["logprobs"] for piece in own]), own[0]["prompt_logprobs"]))
    return found


def name_as_a_map(position: LogprobsOnePosition) -> list[str]:
    """Return the names of a position in a completion's map: the first of a text has it, the others go by their ids."""
    names: list[str] = []
    for token_id, entry in position.items():
        names.append(f"token_id:{token_id}" if entry.decoded_token in names else entry.decoded_token or "")
    return names


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CASES)
def test_a_completion_s_tokens_are_the_decoded_tokens(llm: LLM, server: Client, name: str, is_streamed: bool) -> None:
    fields = prepare(name)
    offline = ask_offline(llm, fields)
    prompt_texts = [{str(i): text for i, text in texts.items()} for texts in texts_of(offline.prompt_logprobs)]
    answers = ask_completion(server, fields, is_streamed)
    for completion, (text, lists, prompt_logprobs) in zip(offline.outputs, answers, strict=True):
        assert text == completion.text
        assert lists["tokens"] == [next(iter(texts.values())) for texts in texts_of(completion.logprobs)]
        assert [list(top) for top in lists["top_logprobs"]] == list(map(name_as_a_map, completion.logprobs))
        reported = [{i: entry["decoded_token"] for i, entry in (place or {}).items()} for place in prompt_logprobs]
        assert reported == prompt_texts


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [name for name in CASES if "prompt" not in CASES[name]])
def test_a_chat_s_tokens_are_the_decoded_tokens_and_their_bytes_make_the_text(
    llm: LLM, server: Client, name: str, is_streamed: bool
) -> None:
    fields = prepare(name)
    k = fields.pop("logprobs")
    messages = [{"role": "user", "content": fields.pop("prompt")}]
    (offline,) = llm.chat(messages, SamplingParams(logprobs=k, **fields), use_tqdm=False)  # type: ignore[arg-type]
    answer = server.chat(messages=messages, logprobs=True, top_logprobs=k, **fields, stream=is_streamed)
    assert answer.status == 200, answer.text
    choices = [piece for event in (answer.events[:-1] if is_streamed else [answer.json]) for piece in event["choices"]]
    for completion in offline.outputs:
        own = [choice for choice in choices if choice["index"] == completion.index]
        entries = [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        texts = texts_of(completion.logprobs)
        assert [entry["token"] for entry in entries] == [next(iter(position.values())) for position in texts]
        tokenizer = llm.llm_engine.tokenizer
        for entry, position in zip(entries, texts, strict=True):
            true_bytes = {token_id: list(tokenizer.token_bytes[token_id]) for token_id in position}
            listed = [(top["token"], top["bytes"]) for top in entry["top_logprobs"]]
            known = [(text, true_bytes[token_id]) for token_id, text in position.items()]
            assert entry["bytes"] == known[0][1]
            assert all(pair in known for pair in listed) and len(listed) >= len(known) - 1
        hidden = tokenizer.all_special_ids if fields.get("skip_special_tokens", True) else frozenset()
        ends = completion.finish_reason == "length"
        if ends and completion.token_ids[-1] not in hidden:
            shown = [i for i, token_id in enumerate(completion.token_ids) if token_id not in hidden]
            assert "".join(entries[i]["token"] for i in shown) == completion.text
            joined = b"".join(bytes(entries[i]["bytes"]) for i in shown)
            assert joined.decode("utf-8", "replace") == completion.text


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize(
    "prompt", [[300, BYTE + 0xF0, BYTE + 0x9F], [1, BYTE + 0xE4, 2, BYTE + 0xBD], [300, 2]], ids=str
)
def test_an_echo_s_tokens_are_the_decoded_tokens_of_a_text_that_shows_special_tokens(
    llm: LLM, server: Client, prompt: list[int], max_tokens: int
) -> None:
    fields = prepare("plain") | {"prompt": prompt, "max_tokens": max_tokens, "skip_special_tokens": False}
    offline = ask_offline(llm, fields)
    expected = [next(iter(texts.values())) for texts in texts_of(offline.prompt_logprobs)[1:]]
    choice = server.complete(**fields, echo=True).json["choices"][0]
    lists = choice["logprobs"]
    assert lists["tokens"][1 : len(prompt)] == expected
    assert choice["text"] == "".join(lists["tokens"]), "each character stands in one token, and none stands twice"
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


def test_a_sequence_of_no_tokens_has_no_text_and_its_prompt_s_last_token_shows_the_cut(llm: LLM) -> None:
    """Without a token after it nothing completes the prompt's last character; the prompt's end is not the answer's."""
    offline = ask_offline(llm, prepare("only scored"))
    assert offline.outputs[0].text == "" and offline.outputs[0].finish_reason == "length"
    assert [next(iter(texts.values())) for texts in texts_of(offline.prompt_logprobs)[1:]] == ["", "�"]
    continued = ask_offline(llm, prepare("only scored") | {"max_tokens": 1, "allowed_token_ids": [BYTE + 97]})
    assert [next(iter(texts.values())) for texts in texts_of(continued.prompt_logprobs)[1:]] == ["", ""]
    assert continued.outputs[0].text == "�a"
