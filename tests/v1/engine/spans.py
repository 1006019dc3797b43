"""Where tokens stand in the text that the detokenizer makes of them."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.tokenizers.token_bytes import TokenBytes
from vllm.v1.engine.detokenizer import IncrementalDetokenizer


class TokenSpan(NamedTuple):
    """Where a token shows: text[start : start + len(text)] == text for a token that shows something."""

    start: int  # characters
    text: str  # "" for a hidden token and for one that holds a part of a character


def compute_token_spans(
    token_bytes: TokenBytes,
    token_ids: Sequence[int],
    *,
    context: Sequence[int] = (),
    skip_special_tokens: bool = True,
    start: int = 0,
) -> list[TokenSpan]:
    """Return the place of each token in the uncut text that `token_ids` make behind the tokens of `context`.

    The text is that of IncrementalDetokenizer with the prompt `context`; `start` is the place of its first character.
    """
    detokenizer = IncrementalDetokenizer(token_bytes, context, skip_special_tokens=skip_special_tokens)
    spans = []
    for token_id in token_ids:
        detokenizer.update((token_id,))
        text = detokenizer.take_new_text(finished=False, delta=True)
        spans.append(TokenSpan(start, text))
        start += len(text)
    return spans
