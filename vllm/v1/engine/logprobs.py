"""The text and bytes of scored tokens, for `decoded_token` and for HTTP; computed when they are read."""

from collections.abc import Sequence

from vllm.sampling_params import SamplingParams
from vllm.tokenizers.token_bytes import TokenBytes, decode_bytes
from vllm.tokenizers.tokenizer import Tokenizer


class SequenceTexts:
    """Gives text to the scored rows of one sequence (the `TokenTexts` of vllm/logprobs/texts.py).

    Row i scores token i of `token_ids`, a list that may still grow; `context` stands before it (the prompt, when the
    rows are of generated tokens). Each id of a row is decoded by itself behind the bytes of an incomplete character
    that the tokens before the row left: one that completes it carries the whole character, one that holds a part has
    "". So a text depends on the tokens chosen before, never on the row's other entries. Special tokens show their name.
    Once the sequence was cut (`end`), its last token shows U+FFFD for what no token can complete any more.
    """

    __slots__ = ("_cut_at", "_earlier", "_is_start", "_shown", "_skips_special", "_token_bytes", "_token_ids")

    def __init__(
        self,
        token_bytes: TokenBytes,
        token_ids: Sequence[int],
        *,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        shown = token_bytes.shown(skip_special_tokens)
        self._token_bytes = token_bytes
        self._token_ids = token_ids
        self._shown = shown
        self._skips_special = skip_special_tokens
        self._earlier = shown.pending_bytes(context)
        self._is_start = shown.strips_leading_space and shown.starts_text(context)
        self._cut_at = -1  # the last row, when nothing follows it

    def end(self) -> None:
        """Take note that the sequence ends in the middle of what its last token began: nothing follows it."""
        self._cut_at = len(self._token_ids) - 1

    def decode_row(self, row_index: int, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each of `token_ids` has when it stands in row `row_index`."""
        pending = self._shown.pending_bytes(self._token_ids, row_index, self._earlier)
        if row_index == self._cut_at:
            return [self._decode(row_index, pending, id_, is_last=id_ == self._token_ids[-1]) for id_ in token_ids]
        if not pending and not self._starts_text(row_index):
            text_alone = self._token_bytes.text_alone
            return [text_alone[token_id] for token_id in token_ids]
        return [self._decode(row_index, pending, token_id) for token_id in token_ids]

    def bytes_at(self, row_index: int, token_id: int) -> bytes:
        """Return the true bytes of a token in row `row_index`; those of shown tokens, joined, decode to the text."""
        if self._starts_text(row_index):
            return self._token_bytes.at_text_start(token_id)
        return self._token_bytes[token_id]

    def _decode(self, row_index: int, pending: bytes, token_id: int, is_last: bool = False) -> str:
        if self._skips_special and self._token_bytes.is_special(token_id):
            return self._token_bytes.text_alone[token_id]  # no part of the text: the pending bytes wait on
        return decode_bytes(pending + self.bytes_at(row_index, token_id), final=is_last)[0]

    def _starts_text(self, row_index: int) -> bool:
        """Return whether nothing shows before the row, in a tokenizer that strips the first space of a text."""
        if not self._is_start:
            return False
        bytes_of, token_ids = self._shown.bytes_of, self._token_ids
        return not any(bytes_of[token_ids[i]] for i in range(row_index))


def make_token_texts(
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    context: Sequence[int] = (),
    is_whole: bool = False,
) -> SequenceTexts | None:
    """Return the texts of a request's scored rows; None without a tokenizer or with detokenize=False.

    For prompt logprobs `token_ids` is the prompt; for sample logprobs the list of generated ids (kept, not copied: it
    may grow), with the prompt as `context`. `is_whole` says that nothing follows `token_ids`.
    """
    if tokenizer is None or not params.detokenize:
        return None
    texts = SequenceTexts(
        tokenizer.token_bytes, token_ids, context=context, skip_special_tokens=params.skip_special_tokens
    )
    if is_whole:
        texts.end()
    return texts
