"""Where the text of scored tokens comes from."""

from collections.abc import Sequence
from typing import Protocol


class TokenTexts(Protocol):
    """Gives text to the tokens of one sequence's scored rows.

    Row numbers count from the sequence's first row (of a prompt: positions; of what was generated: tokens), so a slice
    still knows the bytes of a character that began before it.
    """

    def decode_row(self, row_index: int, token_ids: Sequence[int]) -> Sequence[str | None]:
        """Return the text that each of `token_ids` has when it stands in row `row_index`."""
        ...


class StoredTexts:
    """Texts that were worked out before: what is left of another `TokenTexts` after a pickle."""

    __slots__ = ("rows",)

    def __init__(self, rows: list[dict[int, str | None]]) -> None:
        self.rows = rows  # token id → text, a dict a row

    def decode_row(self, row_index: int, token_ids: Sequence[int]) -> Sequence[str | None]:
        row = self.rows[row_index]
        return [row[token_id] for token_id in token_ids]


class JoinedTexts:
    """The texts of rows from several sequences."""

    __slots__ = ("places", "sources")

    def __init__(self) -> None:
        self.sources: list[TokenTexts | None] = []  # one a row, like places
        self.places: list[int] = []  # the row's number in its source

    def extend(self, texts: TokenTexts | None, places: Sequence[int]) -> None:
        """Add rows of one source."""
        if isinstance(texts, JoinedTexts):  # its own sources: joining again and again nests nothing
            self.sources += [texts.sources[place] for place in places]
            self.places += [texts.places[place] for place in places]
        else:
            self.sources += [texts] * len(places)
            self.places += places

    def decode_row(self, row_index: int, token_ids: Sequence[int]) -> Sequence[str | None]:
        texts = self.sources[row_index]
        return [None] * len(token_ids) if texts is None else texts.decode_row(self.places[row_index], token_ids)
