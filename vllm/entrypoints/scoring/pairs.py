"""From contexts and continuations, texts or token ids, to pairs of token ids that fit the model."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError, shorten
from vllm.inputs import ParsedPrompt, parse_prompt
from vllm.tokenizers.tokenizer import Tokenizer

JOINT, SEPARATE = "joint", "separate"
TOKENIZATIONS = (JOINT, SEPARATE)


class ContextKey(NamedTuple):
    """A context as it is computed; equal ones are computed once."""

    cache_salt: str
    token_ids: tuple[int, ...]


class ScoredPair(NamedTuple):
    """A continuation to be scored behind its context."""

    context: ContextKey
    token_ids: tuple[int, ...]  # of the continuation
    num_bytes: int | None
    num_cut_context_tokens: int = 0
    num_cut_tokens: int = 0


class PairEncoder:
    """Tokenises and checks the pairs of one call.

    `joint` tokenises as lm-eval does: trailing white space of the context moves to the continuation, which gets the
    tokens of context + continuation behind as many as the context alone has. `separate` tokenises each by itself, as
    happens in both ways to a pair with token ids in it. Special tokens that the model puts in front of a text stand in
    front of the context. Use one from a single thread.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        tokenization: str = JOINT,
        add_special_tokens: bool = True,
    ) -> None:
        if tokenization not in TOKENIZATIONS:
            raise VLLMValidationError(
                f"tokenization must be one of {', '.join(TOKENIZATIONS)}; got {shorten(tokenization, 40)!r}",
                parameter="tokenization",
                value=tokenization,
            )
        self._vocab_size = model_config.vocab_size
        self._max_model_len = model_config.max_model_len
        self._tokenizer = tokenizer
        self._is_joint = tokenization == JOINT
        self._adds_special_tokens = add_special_tokens
        if self._max_model_len < 2:
            raise VLLMValidationError("a continuation is scored behind a context: max_model_len must be at least 2")

    # ------------------------------------------------------------ all pairs of a call

    def encode_all(self, contexts: Sequence[Any], continuations: Sequence[Sequence[Any]]) -> list[list[ScoredPair]]:
        """Return the pairs of each context, in the order of its continuations.

        Raises:
            VLLMValidationError: something is empty, too long or unknown to the model; the message names its place.
        """
        parsed_contexts = [self._parse(f"contexts[{i}]", "contexts", context) for i, context in enumerate(contexts)]
        parsed = [
            [self._parse(f"continuations[{i}][{j}]", "continuations", given) for j, given in enumerate(row)]
            for i, row in enumerate(continuations)
        ]
        tokenised = [
            [self._choose_texts(context, continuation) for continuation in row]
            for context, row in zip(parsed_contexts, parsed, strict=True)
        ]
        token_ids = self._encode_texts([text for row in tokenised for texts in row for text in texts if text])
        return [
            [
                self._make_pair(token_ids, context, continuation, texts, f"continuations[{i}][{j}]")
                for j, (continuation, texts) in enumerate(zip(row, row_texts, strict=True))
            ]
            for i, (context, row, row_texts) in enumerate(zip(parsed_contexts, parsed, tokenised, strict=True))
        ]

    def encode_text(self, text: str) -> tuple[int, list[int]]:
        """Return how many special tokens stand in front of a text, and the token ids of both."""
        leading = self._leading_ids
        return len(leading), [*leading, *self._get_tokenizer("text").encode(text, add_special_tokens=False)]

    def _parse(self, place: str, parameter: str, given: Any) -> ParsedPrompt:
        try:
            parsed = parse_prompt(given)
        except VLLMValidationError as error:
            raise VLLMValidationError(
                f"{place}: {error.message.removeprefix('prompt 0: ')}", parameter=parameter, value=error.value
            ) from None
        except TypeError:
            raise VLLMValidationError(
                f"{place} must be a str or a list of token ids; got {type(given).__name__}", parameter=parameter
            ) from None
        if parameter == "continuations" and isinstance(given, Mapping):
            raise VLLMValidationError(f"{place} must be a str or a list of token ids; got a dict", parameter=parameter)
        if parsed.token_ids is not None:
            self._check_ids(place, parameter, parsed.token_ids)
        elif parameter == "continuations" and not parsed.text:
            raise VLLMValidationError(f"{place} is empty: there is nothing to score", parameter=parameter, value="")
        return parsed

    def _check_ids(self, place: str, parameter: str, token_ids: Sequence[int]) -> None:
        if not token_ids:
            reason = "there is nothing to score" if parameter == "continuations" else "a first token has no score"
            raise VLLMValidationError(f"{place} is empty: {reason}", parameter=parameter, value="[]")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise VLLMValidationError(
                    f"{place} holds token id {token_id}; token ids must be from 0 to {self._vocab_size - 1}",
                    parameter=parameter,
                    value=token_id,
                )

    # ------------------------------------------------------------ tokenising

    def _choose_texts(self, context: ParsedPrompt, continuation: ParsedPrompt) -> tuple[str, str]:
        """Return the text of a pair's context, and the one that ends with the continuation; "" for token ids."""
        first = context.text or "" if context.token_ids is None else ""
        rest = continuation.text or "" if continuation.token_ids is None else ""
        return (first.rstrip(), first + rest) if rest and self._is_joint else (first, rest)

    def _encode_texts(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Return the token ids of each text; equal ones are tokenised once."""
        if not texts:
            return {}
        unique = list(dict.fromkeys(texts))
        encoded = self._get_tokenizer("contexts").encode_batch(unique, add_special_tokens=False)
        return dict(zip(unique, encoded, strict=True))

    def _make_pair(
        self,
        encoded: Mapping[str, list[int]],
        context: ParsedPrompt,
        continuation: ParsedPrompt,
        texts: tuple[str, str],
        place: str,
    ) -> ScoredPair:
        is_text = context.token_ids is None
        context_ids: Sequence[int] = encoded.get(texts[0], ()) if context.token_ids is None else context.token_ids
        if continuation.token_ids is not None:
            token_ids = continuation.token_ids
        else:
            token_ids = encoded[texts[1]]
            if is_text and self._is_joint:
                token_ids = token_ids[len(context_ids) :]
            if not token_ids:
                raise VLLMValidationError(
                    f"{place} has no tokens of its own behind its context: the tokenizer joins the two",
                    parameter="continuations",
                    value=continuation.text,
                )
            self._check_ids(place, "continuations", token_ids)
        if is_text:
            context_ids = self._with_leading_ids(context_ids, place)
            self._check_ids(place, "contexts", context_ids)
        return self._fit(context, tuple(context_ids), tuple(token_ids), continuation.text)

    def _with_leading_ids(self, context_ids: Sequence[int], place: str) -> Sequence[int]:
        """Put the model's special tokens in front; an empty context gets one where there is any, as in lm-eval."""
        all_ids = [*self._leading_ids, *context_ids]
        if all_ids:
            return all_ids
        tokenizer = self._get_tokenizer("contexts")
        for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token_id is not None:
                return [token_id]
        raise VLLMValidationError(
            f"{place} has an empty context, and this model has no token that starts a text", parameter="contexts"
        )

    @property
    def _leading_ids(self) -> list[int]:
        if not self._adds_special_tokens or self._tokenizer is None:
            return []
        return find_leading_ids(self._tokenizer)

    def _get_tokenizer(self, parameter: str) -> Tokenizer:
        if self._tokenizer is None:
            raise VLLMValidationError(
                "texts need a tokenizer, and this engine was started with skip_tokenizer_init; pass token ids",
                parameter=parameter,
            )
        return self._tokenizer

    # ------------------------------------------------------------ length

    def _fit(
        self, context: ParsedPrompt, context_ids: tuple[int, ...], token_ids: tuple[int, ...], text: str | None
    ) -> ScoredPair:
        """Cut on the left what is too long; one token at least stays in front of the first that is scored."""
        num_over = max(0, len(context_ids) + len(token_ids) - self._max_model_len)
        num_cut_context = min(num_over, len(context_ids))
        num_cut = num_over - num_cut_context
        context_ids, token_ids = context_ids[num_cut_context:], token_ids[num_cut:]
        if not context_ids:
            context_ids, token_ids = token_ids[:1], token_ids[1:]
            num_cut += 1
        num_bytes = None if text is None or num_cut else len(text.encode("utf-8", "replace"))
        if num_bytes is None and self._tokenizer is not None:
            num_bytes = sum(len(self._tokenizer.token_bytes[token_id]) for token_id in token_ids)
        key = ContextKey(context.cache_salt or "", context_ids)
        return ScoredPair(key, token_ids, num_bytes, num_cut_context, num_cut)


def find_leading_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the model puts in front of a text (those behind one are not wanted here)."""
    probe = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    starts = (i for i in range(len(whole)) if whole[i : i + len(probe)] == probe)
    return whole[: next(starts, 0)]
