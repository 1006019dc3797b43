"""POST /v1/completions: the request."""

from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from vllm import envs
from vllm.entrypoints.openai.protocol import GenerationRequest, LogprobsCount
from vllm.exceptions import VLLMValidationError

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _read_prompts(value: Any) -> list[str] | list[list[int]]:
    """Return the prompts as a list of texts or a list of lists of token ids.

    Raises:
        VLLMValidationError: something else, or too many.
    """
    if value is None:
        raise VLLMValidationError("Either prompt or prompt_embeds must be provided and non-empty.", parameter="prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _prompt_error(value)
    if not value:
        raise VLLMValidationError("You must pass at least one prompt", parameter="prompt")
    is_one_prompt = isinstance(value[0], int)
    if not is_one_prompt and len(value) > (limit := envs.max_completion_prompts()):
        raise VLLMValidationError(
            f"a request may hold at most {limit} prompts; got {len(value)} (VLLM_MAX_COMPLETION_PROMPTS)",
            parameter="prompt",
            value=len(value),
        )
    kind: Any = list[str] if isinstance(value[0], str) else list[list[int]]
    try:
        return msgspec.convert([value] if is_one_prompt else value, kind)
    except msgspec.ValidationError:
        raise _prompt_error(value) from None


def _prompt_error(value: Any) -> VLLMValidationError:
    return VLLMValidationError(
        "`prompt` must be a string, a list of strings, a list of token ids or a list of lists of token ids",
        parameter="prompt",
        value=f"<{type(value).__name__}>",
    )


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
Prompts = Annotated[
    Any,
    BeforeValidator(_read_prompts),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]}),
]


class CompletionRequest(GenerationRequest):
    """A list of prompts to continue, to score, or both."""

    prompt: Prompts = Field(None, validate_default=True)
    best_of: int | None = None
    logprobs: LogprobsCount = None
    max_tokens: int | None = None

    @property
    def num_candidates(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        self._check_best_of()
        total = len(self.prompt) * max(self.num_choices, self.num_candidates)
        if len(self.prompt) > 1 and total > (limit := envs.max_n_sequences()):
            raise VLLMValidationError(
                f"prompts × n must be at most {limit}; got {len(self.prompt)} × {total // len(self.prompt)} "
                "(VLLM_MAX_N_SEQUENCES)",
                parameter="n",
                value=total // len(self.prompt),
            )
        if self.logprob_token_ids:
            if self.logprobs is None:
                raise VLLMValidationError(
                    "`logprob_token_ids` needs `logprobs`", parameter="logprob_token_ids", value=self.logprob_token_ids
                )
            if self.token_limit == 0:
                raise VLLMValidationError(
                    "`logprob_token_ids` is for generated tokens, and max_tokens=0 generates none",
                    parameter="logprob_token_ids",
                    value=self.logprob_token_ids,
                )

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.num_choices:
            raise VLLMValidationError(
                f"best_of must be at least n={self.num_choices}; got {self.best_of}",
                parameter="best_of",
                value=self.best_of,
            )
        if self.best_of > (limit := envs.max_n_sequences()):
            raise VLLMValidationError(
                f"best_of must be at most {limit}; got {self.best_of} (VLLM_MAX_N_SEQUENCES)",
                parameter="best_of",
                value=self.best_of,
            )
        if self.best_of > self.num_choices and self.stream:
            raise VLLMValidationError(
                f"best_of={self.best_of} with n={self.num_choices} can't be streamed: which choices are the best is "
                "known at the end",
                parameter="best_of",
                value=self.best_of,
            )
        if self.best_of > 1 and self.token_limit == 0:
            raise VLLMValidationError(
                f"max_tokens=0 scores the prompt and samples nothing, so best_of must be 1; got {self.best_of}",
                parameter="best_of",
                value=self.best_of,
            )
