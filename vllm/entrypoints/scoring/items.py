"""What `vllm score` reads: lines of a file, each a text, or a context with choices."""

import hashlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from vllm.exceptions import VLLMValidationError, shorten

JSONL, LINES, WHOLE = "jsonl", "lines", "whole"  # an object a line; a text a line; one text


class SourceLine(NamedTuple):
    """A line of the input that holds something, numbered from 1."""

    number: int
    raw: bytes
    end: int  # where it ends in the file

    @property
    def digest(self) -> str:
        """A short name for its content, by which a later run knows it again."""
        return hashlib.blake2b(self.raw, digest_size=8).hexdigest()


class TextItem(NamedTuple):
    """A text whose tokens are scored."""

    text: str
    own_id: Any = None


class ChoiceItem(NamedTuple):
    """A context whose choices are compared."""

    context: Any  # a text or token ids
    choices: list[Any]
    answer: int | None = None  # which choice is right
    own_id: Any = None


def find_kind(name: str, kind: str | None) -> str:
    """Return how a file is read: as its name says, unless `kind` does.

    Raises:
        VLLMValidationError: neither says it.
    """
    if kind is not None:
        return kind
    suffix = pathlib.PurePath(name).suffix.lower()
    if suffix in (".jsonl", ".json", ".ndjson") or name == "-":
        return JSONL
    if suffix in (".txt", ".text"):
        return LINES
    raise VLLMValidationError(
        f"FILE must end in .jsonl or .txt, or --format must say what it holds; got {name}", parameter="format"
    )


def open_source(name: str) -> BinaryIO:
    """Return the input as a stream of bytes; - is the standard input.

    Raises:
        VLLMValidationError: it can't be read.
    """
    if name == "-":
        return sys.stdin.buffer
    try:
        return pathlib.Path(name).open("rb")
    except OSError as error:
        raise VLLMValidationError(f"{name} can't be read: {error.strerror or error}") from None


def read_lines(stream: BinaryIO, kind: str) -> Iterator[SourceLine]:
    """Yield the lines that hold something; a whole text is one line."""
    if kind == WHOLE:
        raw = stream.read()
        if raw.strip():
            yield SourceLine(1, raw, len(raw))
        return
    end = 0
    for number, raw in enumerate(stream, 1):
        end += len(raw)
        if raw.strip():
            yield SourceLine(number, raw.rstrip(b"\r\n"), end)


def parse_line(line: SourceLine, kind: str) -> TextItem | ChoiceItem:
    """Return what a line asks to be scored.

    Raises:
        VLLMValidationError: it is no text in UTF-8, or no JSON object of one of the two forms.
    """
    if kind != JSONL:
        try:
            return TextItem(line.raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise VLLMValidationError(f"not UTF-8: byte {error.start} of the line") from None
    try:
        item = msgspec.json.decode(line.raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise VLLMValidationError(f"not JSON: {error}") from None
    if not isinstance(item, dict):
        raise VLLMValidationError(f"must be a JSON object; got {type(item).__name__}")
    if ("text" in item) == ("context" in item or "choices" in item):
        raise VLLMValidationError(
            f"must have `text`, or `context` and `choices`; has {shorten(', '.join(item), 80) or 'nothing'}"
        )
    return _parse_text(item) if "text" in item else _parse_choices(item)


def _parse_text(item: dict[str, Any]) -> TextItem:
    if not isinstance(item["text"], str) or not item["text"]:
        raise VLLMValidationError("`text` must be a string that is not empty", parameter="text")
    return TextItem(item["text"], item.get("id"))


def _parse_choices(item: dict[str, Any]) -> ChoiceItem:
    context, choices, answer = item.get("context"), item.get("choices"), item.get("answer")
    if not isinstance(context, str | list):
        raise VLLMValidationError("`context` must be a string or a list of token ids", parameter="context")
    if not isinstance(choices, list) or not choices:
        raise VLLMValidationError("`choices` must be a list of at least one string", parameter="choices")
    if answer is not None and (
        isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices)
    ):
        raise VLLMValidationError(
            f"`answer` must be the number of a choice, from 0 to {len(choices) - 1}", parameter="answer", value=answer
        )
    return ChoiceItem(context, choices, answer, item.get("id"))
