"""Text as tokens arrive: equal to decoding the whole, never taken back, cut at stop strings."""

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from tests.tiny_tokenizers import make_byte_level_tokenizer, make_metaspace_tokenizer
from tests.tokenizers.strategies import token_id_lists
from tests.v1.engine.spans import compute_token_spans
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.token_bytes import TokenBytes
from vllm.tokenizers.tokenizer import Tokenizer, TokenizerSettings
from vllm.v1.engine.detokenizer import Detokenizer, IncrementalDetokenizer, make_detokenizer

KINDS = ["byte_level", "metaspace"]
TEXTS = [
    "The word is: two, and the number 1234.",
    "if x == {'a': 1}:\n\treturn [x]\r\n",
    "😀 emoji 👩‍👩‍👧 and 你好，世界 é",
    "  leading and   inner  ",
]


@functools.cache
def tiny(kind: str) -> tuple[Backend, TokenBytes]:
    backend = make_byte_level_tokenizer() if kind == "byte_level" else make_metaspace_tokenizer()
    return backend, TokenBytes(backend)


def encode(kind: str, text: str) -> list[int]:
    return tiny(kind)[0].encode(text).ids


def behind_prompt(kind: str, text: str) -> list[int]:
    """Ids that add exactly `text` to a text."""
    backend, _ = tiny(kind)
    anchor = backend.encode("a").ids
    ids = backend.encode("a" + text).ids
    assert ids[: len(anchor)] == anchor, "the anchor merged with the text"
    return ids[len(anchor) :]


def make(kind: str, prompt: Sequence[int] = (), **kwargs: Any) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tiny(kind)[1], prompt, **kwargs)


def run(detokenizer: IncrementalDetokenizer, ids: Sequence[int], size: int = 1) -> str | None:
    """Feed `ids` in pieces until a stop string is hit."""
    for first in range(0, len(ids), size):
        if (stop := detokenizer.update(ids[first : first + size])) is not None:
            return stop
    return None


def finish(detokenizer: IncrementalDetokenizer) -> str:
    return detokenizer.take_new_text(finished=True, delta=False)


# ---------------------------------------------------------------- equal to the whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cut", [0, 1, 3, 7])
def test_text_behind_a_prompt_is_decode_of_both_minus_decode_of_the_prompt(kind: str, text: str, cut: int) -> None:
    backend, _ = tiny(kind)
    ids = encode(kind, text)
    whole_characters = [n for n in range(cut, len(ids)) if "\ufffd" not in backend.decode(ids[:n])]
    prompt, output = ids[: whole_characters[0]], ids[whole_characters[0] :]
    detokenizer = make(kind, prompt)
    run(detokenizer, output)
    assert finish(detokenizer) == backend.decode(ids)[len(backend.decode(prompt)) :]


@given(ids=token_id_lists, skip=st.booleans())
def test_any_byte_level_ids_give_the_librarys_decode_incomplete_end_included(ids: list[int], skip: bool) -> None:
    detokenizer = make("byte_level", skip_special_tokens=skip)
    run(detokenizer, ids)
    assert finish(detokenizer) == tiny("byte_level")[0].decode(ids, skip_special_tokens=skip)


@given(ids=token_id_lists, kind=st.sampled_from(KINDS), skip=st.booleans())
def test_text_is_the_decoded_joined_bytes_of_the_shown_tokens(ids: list[int], kind: str, skip: bool) -> None:
    token_bytes = tiny(kind)[1]
    detokenizer = make(kind, encode(kind, "a"), skip_special_tokens=skip)
    run(detokenizer, ids)
    shown = [i for i in ids if not (skip and token_bytes.is_special(i))]
    assert finish(detokenizer) == b"".join(token_bytes[i] for i in shown).decode("utf-8", "replace")


@given(ids=token_id_lists, size=st.integers(2, 16), kind=st.sampled_from(KINDS))
def test_one_token_at_a_time_equals_many_at_once(ids: list[int], size: int, kind: str) -> None:
    single, several = make(kind), make(kind)
    run(single, ids)
    run(several, ids, size)
    assert single.output_text == several.output_text
    assert single.num_tokens == several.num_tokens == len(ids)
    assert finish(single) == finish(several)


@given(ids=token_id_lists, cut=st.integers(0, 16), kind=st.sampled_from(KINDS))
def test_a_character_begun_in_the_prompt_is_completed_by_the_first_tokens(ids: list[int], cut: int, kind: str) -> None:
    together, prompt_only, behind = make(kind), make(kind), make(kind, ids[:cut])
    run(together, ids)
    run(prompt_only, ids[:cut])
    run(behind, ids[cut:])
    assert together.output_text == prompt_only.output_text + behind.output_text


def test_the_first_token_completes_the_prompts_last_character() -> None:
    ids = encode("byte_level", "😀")
    assert len(ids) > 1
    detokenizer = make("byte_level", [*encode("byte_level", "so "), *ids[:-1]])
    detokenizer.update(ids[-1:])
    assert detokenizer.take_new_text(finished=False, delta=True) == "😀"


def test_an_incomplete_character_waits_and_shows_as_one_replacement_at_the_end() -> None:
    ids = encode("byte_level", "你")
    detokenizer = make("byte_level")
    detokenizer.update(ids[:-1])
    assert detokenizer.take_new_text(finished=False, delta=True) == ""
    assert detokenizer.take_new_text(finished=True, delta=True) == "\ufffd"
    assert detokenizer.take_new_text(finished=True, delta=True) == ""


def test_bytes_that_cannot_complete_show_with_the_token_that_proves_it() -> None:
    part, letter = encode("byte_level", "你")[:-1], encode("byte_level", "a")
    detokenizer = make("byte_level")
    detokenizer.update(part)
    detokenizer.update(letter)
    assert detokenizer.take_new_text(finished=False, delta=True) == "\ufffda"


def test_metaspace_strips_a_leading_space_only_where_nothing_shows_before() -> None:
    the, word = (tiny("metaspace")[0].token_to_id(name) for name in ("▁the", "▁word"))
    for prompt, skip, text in (
        ([], True, "the word"),
        ([1], True, "the word"),  # <s> is skipped
        ([1], False, " the word"),
        ([1, the], True, " the word"),
    ):
        detokenizer = make("metaspace", prompt, skip_special_tokens=skip)
        run(detokenizer, [the, word])
        assert finish(detokenizer) == text
        if skip:
            decode = functools.partial(tiny("metaspace")[0].decode, skip_special_tokens=skip)
            assert text == decode([*prompt, the, word])[len(decode(prompt)) :]


def test_special_tokens_are_skipped_or_shown_without_spaces_between() -> None:
    ids = encode("byte_level", "a<|im_end|><|im_end|>b")
    for spaces in (True, False):
        shown = make("byte_level", skip_special_tokens=False, spaces_between_special_tokens=spaces)
        run(shown, ids)
        assert shown.output_text == "a<|im_end|><|im_end|>b"
    skipping = make("byte_level")
    run(skipping, ids)
    assert skipping.output_text == "ab"


def test_ids_beyond_the_tokenizer_show_nothing() -> None:
    detokenizer = make("byte_level")
    run(detokenizer, [*encode("byte_level", "a"), 600, 49151, *encode("byte_level", "b")])
    assert detokenizer.output_text == "ab"


# ---------------------------------------------------------------- streaming


@given(
    ids=token_id_lists,
    kind=st.sampled_from(KINDS),
    stop=st.lists(st.text("ab th", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=8),
)
def test_deltas_joined_equal_the_cumulative_and_the_final_text(
    ids: list[int], kind: str, stop: list[str], include: bool, sizes: list[int]
) -> None:
    options: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": include}
    delta, cumulative, final = (make(kind, **options) for _ in range(3))
    pieces, last, first = [], "", 0
    for size in itertools.cycle(sizes):
        hits = {str(d.update(ids[first : first + size])) for d in (delta, cumulative, final)}
        assert len(hits) == 1
        first += size
        finished = hits != {"None"} or first >= len(ids)
        pieces.append(delta.take_new_text(finished, delta=True))
        text = cumulative.take_new_text(finished, delta=False)
        assert text.startswith(last), "text was taken back"
        assert "".join(pieces) == text
        last = text
        if finished:
            break
    assert last == finish(final) == delta.output_text


def test_no_character_of_a_stop_string_is_shown_before_it_is_ruled_out() -> None:
    waiting = make("byte_level", stop=["XYZ!"])
    run(waiting, encode("byte_level", "abXYZ"))
    assert waiting.take_new_text(finished=False, delta=True) == "ab"
    assert waiting.output_text == "abXYZ"
    run(waiting, encode("byte_level", "?"))
    assert waiting.take_new_text(finished=False, delta=True) == "XYZ"[:1]
    assert waiting.take_new_text(finished=True, delta=True) == "YZ?"


def test_a_long_streamed_answer_costs_the_same_a_token_as_a_short_one() -> None:
    ids = encode("byte_level", "the word and the number of it ") * 100

    def time_of(num_rounds: int) -> float:
        detokenizer = make("byte_level", stop=["never in there"])
        start = time.thread_time()
        for _ in range(num_rounds):
            for token_id in ids:
                detokenizer.update((token_id,))
                detokenizer.take_new_text(finished=False, delta=True)
        return (time.thread_time() - start) / num_rounds

    # Quadratic work would cost ten times as much a token; the factor leaves room for noise.
    assert time_of(20) < 4 * min(time_of(2) for _ in range(3))


# ---------------------------------------------------------------- stop strings


def find_stop_slowly(pieces: list[str], stop: list[str], min_tokens: int) -> tuple[int, str, int, int] | None:
    """Return (number of tokens, stop string, its start, its end) by looking at every prefix of the text."""
    text = ""
    for num_tokens, piece in enumerate(pieces, start=1):
        for end in range(len(text) + 1, len(text) + len(piece) + 1):
            for candidate in stop if num_tokens > min_tokens else ():
                if (text + piece)[:end].endswith(candidate):
                    return num_tokens, candidate, end - len(candidate), end
        text += piece
    return None


@given(
    ids=token_id_lists,
    kind=st.sampled_from(KINDS),
    stop=st.lists(
        st.sampled_from(["a", "t", "he", "th", " th", "ha", "aa", "the", "\ufffd", "é"]), min_size=1, max_size=3
    ),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    size=st.integers(1, 5),
)
def test_the_stop_string_that_completes_first_wins_and_cuts(
    ids: list[int], kind: str, stop: list[str], include: bool, min_tokens: int, size: int
) -> None:
    pieces = [span.text for span in compute_token_spans(tiny(kind)[1], ids)]
    detokenizer = make(kind, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    hit = run(detokenizer, ids, size)
    expected = find_stop_slowly(pieces, stop, min_tokens)
    if expected is None:
        assert hit is None
        assert detokenizer.num_tokens == len(ids)
    else:
        num_tokens, name, start, end = expected
        assert (hit, detokenizer.num_tokens) == (name, num_tokens)
        assert finish(detokenizer) == "".join(pieces)[: end if include else start]


def test_ties_go_by_the_order_of_the_list() -> None:
    for stop, cut in ((["b", "ab"], "xa"), (["ab", "b"], "x")):
        detokenizer = make("byte_level", stop=stop)
        assert run(detokenizer, encode("byte_level", "xab")) == stop[0]
        assert finish(detokenizer) == cut


def test_tokens_after_the_stop_string_in_one_step_are_not_counted() -> None:
    ids = [encode("byte_level", letter)[0] for letter in "xyzw"]
    detokenizer = make("byte_level", stop=["y"])
    assert detokenizer.update(ids) == "y"
    assert detokenizer.num_tokens == 2
    assert detokenizer.update(ids) is None
    assert (detokenizer.num_tokens, finish(detokenizer)) == (2, "x")


def test_a_stop_string_that_completes_within_min_tokens_is_passed_over() -> None:
    ids = [encode("byte_level", letter)[0] for letter in "xyxy"]
    detokenizer = make("byte_level", stop=["y"], min_tokens=2)
    assert run(detokenizer, ids) == "y"
    assert (detokenizer.num_tokens, finish(detokenizer)) == (4, "xyx")


def test_an_incomplete_character_behind_a_stop_string_is_cut_with_it() -> None:
    ids = [*encode("byte_level", "ab"), *encode("byte_level", "你")[:-1]]
    for include, text in ((False, "a"), (True, "ab")):
        detokenizer = make("byte_level", stop=["b"], include_stop_str_in_output=include)
        assert detokenizer.update(ids) == "b"
        assert finish(detokenizer) == text


def test_a_stop_string_may_end_in_a_character_of_several_tokens() -> None:
    ids = encode("byte_level", "so 😀 on")
    detokenizer = make("byte_level", stop=["o 😀"])
    assert run(detokenizer, ids) == "o 😀"
    assert finish(detokenizer) == "s"


@pytest.mark.parametrize("size", [1, 3])
def test_the_token_that_ended_the_sequence_is_hidden_unless_asked_for(size: int) -> None:
    ids = encode("byte_level", "a;b")
    for include, stop, text in itertools.product((False, True), ((), ("nope",)), ("a;", "a;b")):
        detokenizer = make("byte_level", stop=stop, include_stop_str_in_output=include)
        detokenizer.update(ids[: 3 - size])
        assert detokenizer.update(ids[3 - size :], stop_terminated=True) is None
        assert detokenizer.num_tokens == 3
        assert (finish(detokenizer) == text) == (include == (text == "a;b"))


# ---------------------------------------------------------------- no text, and where tokens stand


def test_without_tokenizer_or_detokenize_text_stays_empty_and_tokens_count() -> None:
    tokenizer = Tokenizer(make_byte_level_tokenizer(), TokenizerSettings())
    for silent in (
        make_detokenizer(None, [1], SamplingParams()),
        make_detokenizer(tokenizer, [1], SamplingParams(detokenize=False)),
    ):
        assert type(silent) is Detokenizer
        assert silent.update([3, 4], stop_terminated=True) is None
        assert silent.num_tokens == 2
        assert silent.take_new_text(finished=True, delta=False) == silent.output_text == ""


def test_sampling_params_reach_the_detokenizer() -> None:
    tokenizer = Tokenizer(make_byte_level_tokenizer(), TokenizerSettings())
    ids = tokenizer.encode("a<|im_end|>bXcX")
    for params, text, num_tokens in (
        (SamplingParams(stop="X"), "ab", 4),
        (SamplingParams(stop=["X"], include_stop_str_in_output=True), "abX", 4),
        (SamplingParams(stop=["X"], min_tokens=4, skip_special_tokens=False), "a<|im_end|>bXc", 6),
    ):
        detokenizer = make_detokenizer(tokenizer, [5], params)
        assert detokenizer.update(ids) == "X"
        assert (detokenizer.take_new_text(finished=True, delta=False), detokenizer.num_tokens) == (text, num_tokens)


@given(ids=token_id_lists, cut=st.integers(0, 16), kind=st.sampled_from(KINDS), skip=st.booleans())
def test_spans_find_each_token_in_the_uncut_text(ids: list[int], cut: int, kind: str, skip: bool) -> None:
    token_bytes = tiny(kind)[1]
    context, output = ids[:cut], ids[cut:]
    detokenizer = make(kind, context, skip_special_tokens=skip)
    run(detokenizer, output)
    text = "." * 5 + detokenizer.output_text
    spans = compute_token_spans(token_bytes, output, context=context, skip_special_tokens=skip, start=5)
    assert len(spans) == len(output)
    assert [span.start for span in spans] == sorted(span.start for span in spans)
    for span, token_id in zip(spans, output, strict=True):
        assert text[span.start : span.start + len(span.text)] == span.text
        assert not (skip and token_bytes.is_special(token_id) and span.text)
    assert "".join(span.text for span in spans) == text[5:]
