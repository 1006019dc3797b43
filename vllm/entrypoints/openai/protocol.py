"""What completions and chat requests have in common, and the types of their fields.

Every optional field takes null, which means "not given". Rules that the engine checks are not checked twice here; the
ones here need the body as it came, or bound it before anything is computed from it.
"""

import abc
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_checks import INT64_MAX

MAX_REQUEST_ID_LENGTH = 256
LOGPROBS_FORMATS = ("openai", "columnar")
MAX_STOP_LENGTH = 1024  # characters of one stop string: so much text is held back while an answer streams


def _read_logprobs_count(value: Any, info: ValidationInfo) -> int | None:
    """Return k; true is 1 and false is none, as a client that knows only the chat form sends them."""
    name = info.field_name
    if value is None or isinstance(value, bool):
        return 1 if value else None
    if not isinstance(value, int):
        raise VLLMValidationError(f"`{name}` must be an integer.", parameter=name, value=value)
    if value < -1:
        raise VLLMValidationError(f"`{name}` must be a positive value or -1.", parameter=name, value=value)
    return value


def _read_stop(value: Any) -> list[str] | None:
    if value is None:
        return None
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise VLLMValidationError("`stop` must be a string or a list of strings", parameter="stop", value=value)
    if len(words) > (limit := envs.max_stop_strings()):
        raise VLLMValidationError(
            f"`stop` may hold at most {limit} strings; got {len(words)} (VLLM_MAX_STOP_STRINGS)",
            parameter="stop",
            value=len(words),
        )
    if max(map(len, words), default=0) > MAX_STOP_LENGTH:
        raise VLLMValidationError(
            f"a string of `stop` may have at most {MAX_STOP_LENGTH} characters; got {max(map(len, words))}",
            parameter="stop",
        )
    return words


LogprobsCount = Annotated[
    int | None,
    BeforeValidator(_read_logprobs_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": -1}, {"type": "boolean"}, {"type": "null"}]}),
]
StopStrings = Annotated[
    list[str] | None,
    BeforeValidator(_read_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]


class StreamOptions(BaseModel):
    """What a stream reports beside its choices."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """The fields of both kinds of request; names, defaults and order follow the OpenAI API, then vLLM's extras."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    echo: bool | None = None
    n: int | None = None
    seed: int | None = Field(None, ge=-(2**63), le=INT64_MAX)
    stop: StopStrings = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    # ---- vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: LogprobsCount = None
    logprob_token_ids: list[int] | None = None
    logprobs_mode: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = Field(None, max_length=MAX_REQUEST_ID_LENGTH)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    stream_interval: int | None = None
    # ---- ours
    prompt_logprobs_start: int | None = None
    logprobs_format: str | None = None

    @property
    def num_choices(self) -> int:
        """How many choices a prompt gets."""
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """How many sequences are generated for a prompt; the best `num_choices` of them are answered."""
        return self.num_choices

    @property
    @abc.abstractmethod
    def token_limit(self) -> int | None:
        """The most tokens to generate; None is up to the model's length."""

    @property
    @abc.abstractmethod
    def asked_logprobs(self) -> int | None:
        """How many alternatives of each generated token are asked for; None is no logprobs."""

    @property
    def prompt_logprobs_count(self) -> int | None:
        """What the engine is asked for: an echo with logprobs scores the prompt too."""
        return self.asked_logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return (
            self.includes_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def is_columnar(self) -> bool:
        """Whether logprobs are answered as columns."""
        return self.logprobs_format == "columnar"

    def check(self) -> None:
        """Raise for combinations of fields that mean nothing."""
        if self.stream_options is not None and not self.stream:
            raise VLLMValidationError(
                "Stream options can only be defined when `stream=True`.", parameter="stream_options"
            )
        if self.logprobs_format is not None and self.logprobs_format not in LOGPROBS_FORMATS:
            raise VLLMValidationError(
                f"`logprobs_format` must be one of {', '.join(LOGPROBS_FORMATS)}; got {self.logprobs_format!r}",
                parameter="logprobs_format",
                value=self.logprobs_format,
            )
