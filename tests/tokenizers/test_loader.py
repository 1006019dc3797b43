"""Loading tokenizers of Hugging Face folders: what is read, what is added, what is refused."""

import json
import pathlib
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Backend

from tests.tiny_tokenizers import write_tiny_tokenizer
from vllm.exceptions import ModelLoadError, VLLMUnsupportedError
from vllm.tokenizers import get_tokenizer, load_tokenizer

TEXTS = ["the word is two", "  é 你好 😀\n\tif x == 1:", "a<|im_end|>b<s>c", "", " ", "x" * 50]


def edit_config(folder: pathlib.Path, **fields: object) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_ids_text_and_special_ids_equal_those_of_transformers(tmp_path: pathlib.Path, kind: str) -> None:
    write_tiny_tokenizer(tmp_path, kind=kind)  # type: ignore[arg-type]
    ours, reference = load_tokenizer(tmp_path), get_tokenizer(tmp_path)
    assert len(ours) == ours.vocab_size == len(reference)
    for role in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "bos_token", "eos_token", "pad_token"):
        assert getattr(ours, role, None) == getattr(reference, role), role
    assert ours.all_special_ids == set(reference.all_special_ids)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == reference.encode(text, add_special_tokens=add)
            for skip in (True, False):
                assert ours.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
        assert ours.convert_ids_to_tokens(ids) == reference.convert_ids_to_tokens(ids)
    assert ours.get_vocab() == reference.get_vocab()


def test_lone_surrogates_become_replacement_characters_not_a_crash(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a\ud83d b")).replace("\ufffd", "") == "a b"


def test_ids_beyond_the_vocabulary_decode_to_nothing(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the word")
    assert tokenizer.decode([*ids, 600, 2**33, -1]) == "the word"
    assert tokenizer.convert_ids_to_tokens([600]) == [""]
    assert tokenizer.convert_tokens_to_ids(["the", "no such token"]) == [tokenizer.encode("the")[0], None]


def test_truncation_and_padding_saved_in_the_folder_never_touch_a_prompt(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the word and the number")) == "the word and the number"
    assert len(tokenizer.encode("the")) == 1


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_what_stands_around_a_text_is_for_the_post_processor_not_for_the_config(
    tmp_path: pathlib.Path, kind: str
) -> None:
    write_tiny_tokenizer(tmp_path, kind=kind)  # type: ignore[arg-type]
    edit_config(tmp_path, add_bos_token=kind != "metaspace", add_eos_token=True)
    ids = load_tokenizer(tmp_path).encode("the")
    assert ids == get_tokenizer(tmp_path).encode("the")
    assert (ids[0] == 1, ids[-1] == 2) == (kind == "metaspace", False)


def test_tokens_that_only_the_config_knows_are_added_as_transformers_adds_them(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    added = {"512": {"content": "<tool>", "special": False}, "513": {"content": "<think>", "special": True}}
    for fields in added.values():
        fields |= {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    edit_config(tmp_path, added_tokens_decoder=added, additional_special_tokens=["<|extra|>"], pad_token="<|pad|>")
    ours, reference = load_tokenizer(tmp_path), get_tokenizer(tmp_path)
    text = "a<tool>b<think>c<|extra|>d<|pad|>"
    ids = ours.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ids) == reference.decode(reference.encode(text), skip_special_tokens=True) == "a<tool>bcd"
    assert len(ours) == len(reference) == 516
    assert ours.token_bytes[ours.convert_tokens_to_ids(["<|pad|>"])[0] or 0] == b"<|pad|>"


def test_a_token_of_the_vocabulary_that_the_config_names_special_becomes_special(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    edit_config(tmp_path, eos_token={"__type": "AddedToken", "content": "the", "normalized": False})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id in tokenizer.all_special_ids
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode(tokenizer.encode("a the")) == "a "


def test_special_tokens_map_serves_where_the_config_is_silent(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token_id) == ("<|im_end|>", 0)


def test_a_saved_tokenizer_reads_back_the_same(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path / "first", kind="metaspace")
    first = load_tokenizer(tmp_path / "first")
    first.save(tmp_path / "second")
    second = load_tokenizer(tmp_path / "second")
    assert [second.encode(text) for text in TEXTS] == [first.encode(text) for text in TEXTS]
    assert second.settings.chat_templates == first.settings.chat_templates
    assert (second.bos_token_id, second.eos_token_id) == (1, 2)


def test_a_tokenizer_json_is_found_by_its_own_path(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.json").eos_token_id == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json can't be read"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json can't be read"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: must hold a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token must be a string or an object"),
    ],
)
def test_damaged_files_are_named_in_the_error(tmp_path: pathlib.Path, name: str, content: str, message: str) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(tmp_path)


def test_a_folder_without_any_vocabulary_says_what_was_looked_for(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="looked for tokenizer.json.*tokenizer.model.*gguf"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match="no such folder or file"):
        load_tokenizer(tmp_path / "nothing" / "here")


def test_an_older_vocabulary_is_converted_by_transformers(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path / "new")
    new = load_tokenizer(tmp_path / "new")
    model = json.loads((tmp_path / "new" / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    converted = load_tokenizer(old)
    assert converted.encode("the word is é") == new.encode("the word is é")
    assert converted.eos_token_id == 2


def test_an_unserved_tokenizer_mode_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    with pytest.raises(VLLMUnsupportedError, match="tokenizer_mode must be one of auto, hf, slow; got 'mistral'"):
        load_tokenizer(tmp_path, mode="mistral")
    assert load_tokenizer(tmp_path, mode="slow").vocab_size == 512


def test_loading_text_and_chat_need_neither_torch_nor_transformers(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    program = f"""
import sys
from vllm.tokenizers import load_tokenizer
tokenizer = load_tokenizer({str(tmp_path)!r})
ids = tokenizer.encode(tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}]), add_special_tokens=False)
assert tokenizer.decode(ids) and tokenizer.token_bytes[ids[-1]]
print(sorted({{"torch", "transformers", "huggingface_hub"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
