"""From what a client sends as a prompt to token ids that fit the model, checked before anything is scheduled."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.config import ModelConfig
from vllm.entrypoints.openai.protocol import GenerationRequest
from vllm.exceptions import VLLMValidationError
from vllm.inputs import ParsedPrompt
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer

_LONGEST_TOKEN = 256  # characters; a text longer than that many times the model's length can't fit
_ENCODE_HERE = 4096  # characters: a shorter text is tokenised within a millisecond or two, a longer one in a thread


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the engine gets it."""

    token_ids: list[int]
    text: str | None = None  # as it came; None for one that came as token ids, or was cut
    cache_salt: str | None = None

    def as_input(self) -> ParsedPrompt:
        """Return the form that the engine's `generate` takes."""
        return ParsedPrompt(self.text, self.token_ids, self.cache_salt)


class PromptReader:
    """Reads the prompts of requests for one model."""

    def __init__(self, model_config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._max_model_len = model_config.max_model_len
        self._vocab_size = model_config.vocab_size
        self._config = model_config
        self._tokenizer = tokenizer

    async def read_all(self, request: GenerationRequest, prompts: Sequence[str | list[int]]) -> list[Prompt]:
        """Return the prompts of a completions request.

        Raises:
            VLLMValidationError: one is empty, too long, or holds a token that the model doesn't have.
        """
        check_cache_salt(request.cache_salt)
        keep = self._read_truncation(request)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        add_special_tokens = request.add_special_tokens is not False
        encoded = iter(await self._encode(texts, add_special_tokens, is_cut=keep is not None))
        read = []
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else None
            token_ids = next(encoded) if isinstance(prompt, str) else prompt
            if keep is not None and len(token_ids) > keep:
                token_ids = token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]
                text = None
            self._check(token_ids)
            read.append(Prompt(token_ids, text, request.cache_salt))
        return read

    async def read_rendered(self, request: GenerationRequest, text: str) -> Prompt:
        """Return the prompt that a chat template rendered; the template contains its special tokens itself."""
        prompts = [text]
        if request.add_special_tokens is None:
            request = request.model_copy(update={"add_special_tokens": False})
        return (await self.read_all(request, prompts))[0]

    def check_params(self, params: SamplingParams, prompts: Sequence[Prompt]) -> None:
        """Raise what the engine would raise for these prompts, so that a refusal comes before anything is scheduled."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        for length in {max(lengths), min(lengths)}:
            params.resolve(
                vocab_size=self._vocab_size,
                max_model_len=self._max_model_len,
                prompt_len=length,
                max_logprobs=self._config.max_logprobs,
                logprobs_mode=self._config.logprobs_mode,
                tokenizer=self._tokenizer,
            )

    async def _encode(self, texts: list[str], add_special_tokens: bool, is_cut: bool) -> list[list[int]]:
        if not texts:
            return []
        if self._tokenizer is None:
            raise VLLMValidationError(
                "this server runs without a tokenizer, so prompts must be token ids", parameter="prompt"
            )
        longest = max(map(len, texts))
        if longest > self._max_model_len * _LONGEST_TOKEN and not is_cut:
            raise self._too_long(f"at least {longest // _LONGEST_TOKEN}", longest // _LONGEST_TOKEN)
        if len(texts) == 1 and longest <= _ENCODE_HERE:
            return [self._tokenizer.encode(texts[0], add_special_tokens)]
        return await asyncio.to_thread(self._tokenizer.encode_batch, texts, add_special_tokens)

    def _check(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise VLLMValidationError("The decoder prompt cannot be empty", parameter="prompt")
        if len(token_ids) > self._max_model_len:
            raise self._too_long(str(len(token_ids)), len(token_ids))
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self._vocab_size:
                raise VLLMValidationError(
                    f"Token id {token_id} is out of vocabulary", parameter="prompt", value=token_id
                )

    def _too_long(self, count: str, value: int) -> VLLMValidationError:
        # Clients look for "maximum context length".
        return VLLMValidationError(
            f"This model's maximum context length is {self._max_model_len} tokens. However, your prompt contains "
            f"{count} input tokens, which exceeds this limit even without any output tokens. Please reduce the length "
            "of the input prompt.",
            parameter="input_tokens",
            value=value,
        )

    def _read_truncation(self, request: GenerationRequest) -> int | None:
        if request.truncation_side not in (None, "left", "right"):
            raise VLLMValidationError(
                'truncation_side must be "left" or "right"', parameter="truncation_side", value=request.truncation_side
            )
        keep = request.truncate_prompt_tokens
        if keep is None:
            return None
        if keep == -1:
            return self._max_model_len
        if not 1 <= keep <= self._max_model_len:
            raise VLLMValidationError(
                f"truncate_prompt_tokens must be -1 or from 1 to {self._max_model_len}; got {keep}",
                parameter="truncate_prompt_tokens",
                value=keep,
            )
        return keep


def check_cache_salt(salt: str | None) -> None:
    """Raise for a salt that is empty."""
    if salt == "":
        raise VLLMValidationError("cache_salt must not be an empty string", parameter="cache_salt", value=salt)
