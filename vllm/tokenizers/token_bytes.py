"""The true bytes of each token, and the text that bytes make when they arrive a token at a time."""

import codecs
import enum
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tokenizers

from vllm.exceptions import ModelLoadError

MAX_PENDING_BYTES = 3  # a character of UTF-8 has at most 4 bytes, so an incomplete one at most 3


class LeadingSpace(enum.Enum):
    """What the tokenizer's decoder takes away from the start of a text."""

    KEPT = enum.auto()
    ONE_STRIPPED = enum.auto()  # one space
    FIRST_TOKEN_STRIPPED = enum.auto()  # every space of the first token


Value = TypeVar("Value")


class _LazyTable(dict[int, Value]):
    """A dict over token ids that makes a value when it is first looked up; a hit costs a plain dict lookup."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int], Value]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> Value:
        value = self[token_id] = self._make(token_id)
        return value


class ShownTokens:
    """How tokens show in a text, with special tokens skipped or not.

    `bytes_of[id]` holds what the token adds to a text, `text_of[id]` the same as a string where it is made of whole
    characters, else None. Both are lazy: a token is decoded when it is first seen.
    """

    __slots__ = ("bytes_of", "strips_leading_space", "text_of", "token_bytes")

    def __init__(self, token_bytes: "TokenBytes", skip_special_tokens: bool) -> None:
        self.token_bytes = token_bytes
        self.strips_leading_space = token_bytes.strips_leading_space
        skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
        self.bytes_of: dict[int, bytes] = _LazyTable(lambda i: b"" if i in skipped else token_bytes[i])
        self.text_of: dict[int, str | None] = _LazyTable(lambda i: _whole_text(self.bytes_of[i]))

    def starts_text(self, token_ids: Sequence[int]) -> bool:
        """Return whether nothing of `token_ids` shows, so that the next token is the first of its text."""
        bytes_of = self.bytes_of
        return not any(bytes_of[token_id] for token_id in token_ids)

    def pending_bytes(self, token_ids: Sequence[int], end: int | None = None, earlier: bytes = b"") -> bytes:
        """Return the bytes of an incomplete character that the first `end` tokens end with.

        UTF-8 is self-synchronising: the last three bytes decide. `earlier` is what was pending before the first.
        """
        position = len(token_ids) if end is None else end
        tail = b""
        while position > 0 and len(tail) < MAX_PENDING_BYTES:
            position -= 1
            if self.text_of[token_ids[position]]:  # whole characters: nothing before this token matters
                return decode_bytes(tail)[1]
            tail = self.bytes_of[token_ids[position]] + tail
        if position == 0:
            tail = earlier + tail
        return decode_bytes(tail[-MAX_PENDING_BYTES:])[1]


class TokenBytes:
    """Token id → true bytes for the whole vocabulary: `token_bytes[id]`.

    Byte-level characters, ▁ and <0xNN> tokens are translated as the tokenizer's decoder does it; a special token is its
    name; an id that the tokenizer doesn't know is empty. A token's bytes may be a part of a character. Nothing is
    computed at start-up: a token is decoded when it is first asked for.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        rules = _read_decoder(tokenizer)
        self.leading_space = rules.leading_space
        self._start_of_text = rules.start_of_text
        self._name_of = tokenizer.id_to_token
        self._to_bytes = rules.to_bytes
        # The byte-level alphabet is for the model's own tokens; an added token stands for its literal text. Where ▁
        # means a space, only special tokens are literal: such vocabularies list runs of ▁ among the added ones.
        self._literal_ids = frozenset(added) if rules.added_are_literal else self.special_ids
        self._bytes_of: dict[int, bytes] = _LazyTable(self._make_bytes)
        self._shown = {skip: ShownTokens(self, skip) for skip in (False, True)}
        # A token by itself: its whole characters, without what it begins and does not end.
        self.text_alone: dict[int, str] = _LazyTable(lambda token_id: decode_bytes(self[token_id])[0])

    def __getitem__(self, token_id: int) -> bytes:
        return self._bytes_of[token_id]

    def is_special(self, token_id: int) -> bool:
        """Return whether decoding with skip_special_tokens leaves this token out."""
        return token_id in self.special_ids

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text loses the space that its first token begins with."""
        return self.leading_space is not LeadingSpace.KEPT

    def at_text_start(self, token_id: int) -> bytes:
        """Return the token's bytes where it is the first to show in a text."""
        if token_id in self.special_ids:
            return self[token_id]
        return self._start_of_text(self[token_id])

    def shown(self, skip_special_tokens: bool) -> ShownTokens:
        """Return how tokens show, with special tokens skipped or not; one object for every request."""
        return self._shown[bool(skip_special_tokens)]

    def _make_bytes(self, token_id: int) -> bytes:
        # The library's ids are unsigned 32-bit numbers: others are unknown, not an OverflowError.
        name = self._name_of(token_id) if 0 <= token_id < 2**32 else None
        if name is None:
            return b""
        return name.encode() if token_id in self._literal_ids else self._to_bytes(name)


def decode_bytes(data: bytes, final: bool = False) -> tuple[str, bytes]:
    """Decode UTF-8; return the text and the incomplete character that `data` ends with (empty when `final`).

    Bytes that can't become a character are one U+FFFD for each longest piece that could have begun one (the practice
    of Unicode, of Python and of the tokenizers library alike).
    """
    text, num_consumed = codecs.utf_8_decode(data, "replace", final)
    return text, data[num_consumed:]


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


# ---------------------------------------------------------------- reading the decoder


class _Rules:
    """How the model's tokens turn into bytes, read from the tokenizer's decoder."""

    def __init__(self) -> None:
        self.to_bytes: Callable[[str], bytes] = str.encode
        self.leading_space = LeadingSpace.KEPT
        self.added_are_literal = False

    def start_of_text(self, data: bytes) -> bytes:
        if self.leading_space is LeadingSpace.ONE_STRIPPED:
            return data.removeprefix(b" ")
        if self.leading_space is LeadingSpace.FIRST_TOKEN_STRIPPED:
            return data.replace(b" ", b"")
        return data


def _read_decoder(tokenizer: tokenizers.Tokenizer) -> _Rules:
    rules = _Rules()
    if tokenizer.decoder is None:  # the library joins tokens with spaces then
        rules.to_bytes = lambda name: b" " + name.encode()
        rules.leading_space = LeadingSpace.ONE_STRIPPED
        rules.added_are_literal = True
        return rules
    steps = _flatten(json.loads(tokenizer.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    replacements: list[tuple[str, str]] = []
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace":
            replacements.append((step["replacement"], " "))
            if step.get("prepend_scheme", "always") != "never":
                rules.leading_space = LeadingSpace.FIRST_TOKEN_STRIPPED
        elif kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and "Fuse" in kinds[: kinds.index("Strip")] and step["content"] == " ":
            _check(step["start"] <= 1 and step["stop"] == 0, step)
            if step["start"]:
                rules.leading_space = LeadingSpace.ONE_STRIPPED
        else:
            _check(kind in ("ByteLevel", "ByteFallback", "Fuse"), step)
    if "ByteLevel" in kinds:
        rules.to_bytes = _byte_level_bytes
        rules.added_are_literal = True
    else:
        rules.to_bytes = _make_piece_reader(replacements, "ByteFallback" in kinds)
    return rules


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _check(is_served: bool, step: dict[str, Any]) -> None:
    if not is_served:
        raise ModelLoadError(
            f"the tokenizer's decoder step {json.dumps(step)} is not served; served are ByteLevel, Metaspace, "
            "ByteFallback, Fuse, Replace of a string, and Strip of one leading space after Fuse"
        )


def _make_byte_of_character() -> dict[int, int]:
    """Return GPT-2's alphabet read backwards: printable Latin-1 stands for itself, the rest for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _make_byte_of_character()


def _byte_level_bytes(name: str) -> bytes:
    if not all(ord(character) in _BYTE_OF_CHARACTER for character in name):
        return name.encode()  # not made of the alphabet: stands for itself
    return name.translate(_BYTE_OF_CHARACTER).encode("latin-1")  # translated to code points below 256


def _make_piece_reader(replacements: list[tuple[str, str]], has_byte_tokens: bool) -> Callable[[str], bytes]:
    byte_tokens = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if has_byte_tokens else {}

    def read(name: str) -> bytes:
        if (byte := byte_tokens.get(name)) is not None:
            return byte
        for old, new in replacements:
            name = name.replace(old, new)
        return name.encode()

    return read
