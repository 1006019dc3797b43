"""Tokenizers from GGUF metadata: as the file describes them, and like transformers where that reads all of it."""

import functools
import itertools
import json
import pathlib
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_tokenizers import CHATML_TEMPLATE, make_byte_level_tokenizer, make_metaspace_tokenizer
from vllm.exceptions import ModelLoadError, VLLMValidationError
from vllm.tokenizers import Tokenizer, get_tokenizer, load_tokenizer
from vllm.tokenizers.gguf_tokenizer import TokenType, compute_merges, make_tokenizer_from_gguf

TEXTS = [
    "The capital of France is Paris, isn't it? We'll see: 1234 or 5,678.90!",
    "def f(x: int) -> str:\n\tfor i in range(10):\n\t\treturn f'{x}'  # é\r\n\r\n",
    "😀😎👩‍👩‍👧 你好，世界。한국어 naïve ﬁ Å Å",
    "  leading, trailing and \n \n  inner   spaces \t ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "",
]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    backend = make_byte_level_tokenizer()
    merges = json.loads(backend.to_str())["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [backend.id_to_token(i) for i in range(512)],
        "tokenizer.ggml.token_type": np.array([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 509, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML_TEMPLATE,
    }
    return changed(metadata, changes)


def pieces_metadata(**changes: Any) -> dict[str, Any]:
    backend = make_metaspace_tokenizer()
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [backend.id_to_token(i) for i in range(512)],
        "tokenizer.ggml.token_type": np.array(types + [TokenType.NORMAL] * 253, np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(253)], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return changed(metadata, changes)


def changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def make(metadata: dict[str, Any]) -> Tokenizer:
    return make_tokenizer_from_gguf(metadata, "tiny.gguf")


# ---------------------------------------------------------------- the embedded model


@pytest.fixture(scope="module")
def embedded(smollm2_gguf: pathlib.Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: pathlib.Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.mark.parametrize("text", TEXTS)
def test_embedded_model_has_the_ids_and_texts_of_transformers(embedded: Tokenizer, reference: Any, text: str) -> None:
    ids = embedded.encode(text)
    assert ids == reference.encode(text)
    for skip in (True, False):
        assert embedded.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_embedded_model_has_the_special_tokens_of_transformers(embedded: Tokenizer, reference: Any) -> None:
    assert len(embedded) == len(reference) == 49152
    for role in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(embedded, role) == getattr(reference, role)
    skipped = {i for i, token in reference.added_tokens_decoder.items() if token.special}
    assert embedded.all_special_ids == skipped


def test_embedded_chat_template_renders_as_in_transformers_with_its_default_system_prompt(
    embedded: Tokenizer, reference: Any
) -> None:
    say_hi = [{"role": "user", "content": "Say hi."}]
    prompt = embedded.apply_chat_template(say_hi)
    assert "You are a helpful AI assistant named SmolLM" in prompt
    assert len(embedded.encode(prompt, add_special_tokens=False)) == 33
    long = [{"role": "system", "content": "Be brief."}, *say_hi, {"role": "assistant", "content": "é <hi>"}]
    for conversation in (say_hi, long):
        for prompts in (True, False):
            theirs = reference.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompts)
            assert embedded.apply_chat_template(conversation, add_generation_prompt=prompts) == theirs


def test_bytes_of_the_whole_embedded_vocabulary_agree_with_the_librarys_decode(embedded: Tokenizer) -> None:
    for token_id in range(0, embedded.vocab_size, 7):
        text = embedded.token_bytes[token_id].decode("utf-8", "replace")
        assert text == embedded.decode([token_id], skip_special_tokens=False)


def test_smollm_cuts_digits_off_before_it_joins_spaces(embedded: Tokenizer) -> None:
    # The file says so (tokenizer.ggml.pre "smollm"); transformers' GGUF reader does not know it.
    assert embedded.convert_ids_to_tokens(embedded.encode("a   12")) == ["a", "ĠĠĠ", "1", "2"]


def test_the_hugging_face_object_of_a_gguf_file_gives_our_ids(smollm2_gguf: pathlib.Path, embedded: Tokenizer) -> None:
    theirs = get_tokenizer(smollm2_gguf)
    for text in [*TEXTS, "a   12"]:
        assert theirs.encode(text) == embedded.encode(text)
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (1, 2, 49152)
    say_hi = [{"role": "user", "content": "Say hi."}]
    assert len(theirs.apply_chat_template(say_hi, add_generation_prompt=True)["input_ids"]) == 33


def test_building_from_a_gguf_file_is_fast(smollm2_gguf: pathlib.Path, embedded: Tokenizer) -> None:
    # 0.2 s for 49,152 tokens and 48,900 merges. The thread's own time: what else runs on the machine doesn't count.
    start = time.thread_time()
    load_tokenizer(smollm2_gguf)
    assert time.thread_time() - start < 0.5


# ---------------------------------------------------------------- byte-level files


def test_byte_level_metadata_give_the_tokenizer_they_came_from() -> None:
    tokenizer, original = make(byte_level_metadata()), make_byte_level_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
    assert tokenizer.all_special_ids == {0, 1, 2}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")


SPLIT_ME = "It's 1234  x!!\n\n  \ty Don'T abcDEF"
LIKE_GPT_2 = "It|'s|Ġ1234|Ġ|Ġx|!!|ĊĊĠĠ|ĉ|y|ĠDon|'|T|ĠabcDEF"
LIKE_SMOLLM = "It|'s|Ġ|1|2|3|4|Ġ|Ġx|!!|ĊĊĠĠ|ĉ|y|ĠDon|'|T|ĠabcDEF"
LIKE_LLAMA_3 = "It|'s|Ġ|123|4|Ġ|Ġx|!!ĊĊ|ĠĠ|ĉy|ĠDon|'T|ĠabcDEF"
LIKE_QWEN_2 = "It|'s|Ġ|1|2|3|4|Ġ|Ġx|!!ĊĊ|ĠĠ|ĉy|ĠDon|'T|ĠabcDEF"
LIKE_TEKKEN = "It|'s|Ġ|1|2|3|4|Ġ|Ġx|!!ĊĊ|ĠĠ|ĉy|ĠDon|'T|Ġabc|DEF"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        (None, LIKE_GPT_2),
        ("default", LIKE_GPT_2),
        ("gpt-2", LIKE_GPT_2),
        ("never heard of", LIKE_GPT_2),
        ("smollm", LIKE_SMOLLM),
        ("llama-bpe", LIKE_LLAMA_3),
        ("qwen2", LIKE_QWEN_2),
        ("tekken", LIKE_TEKKEN),
    ],
)
def test_each_pre_tokenization_cuts_text_as_its_models_were_trained(pre: str | None, pieces: str) -> None:
    cut = make(byte_level_metadata(pre=pre)).backend.pre_tokenizer.pre_tokenize_str(SPLIT_ME)
    assert "|".join(name for name, _ in cut) == pieces


def test_qwen_composes_characters_first_and_the_others_leave_them() -> None:
    decomposed = "e\u0301"
    for pre, text in (("qwen2", "é"), ("llama-bpe", decomposed)):
        tokenizer = make(byte_level_metadata(pre=pre))
        assert tokenizer.decode(tokenizer.encode(decomposed)) == text


def test_llama_3_takes_a_whole_word_of_the_vocabulary_though_its_merges_lead_elsewhere() -> None:
    merges = byte_level_metadata()["tokenizer.ggml.merges"]
    without_last = [merge for merge in merges if "".join(merge.split()) != "the"]
    for pre, names in (("llama-bpe", ["the"]), ("gpt-2", ["th", "e"])):
        tokenizer = make(byte_level_metadata(pre=pre, merges=without_last, add_bos_token=False))
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the")) == names


@pytest.mark.parametrize(
    ("pre", "flag", "is_added"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", True, True)],
)
def test_bos_is_added_as_the_flag_or_else_the_model_family_says(pre: str, flag: bool | None, is_added: bool) -> None:
    tokenizer = make(byte_level_metadata(pre=pre, add_bos_token=flag, add_eos_token=True))
    ids = tokenizer.encode("the")
    assert (ids[0] == 1) == is_added
    assert ids[-1] == 2
    assert tokenizer.encode("the", add_special_tokens=False) == ids[is_added:-1]


def test_control_tokens_are_skipped_and_user_defined_ones_are_shown() -> None:
    types = np.array([TokenType.CONTROL, TokenType.USER_DEFINED] + [TokenType.NORMAL] * 510, np.int32)
    tokenizer = make(byte_level_metadata(token_type=types, bos_token_id=None))
    ids = tokenizer.encode("a<|im_start|>b<|endoftext|>c<|im_end|>")
    assert tokenizer.decode(ids) == "a<|im_start|>bc"
    assert tokenizer.all_special_ids == {0, 2}  # 2 is the end token, whatever its type says


def test_named_chat_templates_are_read_beside_the_default() -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template.rag": "rag", "tokenizer.chat_templates": ["rag"]}
    tokenizer = make(metadata)
    hi = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(hi, chat_template="rag") == "rag"
    del metadata["tokenizer.chat_template"]
    with pytest.raises(VLLMValidationError, match=r"templates named \['rag'\]"):
        make(metadata).apply_chat_template(hi)


# ---------------------------------------------------------------- files with scored pieces


@functools.cache
def make_pieces_tokenizer() -> Tokenizer:
    return make(pieces_metadata())


def join_best_first(text: str, tokenizer: Tokenizer) -> list[str]:
    """Join the neighbours whose union has the best score, until none has one: what scored pieces mean."""
    score = {name: -token_id for name, token_id in tokenizer.get_vocab().items() if token_id >= 259}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(score[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in score]
        if not unions:
            return pieces
        place = -max(unions)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@given(text=st.text("aehinortw  ", min_size=1, max_size=24))
def test_scored_pieces_are_joined_best_first(text: str) -> None:
    tokenizer = make_pieces_tokenizer()
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert tokenizer.convert_ids_to_tokens(ids[1:]) == join_best_first(text, tokenizer)
    assert tokenizer.decode(ids) == text


def test_pieces_fall_back_to_bytes_and_keep_special_tokens_whole() -> None:
    tokenizer = make_pieces_tokenizer()
    for text in ["你好 😀\n", "two  spaces", "<0x41>", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a</s>你")) == [
        *("<s>", "▁a", "</s>"),
        *("▁", "<0xE4>", "<0xBD>", "<0xA0>"),
    ]
    assert tokenizer.all_special_ids == {0, 1, 2}
    assert tokenizer.token_bytes.strips_leading_space


def test_pieces_without_space_prefix_neither_add_nor_strip_a_space() -> None:
    tokenizer = make(pieces_metadata(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the"))[0] == "the"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
    assert not tokenizer.token_bytes.strips_leading_space


def test_the_best_scored_union_is_joined_first_whatever_its_place_or_id() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    types = [TokenType.NORMAL] * len(tokens)
    ab_first = compute_merges(tokens, types, [0, 0, 0, 2.0, 1.0, -1.0])
    assert ab_first == [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]
    bc_first = compute_merges(tokens, types, [0, 0, 0, 1.0, 2.0, -1.0])
    assert bc_first[0] == ("b", "c")
    assert compute_merges(tokens, [*types[:3], TokenType.UNUSED, *types[4:]], [0.0] * 6) == [("b", "c"), ("a", "bc")]


# ---------------------------------------------------------------- damaged files


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "has no vocabulary"),
        ({"tokens": [1, 2]}, "has no vocabulary"),
        ({"model": "t5"}, "kind 't5'.*'gpt2' and 'llama'"),
        ({"model": None}, "kind None"),
        ({"merges": None}, "has no merges"),
        ({"merges": ["no such"]}, "merges do not fit"),
        ({"token_type": np.zeros(3, np.int32)}, "token_type has 3 entries for 512 tokens"),
        ({"eos_token_id": 512}, "eos_token_id is 512; it must be from 0 to 511"),
        ({"model": "llama"}, "needs one score a token"),
    ],
)
def test_metadata_that_contradict_themselves_are_refused_with_file_and_field(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"tiny.gguf.*{message}"):
        make(byte_level_metadata(**changes))
