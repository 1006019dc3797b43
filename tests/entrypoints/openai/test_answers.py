"""Whole answers of a running server: shapes, counts, and what the contract says of n, echo and scoring."""

from typing import Any

import pytest

from tests.entrypoints.openai.client import Client
from tests.entrypoints.openai.scored import ids_of_bytes, tiny_tokenizer

# fmt: off
COMPLETION_KEYS = [
    "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "kv_transfer_params",
    "ec_transfer_params", "metrics",
]
CHOICE_KEYS = [
    "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids",
    "routed_experts",
]
CHAT_KEYS = [
    "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage", "prompt_logprobs",
    "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics",
]
CHAT_CHOICE_KEYS = ["index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"]
MESSAGE_KEYS = ["role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"]
USAGE_KEYS = [
    "prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details",
]
# fmt: on


def test_a_completion_has_the_keys_of_the_real_server(server: Client) -> None:
    answer = server.complete(logprobs=1).json
    assert list(answer) == COMPLETION_KEYS and list(answer["choices"][0]) == CHOICE_KEYS
    assert list(answer["usage"]) == USAGE_KEYS
    assert list(answer["choices"][0]["logprobs"]) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion" and answer["model"] == "tiny"


def test_a_chat_answer_has_the_keys_of_the_real_server(server: Client) -> None:
    answer = server.chat(logprobs=True, top_logprobs=1).json
    assert list(answer) == CHAT_KEYS and list(answer["choices"][0]) == CHAT_CHOICE_KEYS
    assert list(answer["choices"][0]["message"]) == MESSAGE_KEYS
    (first, *_) = answer["choices"][0]["logprobs"]["content"]
    assert list(first) == ["token", "logprob", "bytes", "top_logprobs"]
    assert list(first["top_logprobs"][0]) == ["token", "logprob", "bytes"]


def test_several_prompts_and_n_are_indexed_prompt_by_prompt(server: Client) -> None:
    answer = server.complete(prompt=["the", "and of"], n=3, logprobs=0).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    lengths = [len(tiny_tokenizer().encode(text)) for text in ("the", "and of")]
    assert answer["usage"]["prompt_tokens"] == sum(lengths), "each prompt once"
    generated = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert answer["usage"]["completion_tokens"] == sum(generated)
    alone = [server.complete(prompt="and of", seed=7 + i).json["choices"][0]["text"] for i in range(3)]
    assert [choice["text"] for choice in answer["choices"][3:]] == alone


def test_greedy_with_n_gives_equal_choices_and_counts_them_all(server: Client) -> None:
    answer = server.complete(temperature=0, n=3, logprobs=1).json
    texts = {choice["text"] for choice in answer["choices"]}
    assert len(texts) == 1 and len(answer["choices"]) == 3
    assert answer["usage"]["completion_tokens"] == 12


def test_echo_scores_prompt_and_answer_in_one_row_of_lists(server: Client) -> None:
    token_ids = [1, *tiny_tokenizer().encode("the way 你")]
    answer = server.complete(prompt=token_ids, echo=True, logprobs=2).json
    (choice,) = answer["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    count = len(token_ids) + answer["usage"]["completion_tokens"]
    assert {len(values) for values in logprobs.values()} == {count}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert text.startswith("<|im_start|>the way 你")
    for i, (offset, token) in enumerate(zip(logprobs["text_offset"], logprobs["tokens"], strict=True)):
        if i < len(token_ids):
            assert text[offset : offset + len(token)] == token
    for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert value == next(iter(top.values())) and 2 <= len(top) <= 3
    assert len(choice["prompt_logprobs"]) == len(token_ids)


@pytest.mark.parametrize("echo", [False, True])
def test_max_tokens_0_scores_and_generates_nothing(server: Client, echo: bool) -> None:
    answer = server.complete(
        prompt=["the way", "of water"], echo=echo, logprobs=1, prompt_logprobs=1, max_tokens=0
    ).json
    assert answer["usage"]["completion_tokens"] == 0
    for choice, text in zip(answer["choices"], ("the way", "of water"), strict=True):
        count = len(tiny_tokenizer().encode(text))
        assert choice["text"] == (text if echo else "") and choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["tokens"]) == (count if echo else 0)
        assert len(choice["prompt_logprobs"]) == count and choice["prompt_logprobs"][0] is None


def test_max_tokens_0_takes_a_prompt_as_long_as_the_model_and_a_single_token(server: Client) -> None:
    answer = server.complete(prompt=[5] * 256, max_tokens=0, prompt_logprobs=0)
    assert answer.status == 200 and len(answer.json["choices"][0]["prompt_logprobs"]) == 256
    assert server.complete(prompt=[5], max_tokens=0).json["choices"][0]["finish_reason"] == "length"
    assert server.complete(prompt=[5] * 256, max_tokens=1).status == 400


def test_prompt_logprobs_start_where_the_request_says(server: Client) -> None:
    answer = server.complete(
        prompt=[5] * 20, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=12, echo=True, logprobs=0
    )
    choice = answer.json["choices"][0]
    assert [entry is None for entry in choice["prompt_logprobs"]] == [True] * 12 + [False] * 8
    assert [value is None for value in choice["logprobs"]["token_logprobs"]] == [True] * 12 + [False] * 8
    chat = server.chat(prompt_logprobs=0, prompt_logprobs_start=3).json
    assert [entry is None for entry in chat["prompt_logprobs"][:5]] == [True] * 3 + [False] * 2
    refused = server.complete(prompt=[5] * 20, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=21)
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt_logprobs_start")


def test_prompt_logprobs_name_the_actual_token_first(server: Client) -> None:
    token_ids = tiny_tokenizer().encode("the way of")
    scores = server.complete(prompt=token_ids, prompt_logprobs=2).json["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert [next(iter(position)) for position in scores[1:]] == [str(token_id) for token_id in token_ids[1:]]
    for position in scores[1:]:
        assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in position.values())
    chat = server.chat(prompt_logprobs=0, return_token_ids=True).json
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]


def test_best_of_answers_the_likeliest_and_counts_all(server: Client) -> None:
    every = server.complete(n=5, logprobs=0).json["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in every]
    best = server.complete(n=2, best_of=5).json
    order = sorted(range(5), key=lambda i: -sums[i])[:2]
    assert [choice["text"] for choice in best["choices"]] == [every[i]["text"] for i in order]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 20


def test_token_ids_are_told_when_asked_for(server: Client) -> None:
    token_ids = tiny_tokenizer().encode("the way")
    fields: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
    (choice,) = server.complete(prompt=token_ids, **fields).json["choices"]
    assert choice["prompt_token_ids"] == token_ids
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(next(iter(top)).startswith("token_id:") for top in choice["logprobs"]["top_logprobs"])


def test_given_ids_are_scored_in_place_of_the_most_likely(server: Client) -> None:
    ids = ids_of_bytes(b"zq")
    (choice,) = server.complete(logprobs=0, logprob_token_ids=ids, return_tokens_as_token_ids=True).json["choices"]
    for top in choice["logprobs"]["top_logprobs"]:
        assert {f"token_id:{token_id}" for token_id in ids} <= set(top) and 2 <= len(top) <= 3
    content = server.chat(logprobs=True, logprob_token_ids=ids).json["choices"][0]["logprobs"]["content"]
    assert all([bytes(top["bytes"]) for top in entry["top_logprobs"]] == [b"z", b"q"] for entry in content)


def test_the_whole_vocabulary_comes_once_each(server: Client) -> None:
    (choice,) = server.complete(logprobs=-1, max_tokens=2, return_tokens_as_token_ids=True).json["choices"]
    assert all(len(top) == 512 for top in choice["logprobs"]["top_logprobs"])
    (choice,) = server.complete(logprobs=-1, max_tokens=2).json["choices"]
    assert all(len(top) == 512 for top in choice["logprobs"]["top_logprobs"]), "none is overwritten"
    entry = server.chat(logprobs=True, top_logprobs=-1, max_tokens=1).json["choices"][0]["logprobs"]["content"][0]
    values = [top["logprob"] for top in entry["top_logprobs"]]
    assert len(values) == 512 and values == sorted(values, reverse=True)


def test_removed_tokens_are_the_floor_in_processed_logprobs(server: Client) -> None:
    fields: dict[str, Any] = {"logprobs": 3, "top_k": 2, "logprobs_mode": "processed_logprobs", "max_tokens": 2}
    for top in server.complete(**fields).json["choices"][0]["logprobs"]["top_logprobs"]:
        assert -9999.0 in top.values()


def test_a_stop_string_cuts_the_text_and_not_the_entries(server: Client) -> None:
    whole = server.complete(max_tokens=8, logprobs=0).json["choices"][0]
    text = whole["text"]
    place = len(text) // 2
    stop = text[place : place + 2]
    cut = server.complete(max_tokens=8, logprobs=0, stop=stop).json["choices"][0]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == stop
    assert cut["text"] == text[: text.index(stop)]
    count = len(cut["logprobs"]["tokens"])
    assert cut["logprobs"]["tokens"][: count - 1] == whole["logprobs"]["tokens"][: count - 1]
    assert cut["logprobs"]["text_offset"] == whole["logprobs"]["text_offset"][:count]


def test_a_chat_goes_on_with_its_last_message_and_echoes_it(server: Client) -> None:
    messages = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "the way"}]
    fields: dict[str, Any] = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plain = server.chat(**fields, return_prompt_text=True).json
    assert plain["prompt_text"].endswith("the way")
    echoed = server.chat(**fields, echo=True).json["choices"][0]["message"]
    assert echoed["content"] == "the way" + plain["choices"][0]["message"]["content"]
    assert echoed["role"] == "assistant"


def test_parts_of_a_message_read_as_one_text_and_images_are_refused(server: Client) -> None:
    parts = [{"type": "text", "text": "the way"}]
    plain = server.chat(temperature=0).json["choices"]
    assert server.chat(temperature=0, messages=[{"role": "user", "content": parts}]).json["choices"] == plain
    image = [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]
    refused = server.chat(messages=[{"role": "user", "content": image}])
    assert refused.status == 400 and refused.error["param"] == "messages" and "image_url" in refused.error["message"]


def test_a_prompt_is_cut_where_the_request_says(server: Client) -> None:
    fields: dict[str, Any] = {"prompt": [5, 6, 7, 8], "return_token_ids": True, "truncate_prompt_tokens": 2}
    assert server.complete(**fields).json["choices"][0]["prompt_token_ids"] == [7, 8]
    assert server.complete(**fields, truncation_side="right").json["choices"][0]["prompt_token_ids"] == [5, 6]


def test_tokens_and_texts_are_turned_into_each_other(server: Client) -> None:
    token_ids = tiny_tokenizer().encode("the way")
    answer = server.send("POST", "/tokenize", {"prompt": "the way", "return_token_strs": True}).json
    assert answer["tokens"] == token_ids and answer["count"] == len(token_ids) and answer["max_model_len"] == 256
    assert len(answer["token_strs"]) == len(token_ids)
    assert server.send("POST", "/detokenize", {"tokens": token_ids}).json == {"prompt": "the way"}
    messages = [{"role": "user", "content": "the way"}]
    chat = server.send("POST", "/tokenize", {"messages": messages}).json
    assert chat["count"] == server.chat().json["usage"]["prompt_tokens"]
    assert server.send("POST", "/detokenize", {"tokens": [-1]}).error["param"] == "tokens"
    assert server.send("POST", "/tokenize", {}).error["param"] == "prompt"
    info = server.get("/tokenizer_info").json
    assert info["eos_token"] == "<|im_end|>" and "messages" in info["chat_template"]


def test_models_are_listed_by_each_of_their_names(server: Client) -> None:
    listed = server.get("/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny-alias"]
    assert listed["data"][0]["max_model_len"] == 256
    assert server.get("/v1/models/org/tiny-alias").json["id"] == "org/tiny-alias"
    assert server.get("/v1/models/none").error["param"] == "model"
    assert server.complete(model="org/tiny-alias").json["model"] == "org/tiny-alias"


def test_an_answer_carries_the_clients_id(server: Client) -> None:
    assert server.complete(request_id="mine").json["id"] == "cmpl-mine"
    answer = server.send("POST", "/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "header"})
    assert answer.json["id"] == "cmpl-header"
