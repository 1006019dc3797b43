"""decoded_token: true bytes, given what the chosen tokens left incomplete, whatever else stands in the row."""

import copy
import functools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_tokenizers import FIRST_BYTE_ID, make_byte_level_tokenizer, make_metaspace_tokenizer
from tests.tokenizers.strategies import token_id_lists
from tests.v1.engine.spans import compute_token_spans
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer, TokenizerSettings
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import SequenceTexts, make_token_texts

KINDS = ["byte_level", "metaspace"]


@functools.cache
def tiny(kind: str) -> Tokenizer:
    backend = make_byte_level_tokenizer() if kind == "byte_level" else make_metaspace_tokenizer()
    return Tokenizer(backend, TokenizerSettings())


def texts_of_chosen(texts: SequenceTexts, ids: list[int]) -> list[str]:
    return [texts.decode_row(i, [token_id])[0] for i, token_id in enumerate(ids)]


def test_the_token_that_completes_a_character_carries_it_and_a_part_has_nothing() -> None:
    tokenizer = tiny("byte_level")
    ids = tokenizer.encode("a😀b")
    assert [tokenizer.token_bytes[i] for i in ids] == [b"a", b"\xf0\x9f\x98", b"\x80", b"b"]
    texts = SequenceTexts(tokenizer.token_bytes, ids)
    assert texts_of_chosen(texts, ids) == ["a", "", "😀", "b"]
    assert [texts.bytes_at(i, token_id) for i, token_id in enumerate(ids)] == [b"a", b"\xf0\x9f\x98", b"\x80", b"b"]


def test_alternatives_are_decoded_behind_the_pending_bytes_too() -> None:
    tokenizer = tiny("byte_level")
    ids = tokenizer.encode("😀")
    (letter,) = tokenizer.encode("x")
    alternative = FIRST_BYTE_ID + 0x85
    texts = SequenceTexts(tokenizer.token_bytes, ids)
    assert texts.decode_row(1, [ids[1], alternative, letter, ids[0]]) == ["😀", "😅", "\ufffdx", "\ufffd"]


def test_the_last_token_of_a_sequence_that_was_cut_shows_what_nothing_completes() -> None:
    tokenizer = tiny("byte_level")
    ids = tokenizer.encode("a😀")[:2]
    other = FIRST_BYTE_ID + 0xE4
    texts = SequenceTexts(tokenizer.token_bytes, ids)
    assert texts.decode_row(1, [ids[1], other]) == ["", ""]
    texts.end()
    assert texts.decode_row(1, [ids[1], other]) == ["\ufffd", ""], "the alternative was not chosen: it isn't the end"
    assert texts.decode_row(0, [ids[0]]) == ["a"]


@given(ids=token_id_lists, others=st.lists(st.integers(0, 520), max_size=6), kind=st.sampled_from(KINDS))
def test_a_text_does_not_depend_on_what_else_is_in_the_row(ids: list[int], others: list[int], kind: str) -> None:
    texts = SequenceTexts(tiny(kind).token_bytes, ids)
    for row in range(len(ids)):
        alone = [texts.decode_row(row, [token_id])[0] for token_id in (ids[row], *others)]
        assert texts.decode_row(row, [ids[row], *others]) == alone
        assert texts.decode_row(row, [*reversed(others), ids[row]])[-1] == alone[0]


@given(ids=token_id_lists, cut=st.integers(0, 12), kind=st.sampled_from(KINDS), skip=st.booleans())
def test_texts_of_shown_tokens_joined_are_the_detokenizers_text(
    ids: list[int], cut: int, kind: str, skip: bool
) -> None:
    tokenizer = tiny(kind)
    context, output = ids[:cut], ids[cut:]
    texts = SequenceTexts(tokenizer.token_bytes, output, context=context, skip_special_tokens=skip)
    spans = compute_token_spans(tokenizer.token_bytes, output, context=context, skip_special_tokens=skip)
    for text, span, token_id in zip(texts_of_chosen(texts, output), spans, output, strict=True):
        if skip and tokenizer.token_bytes.is_special(token_id):
            assert text == tokenizer.token_bytes[token_id].decode(), "a special token shows its name"
        else:
            assert text == span.text


@given(ids=token_id_lists, kind=st.sampled_from(KINDS))
def test_joined_bytes_of_shown_tokens_decode_to_the_text(ids: list[int], kind: str) -> None:
    tokenizer = tiny(kind)
    texts = SequenceTexts(tokenizer.token_bytes, ids)
    detokenizer = IncrementalDetokenizer(tokenizer.token_bytes)
    detokenizer.update(ids)
    shown = [(i, token_id) for i, token_id in enumerate(ids) if not tokenizer.token_bytes.is_special(token_id)]
    joined = b"".join(texts.bytes_at(i, token_id) for i, token_id in shown)
    assert joined.decode("utf-8", "replace") == detokenizer.take_new_text(finished=True, delta=False)


@given(ids=token_id_lists, cut=st.integers(0, 12), kind=st.sampled_from(KINDS))
def test_rows_behind_a_prompt_read_as_the_same_rows_of_the_whole(ids: list[int], cut: int, kind: str) -> None:
    token_bytes = tiny(kind).token_bytes
    prompt, output = ids[:cut], ids[cut:]
    whole = SequenceTexts(token_bytes, ids)
    behind = SequenceTexts(token_bytes, output, context=prompt)
    for row, token_id in enumerate(output):
        assert behind.decode_row(row, [token_id, 5, 300]) == whole.decode_row(len(prompt) + row, [token_id, 5, 300])


def test_no_vocabulary_marker_is_ever_shown() -> None:
    for kind, markers in (("byte_level", "ĠĊĉ"), ("metaspace", "▁")):
        tokenizer = tiny(kind)
        every_text = SequenceTexts(tokenizer.token_bytes, [300]).decode_row(0, range(tokenizer.vocab_size))
        assert not any(marker in text for text in every_text for marker in markers)
        assert not any(text.startswith("<0x") for text in every_text)
        assert every_text[:3] == tokenizer.convert_ids_to_tokens([0, 1, 2])


def test_ids_without_a_token_have_empty_text_even_behind_pending_bytes() -> None:
    tokenizer = tiny("byte_level")
    ids = tokenizer.encode("😀")
    texts = SequenceTexts(tokenizer.token_bytes, ids)
    assert texts.decode_row(0, [600, 49151]) == texts.decode_row(1, [600, 49151]) == ["", ""]


def test_a_skipped_special_token_keeps_its_name_and_lets_the_bytes_wait() -> None:
    tokenizer = tiny("byte_level")
    first, last = tokenizer.encode("😀")
    ids = [first, 2, last]
    skipping = SequenceTexts(tokenizer.token_bytes, ids)
    assert texts_of_chosen(skipping, ids) == ["", "<|im_end|>", "😀"]
    showing = SequenceTexts(tokenizer.token_bytes, ids, skip_special_tokens=False)
    assert texts_of_chosen(showing, ids) == ["", "\ufffd<|im_end|>", "\ufffd"]


@pytest.mark.parametrize(("skip", "first"), [(True, "the"), (False, " the")])
def test_the_space_that_the_tokenizer_strips_is_stripped_from_the_first_shown_token_only(
    skip: bool, first: str
) -> None:
    tokenizer = tiny("metaspace")
    prompt = tokenizer.encode("the word")  # <s> before it
    texts = SequenceTexts(tokenizer.token_bytes, prompt, skip_special_tokens=skip)
    assert texts_of_chosen(texts, prompt)[:2] == ["<s>", first]
    assert texts.decode_row(2, prompt[1:2]) == [" the"]
    assert texts.bytes_at(1, prompt[1]) == first.encode()
    behind = SequenceTexts(tokenizer.token_bytes, prompt[1:], context=prompt, skip_special_tokens=skip)
    assert behind.decode_row(0, prompt[1:2]) == [" the"]


def test_rows_of_a_growing_list_read_right_and_early_rows_do_not_change() -> None:
    tokenizer = tiny("byte_level")
    ids = tokenizer.encode("é😀 the 你")
    grown: list[int] = []
    texts = SequenceTexts(tokenizer.token_bytes, grown)
    seen = []
    for token_id in ids:
        grown.append(token_id)
        seen.append(texts.decode_row(len(grown) - 1, [token_id])[0])
    assert seen == texts_of_chosen(texts, ids)
    assert "".join(seen) == "é😀 the 你"


def test_flat_logprobs_read_their_texts_through_slices_pickle_and_deepcopy() -> None:
    tokenizer = tiny("byte_level")
    ids = tokenizer.encode("a😀")
    other = tokenizer.encode("b")[0]
    width = np.full((3, 2), [0, other], np.int32)
    width[:, 0] = ids
    flat = FlatLogprobs.from_arrays(
        np.array([0, 2, 4, 6]), width.ravel(), np.zeros(6, np.float32), np.ones(6, np.int32)
    ).with_text(SequenceTexts(tokenizer.token_bytes, ids))
    expected = ["a", "", "😀"]
    for rows in (flat, pickle.loads(pickle.dumps(flat)), copy.deepcopy(flat), [*flat[:1], *flat[1:]]):
        assert [rows[i][ids[i]].decoded_token for i in range(3)] == expected
        assert rows[2][other].decoded_token == "\ufffdb"
    assert flat[2:][0][ids[2]].decoded_token == "😀"
    assert [row[token_id].decoded_token for row, token_id in zip(flat[::-1], ids[::-1], strict=True)] == expected[::-1]


def test_without_tokenizer_or_detokenize_there_are_no_texts() -> None:
    tokenizer = tiny("byte_level")
    assert make_token_texts(None, [1], SamplingParams()) is None
    assert make_token_texts(tokenizer, [1], SamplingParams(detokenize=False)) is None
    params = SamplingParams(skip_special_tokens=False)
    made = make_token_texts(tokenizer, [2], params, context=tokenizer.encode("😀")[:1])
    assert made is not None
    assert made.decode_row(0, [2]) == ["\ufffd<|im_end|>"]
