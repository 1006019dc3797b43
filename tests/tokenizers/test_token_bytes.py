"""True bytes of tokens: what a text is made of, whatever the vocabulary calls its tokens."""

import functools
import pathlib
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.tiny_tokenizers import (
    byte_alphabet,
    make_byte_level_tokenizer,
    make_metaspace_tokenizer,
    write_tiny_tokenizer,
)
from tests.tokenizers.strategies import token_id_lists
from vllm.exceptions import ModelLoadError
from vllm.tokenizers import TokenBytes, load_tokenizer
from vllm.tokenizers.token_bytes import LeadingSpace, decode_bytes

TEXTS = [
    "The quick brown fox, 1234 times.",
    "def f(x):\n    return {'a': x[0]}\t# é\r\n",
    "emoji 😀😀👩‍👩‍👧 and CJK 你好，世界",
    "  two  leading and trailing  ",
    "a<b>c</b> <|not special|> \x00\x7f",
    "한국어 עברית ไทย",
]


@functools.cache
def tiny(kind: str) -> tuple[Tokenizer, TokenBytes]:
    tokenizer = make_byte_level_tokenizer() if kind == "byte_level" else make_metaspace_tokenizer()
    return tokenizer, TokenBytes(tokenizer)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("text", TEXTS)
def test_joined_bytes_of_a_text_are_the_text(kind: str, text: str) -> None:
    tokenizer, token_bytes = tiny(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join([token_bytes.at_text_start(ids[0]), *(token_bytes[i] for i in ids[1:])])
    assert joined.decode() == text


@given(ids=token_id_lists)
def test_joined_bytes_decode_as_the_library_does_for_any_byte_level_ids(ids: list[int]) -> None:
    tokenizer, token_bytes = tiny("byte_level")
    joined = b"".join(token_bytes[i] for i in ids)
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=12))
def test_metaspace_bytes_decode_as_the_library_does_for_any_text(text: str) -> None:
    tokenizer, token_bytes = tiny("metaspace")
    ids = [i for i in tokenizer.encode(text).ids if not token_bytes.is_special(i)]
    joined = b"".join(token_bytes.at_text_start(i) if n == 0 else token_bytes[i] for n, i in enumerate(ids))
    assert joined.decode() == tokenizer.decode(ids)


def test_every_byte_has_its_token_in_both_kinds() -> None:
    for kind, name in (("byte_level", lambda b: byte_alphabet()[b]), ("metaspace", lambda b: f"<0x{b:02X}>")):
        tokenizer, token_bytes = tiny(kind)
        for byte in range(256):
            assert token_bytes[tokenizer.token_to_id(name(byte))] == bytes([byte])


def test_ids_that_the_tokenizer_does_not_know_are_empty() -> None:
    _, token_bytes = tiny("byte_level")
    for unknown in (512, 49152, 2**31, 2**40, -1):
        assert token_bytes[unknown] == b""
        assert token_bytes.text_alone[unknown] == ""


def test_special_tokens_are_their_literal_name_even_where_it_holds_markers() -> None:
    byte_level, metaspace = make_byte_level_tokenizer(), make_metaspace_tokenizer()
    for tokenizer in (byte_level, metaspace):
        tokenizer.add_special_tokens(["<｜begin▁of▁text｜>", "<é Ġ>"])
        token_bytes = TokenBytes(tokenizer)
        for name in ("<｜begin▁of▁text｜>", "<é Ġ>"):
            token_id = tokenizer.token_to_id(name)
            assert token_bytes.is_special(token_id)
            assert token_bytes[token_id].decode() == name


def test_added_tokens_that_are_not_special_keep_their_text() -> None:
    byte_level, metaspace = make_byte_level_tokenizer(), make_metaspace_tokenizer()
    byte_level.add_tokens([AddedToken("naïve café", normalized=False)])
    assert TokenBytes(byte_level)[byte_level.token_to_id("naïve café")].decode() == "naïve café"
    metaspace.add_tokens([AddedToken("▁▁▁▁", normalized=False)])  # as Gemma lists its runs of spaces
    assert TokenBytes(metaspace)[metaspace.token_to_id("▁▁▁▁")] == b"    "


@pytest.mark.parametrize(
    ("decoder", "leading_space", "start_of_double_space"),
    [
        (decoders.ByteLevel(), LeadingSpace.KEPT, None),
        (decoders.Metaspace(prepend_scheme="never"), LeadingSpace.KEPT, b"  "),
        (decoders.Metaspace(prepend_scheme="always"), LeadingSpace.FIRST_TOKEN_STRIPPED, b""),
        (
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
            LeadingSpace.KEPT,
            b"  ",
        ),
        (
            decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
            LeadingSpace.ONE_STRIPPED,
            b" ",
        ),
    ],
)
def test_leading_space_is_stripped_as_each_decoder_does_it(
    decoder: decoders.Decoder, leading_space: LeadingSpace, start_of_double_space: bytes | None
) -> None:
    tokenizer = make_metaspace_tokenizer()
    tokenizer.decoder = decoder
    token_bytes = TokenBytes(tokenizer)
    assert token_bytes.leading_space is leading_space
    assert token_bytes.strips_leading_space == (leading_space is not LeadingSpace.KEPT)
    if start_of_double_space is not None:
        two = tokenizer.token_to_id("▁▁")
        assert token_bytes.at_text_start(two) == start_of_double_space
        assert token_bytes.at_text_start(two).decode() == tokenizer.decode([two])


def test_a_tokenizer_without_decoder_joins_words_with_spaces() -> None:
    tokenizer = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "<unk>": 2}, unk_token="<unk>"))
    token_bytes = TokenBytes(tokenizer)
    assert (token_bytes.at_text_start(0) + token_bytes[1]).decode() == tokenizer.decode([0, 1]) == "hello world"


def test_a_decoder_that_is_not_served_is_refused_by_name() -> None:
    tokenizer = make_metaspace_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        TokenBytes(tokenizer)


@given(data=st.binary(max_size=8), cut=st.integers(0, 8))
def test_decoding_in_two_pieces_equals_decoding_at_once(data: bytes, cut: int) -> None:
    first, pending = decode_bytes(data[:cut])
    rest, end = decode_bytes(pending + data[cut:], final=True)
    assert first + rest == data.decode("utf-8", "replace")
    assert end == b""
    assert len(pending) <= 3


@given(pieces=token_id_lists, earlier=st.sampled_from([b"", b"\xf0\x9f", b"\xe4"]))
def test_pending_bytes_from_the_last_tokens_equal_those_of_the_whole(pieces: list[int], earlier: bytes) -> None:
    for kind in ("byte_level", "metaspace"):
        shown = tiny(kind)[1].shown(skip_special_tokens=True)
        whole = earlier + b"".join(shown.bytes_of[i] for i in pieces)
        assert shown.pending_bytes(pieces, len(pieces), earlier) == decode_bytes(whole)[1]


def test_nothing_is_worked_out_before_it_is_asked_for(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    token_bytes = load_tokenizer(tmp_path).token_bytes
    assert len(token_bytes._bytes_of) == 0
    assert token_bytes[300]
    assert list(token_bytes._bytes_of) == [300]


def test_the_tiny_tokenizers_fill_their_vocabulary_exactly() -> None:
    for kind in ("byte_level", "metaspace"):
        for vocab_size in (400, 512, 1024):
            with tempfile.TemporaryDirectory() as folder:
                write_tiny_tokenizer(folder, vocab_size, kind)  # type: ignore[arg-type]
                tokenizer = load_tokenizer(folder)
            assert (tokenizer.vocab_size, tokenizer.max_token_id) == (vocab_size, vocab_size - 1)
            assert all(tokenizer.token_bytes[i] for i in range(vocab_size))
            assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
