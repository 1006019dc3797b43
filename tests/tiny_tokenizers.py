"""Builders of tiny, real tokenizers: folders that both this engine and transformers load."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_WORD_LIST = """
the and ing of to in is you that it he was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many then them
these so some her would make like him into time has look two more write go see number no way
"""
WORDS = _WORD_LIST.split()

FIRST_BYTE_ID = 3  # in both kinds: token 3 + b is byte b alone

# Pieces of characters, so that a token may hold a part of one: the starts of emoji and of common CJK characters.
PARTIAL_CHARACTERS = ("😀".encode()[:2], "😀".encode()[:3], "你".encode()[:2], "好".encode()[1:], "é".encode())

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)


def write_tiny_tokenizer(
    folder: str | Path, vocab_size: int = 512, kind: Literal["byte_level", "metaspace"] = "byte_level"
) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json with exactly `vocab_size` ids.

    byte_level (GPT-2 style): <|endoftext|> 0 (pad), <|im_start|> 1 (bos, never added), <|im_end|> 2 (eos), then the 256
    bytes, then merges. metaspace (Llama-2 style): <unk> 0, <s> 1 (bos, added), </s> 2 (eos), then 256 byte tokens,
    letters, merges.
    """
    if kind == "byte_level":
        tokenizer, names, template = make_byte_level_tokenizer(vocab_size), _BYTE_LEVEL_NAMES, CHATML_TEMPLATE
    else:
        tokenizer, names, template = make_metaspace_tokenizer(vocab_size), _METASPACE_NAMES, INST_TEMPLATE
    assert tokenizer.get_vocab_size() == vocab_size
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {**names, "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": 1_000_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2), encoding="utf-8")


_BYTE_LEVEL_NAMES = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
}
_METASPACE_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make_byte_level_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Return a GPT-2 style BPE over bytes; `vocab_size` must be at least 300."""
    assert vocab_size >= 300, "byte_level needs 3 special tokens, 256 bytes and some merges"
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*specials, *byte_alphabet()])}
    pieces = [byte_level_name(piece) for piece in PARTIAL_CHARACTERS]
    pieces += [name for word in WORDS for name in ("Ġ" + word, word)]
    merges = _add_pieces(vocab, pieces, vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def make_metaspace_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Return a Llama-2 style BPE with ▁ for spaces and byte tokens; `vocab_size` must be at least 400."""
    assert vocab_size >= 400, "metaspace needs 3 special tokens, 256 byte tokens, 96 characters and some merges"
    specials = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *(chr(code) for code in range(0x21, 0x7F)), "é"]
    vocab = {token: i for i, token in enumerate([*specials, *byte_tokens, *letters])}
    pieces = ["▁▁", *(name for word in WORDS for name in ("▁" + word, word))]
    merges = _add_pieces(vocab, pieces, vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def byte_alphabet() -> list[str]:
    """Return GPT-2's character for each byte, in the order of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level_name(text: str | bytes) -> str:
    """Return the vocabulary's name of a byte-level token that holds `text`."""
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in (text.encode() if isinstance(text, str) else text))


def _add_pieces(vocab: dict[str, int], pieces: Iterable[str], vocab_size: int) -> list[tuple[str, str]]:
    """Grow `vocab` to `vocab_size` by the prefixes of `pieces`, then by pairs of letters; return the merges."""
    merges = []
    letters = "abcdefghijklmnopqrstuvwxyz"
    fillers = (a + b for a, b in itertools.product(letters, letters.upper()))
    more_fillers = ("".join(triple) for triple in itertools.product(letters, letters, letters))
    for piece in itertools.chain(pieces, fillers, more_fillers):
        for end in range(2, len(piece) + 1):
            if len(vocab) == vocab_size:
                return merges
            if piece[:end] not in vocab:
                vocab[piece[:end]] = len(vocab)
                merges.append((piece[: end - 1], piece[end - 1]))
    raise AssertionError(f"vocab_size {vocab_size} is more than this tiny tokenizer can fill")
