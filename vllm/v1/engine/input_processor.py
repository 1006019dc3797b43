"""From a caller's prompt and params to an `EngineCoreRequest`: tokenised, checked, resolved and seeded."""

import hashlib
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.inputs import ParsedPrompt, parse_prompt
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.messages import EngineCoreRequest

_MASK_64 = 2**64 - 1


class ProcessedRequest(NamedTuple):
    """A request as it enters the engine."""

    request_id: str  # the caller's; the core request carries one of our own
    prompt_text: str | None  # None for a prompt of token ids without a text
    core_request: EngineCoreRequest
    num_copies: int  # choices that each child answers: n of a greedy request, else 1


class InputProcessor:
    """Makes the requests of one engine; nothing that it is given is changed.

    Requests that bring no seed get 64-bit seeds from the engine's own seed and the order of arrival, so that a fresh
    engine with the same calls repeats them and two calls differ.
    """

    def __init__(self, vllm_config: VllmConfig, tokenizer: Tokenizer | None) -> None:
        self._model_config = vllm_config.model_config
        self._tokenizer = tokenizer
        self._num_arrived = 0
        own_eos = None if tokenizer is None else tokenizer.eos_token_id
        self._eos_token_id = self._model_config.transformer.eos_token_id if own_eos is None else own_eos
        self._extra_eos_token_ids = [
            token_id for token_id in self._model_config.generation_eos_token_ids if token_id != self._eos_token_id
        ]

    def process(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> ProcessedRequest:
        """Return the request for one prompt, in any of the forms of vllm/inputs.py or parsed already.

        Raises:
            VLLMValidationError: the prompt or the params break a rule.
            TypeError: something is no prompt, or no SamplingParams.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling params must be a SamplingParams; got {type(params).__name__}")
        parsed = prompt if isinstance(prompt, ParsedPrompt) else parse_prompt(prompt)
        (parsed,) = self.tokenize([parsed], tokenization_kwargs)
        token_ids = self._check_token_ids(parsed.token_ids or [])
        resolved = self._resolve(params, len(token_ids))
        num_copies = 1
        if resolved.n > 1 and resolved.sampling_type is SamplingType.GREEDY:
            num_copies, resolved.n = resolved.n, 1
        counter = self._num_arrived
        self._num_arrived += 1
        stop_ids = resolved.all_stop_token_ids if resolved.min_tokens > 0 else ()
        core_request = EngineCoreRequest(
            request_id=f"{request_id}-{counter:08x}",
            prompt_token_ids=token_ids,
            sampling_params=resolved,
            seeds=self._make_seeds(resolved, counter),
            eos_token_id=resolved.eos_token_id,
            min_tokens_stop_ids=sorted(stop_ids),
            bad_words_token_ids=resolved.bad_words_token_ids or [],
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=parsed.cache_salt,
        )
        return ProcessedRequest(request_id, parsed.text, core_request, num_copies)

    def tokenize(
        self, prompts: Sequence[ParsedPrompt], tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> list[ParsedPrompt]:
        """Return the prompts with token ids, the texts among them tokenised in one batch.

        Raises:
            VLLMValidationError: there is a text and no tokenizer, or a tokenization argument that is not served.
        """
        add_special_tokens = _read_tokenization_kwargs(tokenization_kwargs)
        places = [place for place, prompt in enumerate(prompts) if prompt.token_ids is None]
        if not places:
            return list(prompts)
        if self._tokenizer is None:
            raise VLLMValidationError(
                "a prompt of text needs a tokenizer, and this engine was started with skip_tokenizer_init; "
                "pass prompt_token_ids",
                parameter="prompt",
            )
        texts = [prompts[place].text or "" for place in places]
        if len(texts) == 1:
            encoded = [self._tokenizer.encode(texts[0], add_special_tokens=add_special_tokens)]
        else:
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        tokenised = list(prompts)
        for place, token_ids in zip(places, encoded, strict=True):
            tokenised[place] = prompts[place]._replace(token_ids=token_ids)
        return tokenised

    def _check_token_ids(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            raise VLLMValidationError("The decoder prompt cannot be empty", parameter="prompt")
        vocab_size = self._model_config.vocab_size
        lowest, largest = min(token_ids), max(token_ids)
        if lowest < 0 or largest >= vocab_size:
            bad = lowest if lowest < 0 else largest
            raise VLLMValidationError(
                f"prompt token ids must be from 0 to {vocab_size - 1}; token id {bad} is out of vocabulary",
                parameter="prompt_token_ids",
                value=bad,
            )
        return token_ids

    def _resolve(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        config = self._model_config
        return params.resolve(
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            prompt_len=prompt_len,
            max_logprobs=config.max_logprobs,
            logprobs_mode=config.logprobs_mode,
            eos_token_id=self._eos_token_id,
            extra_eos_token_ids=self._extra_eos_token_ids,
            tokenizer=self._tokenizer,
        )

    def _make_seeds(self, params: SamplingParams, counter: int) -> list[int]:
        seed = params.seed
        if seed is None:
            origin = struct.pack("<QQ", self._model_config.seed & _MASK_64, counter)
            seed = int.from_bytes(hashlib.blake2b(origin, digest_size=8).digest(), "little")
        return [(seed + index) & _MASK_64 for index in range(params.n)]


def _read_tokenization_kwargs(given: Mapping[str, Any] | None) -> bool:
    """Return whether special tokens are added; anything else is refused by name."""
    for name, value in (given or {}).items():
        if name != "add_special_tokens" and value is not None:
            raise VLLMUnsupportedError(
                f"tokenization_kwargs: {name} is not supported; tokenise yourself and pass prompt_token_ids",
                parameter=name,
                value=value,
            )
    asked = (given or {}).get("add_special_tokens")
    return True if asked is None else bool(asked)
