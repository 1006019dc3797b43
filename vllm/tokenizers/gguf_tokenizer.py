"""A tokenizer from the metadata of a .gguf file."""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from vllm.exceptions import ModelLoadError
from vllm.tokenizers.pre_tokenizers import find_pre_tokenization
from vllm.tokenizers.tokenizer import Tokenizer, TokenizerSettings

_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TEMPLATE_KEY = "tokenizer.chat_template"


class TokenType(enum.IntEnum):
    """tokenizer.ggml.token_type: what a token is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def make_tokenizer_from_gguf(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """Return the tokenizer that a file's metadata describe: byte-level BPE ("gpt2") or Llama's pieces ("llama").

    `name` is the file's, for errors. Raises ModelLoadError where the metadata lack something or contradict themselves.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelLoadError(f"{name} has no vocabulary (tokenizer.ggml.tokens); give another tokenizer")
    types = _read_types(metadata, len(tokens), name)
    if kind == "gpt2":
        backend, adds_bos = _make_byte_level(metadata, tokens, name)
    elif kind == "llama":
        backend, adds_bos = _make_pieces(metadata, tokens, types, name)
    else:
        raise ModelLoadError(
            f"{name} has a tokenizer of kind {kind!r} (tokenizer.ggml.model), which is not served; served are 'gpt2' "
            "and 'llama'; give another tokenizer"
        )
    special_tokens = _read_roles(metadata, tokens, name)
    specials = [tokens[i] for i, kind in enumerate(types) if kind in (TokenType.UNKNOWN, TokenType.CONTROL)]
    user_defined = [tokens[i] for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED]
    backend.add_special_tokens([_literal(token, special=True) for token in specials])
    backend.add_tokens([_literal(token, special=False) for token in user_defined])
    settings = TokenizerSettings(
        special_tokens=special_tokens,
        chat_templates=_read_chat_templates(metadata),
        add_bos_token=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        add_eos_token=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )
    return Tokenizer(backend, settings, name)


def _make_byte_level(
    metadata: Mapping[str, Any], tokens: Sequence[str], name: str
) -> tuple[tokenizers.Tokenizer, bool]:
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise ModelLoadError(f"{name} has no merges (tokenizer.ggml.merges) for its byte-level vocabulary")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    rules = find_pre_tokenization(metadata.get("tokenizer.ggml.pre"))
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.ignores_merges)
    except Exception as error:  # the library raises bare Exceptions
        raise ModelLoadError(f"{name}: tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if (normalizer := rules.make_normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rules.make_pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, rules.adds_bos


def _make_pieces(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], name: str
) -> tuple[tokenizers.Tokenizer, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelLoadError(f"{name} needs one score a token (tokenizer.ggml.scores) for its vocabulary of pieces")
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = tokens[unknown_id] if 0 <= unknown_id < len(tokens) else None
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=compute_merges(tokens, types, [float(score) for score in scores]),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_marker = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marker]) if adds_space else to_marker
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return backend, True


def compute_merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that a vocabulary of scored pieces implies.

    Such a vocabulary joins the neighbours whose union has the highest score; so each way to make a piece from two
    others is a merge, ranked by the score of what it makes.
    """
    ids = {
        token: i for i, token in enumerate(tokens) if types[i] in (TokenType.NORMAL, TokenType.USER_DEFINED) and token
    }
    ranked = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            if token[:cut] in ids and token[cut:] in ids:
                ranked.append((-scores[i], i, cut))
    ranked.sort()
    return [(tokens[i][:cut], tokens[i][cut:]) for _, i, cut in ranked]


def _read_types(metadata: Mapping[str, Any], num_tokens: int, name: str) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [TokenType.NORMAL] * num_tokens
    if len(types) != num_tokens:
        raise ModelLoadError(
            f"{name}: tokenizer.ggml.token_type has {len(types)} entries for {num_tokens} tokens; they must be as many"
        )
    return types.tolist() if hasattr(types, "tolist") else list(types)


def _read_roles(metadata: Mapping[str, Any], tokens: Sequence[str], name: str) -> dict[str, AddedToken]:
    roles = {}
    for role, key in _ROLES.items():
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ModelLoadError(f"{name}: {key} is {token_id}; it must be from 0 to {len(tokens) - 1}")
        roles[role] = _literal(tokens[token_id], special=True)
    return roles


def _read_chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {"default": metadata[_TEMPLATE_KEY]} if isinstance(metadata.get(_TEMPLATE_KEY), str) else {}
    prefix = f"{_TEMPLATE_KEY}."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    return templates | {key: text for key, text in named.items() if isinstance(text, str)}


def _literal(content: str, *, special: bool) -> AddedToken:
    return AddedToken(content, special=special, normalized=False)
