"""Token ids in, text out, as the ids arrive.

The text is decoded from the tokens' true bytes: a character that is not complete yet waits for its other bytes. Stop
strings are looked for here, and text that could still become one is held back while an answer is streamed.
"""

from collections.abc import Sequence

from vllm.sampling_params import SamplingParams
from vllm.tokenizers.token_bytes import TokenBytes, decode_bytes
from vllm.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """One sequence's text. This one counts tokens and shows no text."""

    __slots__ = ("num_tokens",)
    stop: tuple[str, ...] = ()  # the stop strings that it looks for

    def __init__(self) -> None:
        self.num_tokens = 0  # tokens taken, up to and including the one that completed a stop string

    def update(self, new_token_ids: Sequence[int], *, stop_terminated: bool = False) -> str | None:
        """Take new tokens; return the stop string that they complete, if any.

        `stop_terminated` says that the last of them ended the sequence (EOS or a stop token id): its text is hidden.
        The caller drops the tokens that `num_tokens` does not count: they came after the stop string.
        """
        self.num_tokens += len(new_token_ids)
        return None

    def take_new_text(self, finished: bool, delta: bool) -> str:
        """Return the text that may be shown: what is new since the last call (`delta`), or all of it.

        Until the sequence is finished, the last characters that could begin a stop string are held back.
        """
        return ""

    def take_token(self, token_id: int) -> str:
        """Take a token and return what it adds to the text: `update` and `take_new_text` in one, without stop strings.

        For sequences that go on and are read by deltas.
        """
        self.num_tokens += 1
        return ""

    @property
    def output_text(self) -> str:
        """All text so far, nothing held back."""
        return ""


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer:
    """Return the detokenizer of a new sequence; without a tokenizer, or with detokenize=False, its text stays empty."""
    if tokenizer is None or not params.detokenize:
        return Detokenizer()
    stop = params.stop or ()
    return IncrementalDetokenizer(
        tokenizer.token_bytes,
        prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        stop=(stop,) if isinstance(stop, str) else stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )


class IncrementalDetokenizer(Detokenizer):
    """The text of one sequence, grown token by token: constant work a token, whatever the length.

    The prompt's end counts: a character that it leaves incomplete is completed by the first tokens, and a leading space
    is stripped only if nothing of the prompt shows. When the sequence is finished, bytes that still wait become U+FFFD,
    as in the tokenizer's own decode of the whole; a sequence without tokens has no text. `take_new_text` is called
    either always with `delta` or never.

    `spaces_between_special_tokens` is accepted and changes nothing: the tokenizers served put no spaces there.
    """

    __slots__ = (
        "_bytes_of",
        "_held",
        "_include_stop",
        "_is_start",
        "_is_stopped",
        "_longest_stop",
        "_min_tokens",
        "_parts",
        "_pending",
        "_taken",
        "_text_of",
        "_token_bytes",
        "_window",
        "stop",
    )

    def __init__(
        self,
        token_bytes: TokenBytes,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        super().__init__()
        shown = token_bytes.shown(skip_special_tokens)
        self._token_bytes = token_bytes
        self._text_of = shown.text_of
        self._bytes_of = shown.bytes_of
        self._pending = shown.pending_bytes(prompt_token_ids)
        self._is_start = shown.strips_leading_space and shown.starts_text(prompt_token_ids)
        self.stop = tuple(stop)
        self._longest_stop = max(map(len, self.stop), default=0)
        self._include_stop = include_stop_str_in_output
        self._held = 0 if include_stop_str_in_output or not self.stop else self._longest_stop - 1  # characters
        self._min_tokens = min_tokens
        self._is_stopped = False
        self._window = ""  # the last (longest stop − 1) characters
        self._taken: list[str] = []  # handed out as deltas
        self._parts: list[str] = []  # not handed out yet

    def update(self, new_token_ids: Sequence[int], *, stop_terminated: bool = False) -> str | None:
        if self._is_stopped:
            return None
        shown_ids = new_token_ids
        if stop_terminated and not self._include_stop:
            shown_ids = new_token_ids[:-1]
        if self.stop:
            stop = self._take_with_stops(shown_ids)
            if stop is not None:
                return stop
        else:
            self._take_many(shown_ids)
            self.num_tokens += len(shown_ids)
        self.num_tokens += len(new_token_ids) - len(shown_ids)
        return None

    def take_new_text(self, finished: bool, delta: bool) -> str:
        if finished:
            self._flush()
        text = "".join(self._parts)
        end = len(text) if finished else max(len(text) - self._held, 0)
        shown = text[:end]
        if not delta:
            self._parts = [text]
        elif shown:
            self._taken.append(shown)
            self._parts = [text[end:]]
        return shown

    def take_token(self, token_id: int) -> str:
        if self._held or self._parts or self._is_stopped:
            self.update((token_id,))
            return self.take_new_text(finished=False, delta=True)
        self.num_tokens += 1
        text = self._text_of[token_id]
        if text is None or self._pending or self._is_start:
            text = self._decode(token_id)
        if text:
            self._taken.append(text)
        return text

    @property
    def output_text(self) -> str:
        return "".join(self._taken) + "".join(self._parts)

    def _decode(self, token_id: int) -> str:
        """Return the text that a token brings where it can't be read by itself."""
        data = self._bytes_of[token_id]
        if not data:
            return ""
        if self._is_start:
            self._is_start = False
            data = self._token_bytes.at_text_start(token_id)
        text, self._pending = decode_bytes(self._pending + data)
        return text

    def _take_many(self, token_ids: Sequence[int]) -> None:
        text_of, parts = self._text_of, self._parts
        if len(token_ids) > 1 and not self._pending and not self._is_start:
            texts = [text_of[token_id] for token_id in token_ids]
            if None not in texts:  # whole characters throughout, as nearly always
                parts += texts  # type: ignore[arg-type]
                return
        for token_id in token_ids:
            text = text_of[token_id]
            if text is None or self._pending or self._is_start:
                text = self._decode(token_id)
            if text:
                parts.append(text)

    def _flush(self) -> None:
        if self._pending and not self._is_stopped and self.num_tokens:  # else they are the prompt's
            self._parts.append(decode_bytes(self._pending, final=True)[0])
            self._pending = b""

    # ------------------------------------------------------------ stop strings

    def _take_with_stops(self, token_ids: Sequence[int]) -> str | None:
        for token_id in token_ids:
            self.num_tokens += 1
            text = self._text_of[token_id]
            if text is None or self._pending or self._is_start:
                text = self._decode(token_id)
            if not text:
                continue
            self._parts.append(text)
            seen = self._window + text
            if self.num_tokens > self._min_tokens and (stop := self._find_stop(seen, len(self._window))) is not None:
                return stop
            self._window = seen[-self._longest_stop + 1 :] if self._longest_stop > 1 else ""
        return None

    def _find_stop(self, seen: str, num_old: int) -> str | None:
        """Cut the text at the stop string that ends first, of those that end behind `num_old` characters of `seen`."""
        best: tuple[int, int] | None = None  # end in `seen`, place in the list
        for order, stop in enumerate(self.stop):
            start = seen.find(stop, max(num_old - len(stop) + 1, 0))
            if start >= 0 and (best is None or (start + len(stop), order) < best):
                best = (start + len(stop), order)
        if best is None:
            return None
        end, order = best
        stop = self.stop[order]
        num_surplus = len(seen) - (end if self._include_stop else end - len(stop))
        text = "".join(self._parts)
        self._parts = [text[: len(text) - num_surplus]]
        self._pending = b""
        self._is_stopped = True
        return stop
