"""The prompt as it stands in front of an echoed completion: its text, and where each of its tokens stands in it."""

import itertools
from collections.abc import Sequence

from vllm.entrypoints.openai.logprobs import CompletionLogprobs, encode_top_map, name_tokens, read_rows
from vllm.logprobs import FlatLogprobs
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.logprobs import SequenceTexts


class EchoedPrompt:
    """What `echo` puts in front of each choice.

    A prompt of token ids shows its special tokens; a text prompt shows those that it spells out, not those that the
    tokenizer put around it. The text is what the tokens make: the caller's own, but for characters that the tokenizer
    normalises. `is_whole` says that nothing will follow, so that an incomplete character at the end becomes U+FFFD;
    otherwise the first generated tokens complete it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, token_ids: Sequence[int], text: str | None, *, is_whole: bool
    ) -> None:
        self._token_ids = token_ids
        self._words = name_tokens(token_ids)
        self._texts: SequenceTexts | None = None
        self.offsets = [0] * len(token_ids)  # [num_tokens] characters
        self.text = text or ""
        if tokenizer is None:
            return
        shown = _find_shown(tokenizer, token_ids, text)
        # nothing of hidden tokens stands before the first one that shows
        self._texts = SequenceTexts(tokenizer.token_bytes, token_ids, skip_special_tokens=shown.start > 0)
        if is_whole:
            self._texts.end()
        self._words = [self._texts.decode_row(i, [token_id])[0] for i, token_id in enumerate(token_ids)]
        lengths = [len(word) if i in shown else 0 for i, word in enumerate(self._words)]
        self.offsets = list(itertools.accumulate(lengths[:-1], initial=0))
        self.text = "".join(self._words[shown.start : shown.stop])

    def write(self, scores: FlatLogprobs, *, as_token_ids: bool, max_entries: int) -> CompletionLogprobs:
        """Return the entries of the prompt's tokens; the first one has no value."""
        written = CompletionLogprobs()
        names = name_tokens(self._token_ids) if as_token_ids else self._words
        rows = read_rows(scores.with_text(self._texts), as_token_ids=as_token_ids, max_entries=max_entries)
        for offset, name, row in zip(self.offsets, names, rows, strict=True):
            if row is None:
                written.append(offset, name, None, None)
            else:
                written.append(offset, name, row.values[0], encode_top_map(row))
        return written


def _find_shown(tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None) -> range:
    """Return the positions that are part of the text: not those that the tokenizer put in front of it or behind it."""
    everything = range(len(token_ids))
    special_ids = tokenizer.token_bytes.special_ids
    if text is None or not token_ids or not {token_ids[0], token_ids[-1]} & special_ids:
        return everything
    bare = tokenizer.encode(text, add_special_tokens=False)
    for first in range(len(token_ids) - len(bare) + 1):
        if list(token_ids[first : first + len(bare)]) == bare:
            return range(first, first + len(bare))
        if token_ids[first] not in special_ids:
            break
    return everything
