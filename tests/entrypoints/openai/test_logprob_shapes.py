"""OpenAI's shapes, made of scored rows."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.entrypoints.openai.scored import ids_of_bytes, make_rows, tiny_tokenizer
from vllm.entrypoints.openai.echo import EchoedPrompt
from vllm.entrypoints.openai.logprobs import FLOOR, SequenceLogprobs, make_finite, write_prompt_logprobs
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.detokenizer import make_detokenizer
from vllm.v1.engine.logprobs import make_token_texts

EOS = 2


def as_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


class Written:
    """A generated sequence as the engine gives it out, piece by piece, and the writer of its entries."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams, *, as_token_ids: bool = False
    ) -> None:
        self.token_ids: list[int] = []
        self.texts = make_token_texts(tokenizer, self.token_ids, params, context=prompt)
        hidden_ids = tokenizer.all_special_ids if params.skip_special_tokens else ()
        self.writer = SequenceLogprobs(params, as_token_ids=as_token_ids, vocab_size=512, hidden_ids=hidden_ids)

    def take(self, rows: list[list[tuple[int, float, int]]], finish_reason: str | None) -> tuple[list[int], Any]:
        first_row = len(self.token_ids)
        new_ids = [row[0][0] for row in rows]
        self.token_ids += new_ids
        if finish_reason == "length":
            self.texts.end()
        return new_ids, make_rows(rows).with_text(self.texts, first_row)


def make_writer(prompt: list[int] | None = None, *, as_token_ids: bool = False, **params: Any) -> Written:
    params = {"logprobs": 2, "temperature": 0.5} | params
    prompt = prompt or ids_of_bytes(b"x")
    return Written(tiny_tokenizer(), prompt, SamplingParams(**params), as_token_ids=as_token_ids)


def completion(written: Written, rows: list[list[tuple[int, float, int]]], **end: Any) -> Any:
    end = {"finish_reason": None, "stop_reason": None} | end
    return as_json(written.writer.write_completion(*written.take(rows, end["finish_reason"]), **end))


def chat(written: Written, rows: list[list[tuple[int, float, int]]], finish_reason: str | None = None) -> Any:
    return as_json(written.writer.write_chat(*written.take(rows, finish_reason)))


A, B, C, D = ids_of_bytes(b"abcd")


def test_completion_lists_are_parallel_and_the_chosen_token_stands_first_in_the_map() -> None:
    lists = completion(make_writer(), [[(A, -3.0, 9), (B, -0.5, 1), (C, -1.0, 2)], [(B, -0.25, 1), (C, -2.0, 2)]])
    assert lists == {
        "text_offset": [0, 1],
        "token_logprobs": [-3.0, -0.25],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -3.0, "b": -0.5, "c": -1.0}, {"b": -0.25, "c": -2.0}],
    }
    assert list(lists["top_logprobs"][0]) == ["a", "b", "c"]


def test_tokens_with_the_same_text_never_overwrite_each_other() -> None:
    """Parts of characters all read as "": the chosen one keeps the string, then the likelier."""
    first, second, third = ids_of_bytes(b"\xf0\xe2\xc3")
    (top,) = completion(make_writer(), [[(second, -2.0, 3), (first, -0.1, 1), (third, -1.0, 2)]])["top_logprobs"]
    assert top == {"": -2.0, f"token_id:{first}": np.float32(-0.1), f"token_id:{third}": -1.0}


def test_minus_infinity_and_nan_never_leave() -> None:
    values = make_finite(np.array([-math.inf, math.nan, -20000.0, -1.0, math.inf], np.float32))
    assert values[:4].tolist() == [FLOOR, FLOOR, FLOOR, -1.0] and np.isfinite(values).all()
    lists = completion(make_writer(), [[(A, -math.inf, 5), (B, math.nan, 6)]])
    assert lists["token_logprobs"] == [FLOOR] and lists["top_logprobs"] == [{"a": FLOOR, "b": FLOOR}]


def test_offsets_do_not_move_at_a_hidden_token_and_do_not_depend_on_names() -> None:
    rows = [[(A, -1.0, 1)], [(EOS, -1.0, 1)], [(B, -1.0, 1)]]
    plain = completion(make_writer(), rows)
    assert plain["tokens"] == ["a", "<|im_end|>", "b"] and plain["text_offset"] == [0, 1, 1]
    named = completion(make_writer(as_token_ids=True), rows)
    assert named["text_offset"] == plain["text_offset"]
    assert named["tokens"] == [f"token_id:{i}" for i in (A, EOS, B)]
    assert list(named["top_logprobs"][0]) == [f"token_id:{A}"]
    shown = completion(make_writer(skip_special_tokens=False), rows)
    assert shown["text_offset"] == [0, 1, 1 + len("<|im_end|>")]


def test_a_stop_token_is_hidden_wherever_the_text_hides_it() -> None:
    rows = [[(A, -1.0, 1)], [(B, -1.0, 1)]]
    writer = make_writer()
    completion(writer, rows, finish_reason="stop", stop_reason=B)
    assert completion(writer, [[(C, -1.0, 1)]])["text_offset"] == [1]
    writer = make_writer(include_stop_str_in_output=True)
    completion(writer, rows, finish_reason="stop", stop_reason=B)
    assert completion(writer, [[(C, -1.0, 1)]])["text_offset"] == [2]


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it() -> None:
    rows = [[(token_id, -1.0, 1)] for token_id in ids_of_bytes("é😀".encode())]
    entries = chat(make_writer(), rows)
    assert [entry["token"] for entry in entries] == ["", "é", "", "", "", "😀"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "é😀"
    assert completion(make_writer(), rows)["text_offset"] == [0, 0, 1, 1, 1, 1]


def test_a_prompt_that_ends_inside_a_character_is_completed_by_the_answer() -> None:
    start, end = ids_of_bytes("é".encode())
    (entry,) = chat(make_writer([start]), [[(end, -1.0, 1)]])
    assert entry["token"] == "é" and entry["bytes"] == list("é".encode()[1:])


def test_a_character_that_the_length_cuts_shows_as_one_replacement_in_the_last_token() -> None:
    rows = [[(token_id, -1.0, 1), (A, -2.0, 2)] for token_id in ids_of_bytes("😀".encode()[:2])]
    lists = completion(make_writer(), rows, finish_reason="length")
    assert lists["tokens"] == ["", "�"] and list(lists["top_logprobs"][1]) == ["�", "�a"]
    assert [entry["token"] for entry in chat(make_writer(), rows, "length")] == ["", "�"]
    assert completion(make_writer(), rows)["tokens"] == ["", ""], "nothing is cut while the sequence runs"


@pytest.mark.parametrize(
    ("chosen", "listed"),
    [((A, -0.1, 1), [A, B]), ((B, -0.5, 2), [A, B]), ((C, -3.0, 7), [A, B])],
    ids=["most likely", "second", "outside"],
)
def test_chat_lists_the_k_most_likely_in_falling_order(chosen: tuple[int, float, int], listed: list[int]) -> None:
    others = [entry for entry in ((A, -0.1, 1), (B, -0.5, 2)) if entry[0] != chosen[0]]
    (entry,) = chat(make_writer(logprobs=2), [[chosen, *others]])
    assert entry["bytes"] == list(tiny_tokenizer().token_bytes[chosen[0]])
    assert [bytes(top["bytes"]) for top in entry["top_logprobs"]] == [tiny_tokenizer().token_bytes[i] for i in listed]
    assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([-0.1, -0.5])


def test_chat_without_alternatives_has_an_empty_list() -> None:
    (entry,) = chat(make_writer(logprobs=0), [[(A, -0.1, 1)]])
    assert entry["top_logprobs"] == [] and entry["logprob"] == pytest.approx(-0.1)


def test_chat_names_tokens_by_id_and_keeps_their_true_bytes() -> None:
    (entry,) = chat(make_writer(as_token_ids=True), [[(A, -2.0, 2), (B, -0.1, 1)]])
    assert entry["token"] == f"token_id:{A}" and entry["bytes"] == [97]
    assert [(top["token"], top["bytes"]) for top in entry["top_logprobs"]] == [
        (f"token_id:{B}", [98]),
        (f"token_id:{A}", [97]),
    ]


def test_given_ids_stand_in_their_own_order_in_place_of_the_most_likely() -> None:
    writer = make_writer(logprobs=0, logprob_token_ids=[D, A, B])
    (entry,) = chat(writer, [[(A, -0.1, 1), (D, -9.0, 40), (B, -4.0, 11)]])
    assert [top["token"] for top in entry["top_logprobs"]] == ["d", "a", "b"]
    (entry,) = chat(writer, [[(C, -0.1, 1), (D, -9.0, 40), (A, -5.0, 12), (B, -4.0, 11)]])
    assert [top["token"] for top in entry["top_logprobs"]] == ["d", "a", "b"]


def test_prompt_logprobs_are_maps_by_id_with_the_actual_token_first() -> None:
    scores = make_rows([[(300, -3.0, 9), (5, -math.inf, 500)]], num_none=1)
    first, second = as_json(write_prompt_logprobs(scores, 2))
    assert first is None and list(second) == ["300", "5"]
    assert second["300"] == {"logprob": -3.0, "rank": 9, "decoded_token": None}
    assert second["5"]["logprob"] == FLOOR


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 511), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 3), max_size=12),
    skip=st.booleans(),
    prompt=st.lists(st.integers(0, 511), min_size=1, max_size=4),
)
def test_pieces_joined_are_the_whole(tokens: list[int], cuts: list[int], skip: bool, prompt: list[int]) -> None:
    """However a stream is cut, its entries are those of the answer in one piece."""
    rows = [[(token_id, -1.0, 2), ((token_id + 7) % 512, -0.5, 1)] for token_id in tokens]
    pieces, first = [], 0
    for length in [*cuts, len(tokens)]:
        pieces.append(rows[first : first + length])
        first += length
    pieces = [piece for piece in pieces if piece]
    writer, other = (make_writer(prompt, skip_special_tokens=skip) for _ in range(2))
    joined: dict[str, list[Any]] = {}
    chats: list[Any] = []
    for place, piece in enumerate(pieces):
        reason = "length" if place == len(pieces) - 1 else None
        for name, values in completion(writer, piece, finish_reason=reason).items():
            joined.setdefault(name, []).extend(values)
        chats += chat(other, piece, reason)
    assert joined == completion(make_writer(prompt, skip_special_tokens=skip), rows, finish_reason="length")
    assert chats == chat(make_writer(prompt, skip_special_tokens=skip), rows, "length")
    assert joined["text_offset"] == sorted(joined["text_offset"])


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["byte_level", "metaspace"]),
    prompt=st.lists(st.integers(0, 511), min_size=1, max_size=4),
    tokens=st.lists(st.integers(0, 511), min_size=1, max_size=10),
    skip=st.booleans(),
    stops=st.booleans(),
)
def test_shown_tokens_stand_in_the_text_and_their_bytes_make_it(
    kind: str, prompt: list[int], tokens: list[int], skip: bool, stops: bool
) -> None:
    """The text is the engine's own, from the detokenizer; the entries say where each token stands in it."""
    tokenizer = tiny_tokenizer(kind)
    params = SamplingParams(logprobs=0, skip_special_tokens=skip)
    detokenizer = make_detokenizer(tokenizer, prompt, params)
    detokenizer.update(tokens, stop_terminated=stops)
    text = detokenizer.take_new_text(finished=True, delta=False)
    reason = "stop" if stops else "length"
    rows = [[(token_id, -1.0, 1)] for token_id in tokens]
    lists = completion(Written(tokenizer, prompt, params), rows, finish_reason=reason)
    entries = chat(Written(tokenizer, prompt, params), rows, reason)
    assert [entry["token"] for entry in entries] == lists["tokens"]
    hidden = tokenizer.token_bytes.special_ids if skip else frozenset()
    shown = [i for i, token_id in enumerate(tokens) if token_id not in hidden and not (stops and i == len(tokens) - 1)]
    for i in shown:
        offset, token = lists["text_offset"][i], lists["tokens"][i]
        assert text[offset : offset + len(token)] == token
    if not stops and shown and shown[-1] == len(tokens) - 1:
        assert "".join(lists["tokens"][i] for i in shown) == text
    pending = tokenizer.token_bytes.shown(skip).pending_bytes(prompt)
    assert (pending + b"".join(bytes(entries[i]["bytes"]) for i in shown)).decode("utf-8", "replace") == text


# ---------------------------------------------------------------- echo


def test_an_echo_of_token_ids_shows_its_special_tokens() -> None:
    token_ids = [1, *ids_of_bytes(b"hi"), 2]
    echo = EchoedPrompt(tiny_tokenizer(), token_ids, None, is_whole=False)
    assert echo.text == "<|im_start|>hi<|im_end|>"
    scores = make_rows([[(token_id, -1.0, 1)] for token_id in token_ids[1:]], num_none=1)
    lists = as_json(echo.write(scores, as_token_ids=False, max_entries=1))
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert lists["tokens"] == ["<|im_start|>", "h", "i", "<|im_end|>"]
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert echo.text[offset : offset + len(token)] == token


def test_an_echo_of_a_text_hides_what_the_tokenizer_put_around_it() -> None:
    tokenizer = tiny_tokenizer("metaspace")
    text = "the way"
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == tokenizer.bos_token_id
    echo = EchoedPrompt(tokenizer, token_ids, text, is_whole=True)
    assert echo.text == text and echo.offsets[:2] == [0, 0]


def test_an_echo_that_ends_inside_a_character_is_whole_only_when_nothing_follows() -> None:
    token_ids = ids_of_bytes(b"a" + "é".encode()[:1])
    scores = make_rows([[(token_ids[1], -1.0, 1), (token_ids[0], -2.0, 2)]], num_none=1)
    for is_whole, shown in ((True, "�"), (False, "")):
        echo = EchoedPrompt(tiny_tokenizer(), token_ids, None, is_whole=is_whole)
        assert echo.text == "a" + shown
        lists = as_json(echo.write(scores, as_token_ids=False, max_entries=2))
        assert lists["tokens"] == ["a", shown] and lists["text_offset"] == [0, 1]
        assert list(lists["top_logprobs"][1]) == [shown, "a"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=12), kind=st.sampled_from(["byte_level", "metaspace"]))
def test_echoed_tokens_stand_where_they_say(text: str, kind: str) -> None:
    tokenizer = tiny_tokenizer(kind)
    token_ids = tokenizer.encode(text)
    if not token_ids:
        return
    echo = EchoedPrompt(tokenizer, token_ids, text, is_whole=True)
    scores = make_rows([[(token_id, -1.0, 1)] for token_id in token_ids[1:]], num_none=1)
    lists = as_json(echo.write(scores, as_token_ids=False, max_entries=1))
    special = tokenizer.token_bytes.special_ids
    for token_id, offset, token in zip(token_ids, lists["text_offset"], lists["tokens"], strict=True):
        if token_id not in special:
            assert echo.text[offset : offset + len(token)] == token
    if kind == "byte_level":
        assert echo.text == text
