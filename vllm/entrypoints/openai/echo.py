"""The prompt as it stands in front of an echoed completion: its text, and where each of its tokens stands in it."""

from collections.abc import Sequence

from vllm.entrypoints.openai.logprobs import CompletionLogprobs, encode_top_map, name_tokens, read_rows
from vllm.logprobs import FlatLogprobs
from vllm.tokenizers.token_bytes import decode_bytes
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
        self._texts: SequenceTexts | None = None
        self.offsets = [0] * len(token_ids)  # [num_tokens] characters
        self._first_word = ""
        self.text = text or ""
        if tokenizer is None:
            return
        self._texts = SequenceTexts(tokenizer.token_bytes, token_ids, skip_special_tokens=False)
        shown = _find_shown(tokenizer, token_ids, text)
        if shown.start > 0:  # nothing of the hidden tokens stands before the first one that shows
            self._texts = SequenceTexts(tokenizer.token_bytes, token_ids)
        words: list[str] = []
        length = 0
        for i, token_id in enumerate(token_ids):
            self.offsets[i] = length
            word = self._texts.decode_row(i, [token_id])[0]
            if i == 0:
                self._first_word = word
            if i in shown:
                words.append(word)
                length += len(word)
        self.text = "".join(words)
        if is_whole:
            pending = tokenizer.token_bytes.shown(False).pending_bytes(token_ids)
            self.text += decode_bytes(pending, final=True)[0]

    def write(self, scores: FlatLogprobs, *, as_token_ids: bool, max_entries: int) -> CompletionLogprobs:
        """Return the entries of the prompt's tokens; the first one has no value."""
        written = CompletionLogprobs()
        as_token_ids = as_token_ids or self._texts is None
        names = name_tokens(self._token_ids)
        rows = read_rows(scores, texts=self._texts, max_entries=max_entries)
        for i, row in enumerate(rows):
            if row is None:
                word = names[i] if as_token_ids else self._first_word if i == 0 else self._decode(i)
                written.append(self.offsets[i], word, None, None)
                continue
            word = names[i] if as_token_ids else row.texts[0] or ""
            written.append(self.offsets[i], word, row.values[0], encode_top_map(row, as_token_ids))
        return written

    def _decode(self, i: int) -> str:
        assert self._texts is not None
        return self._texts.decode_row(i, [self._token_ids[i]])[0]


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
