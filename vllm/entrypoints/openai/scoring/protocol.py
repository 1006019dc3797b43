"""POST /v1/score/continuations and /generative_scoring: the requests."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, ValidationInfo, WithJsonSchema

from vllm import envs
from vllm.entrypoints.openai.protocol import MAX_REQUEST_ID_LENGTH
from vllm.exceptions import VLLMValidationError

MAX_PAIRS_PER_CONTEXT = 1024
MAX_LABELS = 128

_PROMPT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}


def _is_prompt(value: Any) -> bool:
    """Say whether this is a text or a list of token ids (whose range is checked against the model later)."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _read_prompts(value: Any, info: ValidationInfo) -> list[Any]:
    name = info.field_name
    if not isinstance(value, list) or not value:
        raise VLLMValidationError(
            f"`{name}` must be a list of at least one string or list of token ids", parameter=name, value=_kind(value)
        )
    if len(value) > (limit := envs.max_completion_prompts()):
        raise VLLMValidationError(
            f"`{name}` may hold at most {limit} items; got {len(value)} (VLLM_MAX_COMPLETION_PROMPTS)",
            parameter=name,
            value=len(value),
        )
    for index, item in enumerate(value):
        if not _is_prompt(item):
            raise VLLMValidationError(
                f"`{name}[{index}]` must be a string or a list of token ids; got {_kind(item)}", parameter=name
            )
    return value


def _read_continuations(value: Any) -> list[list[Any]]:
    """Return a list of continuations for each context.

    Raises:
        VLLMValidationError: something else, or too many.
    """
    if not isinstance(value, list):
        raise VLLMValidationError(
            "`continuations` must be a list with a list of continuations for each context",
            parameter="continuations",
            value=_kind(value),
        )
    for i, row in enumerate(value):
        if not isinstance(row, list) or not row or isinstance(row[0], int):
            raise VLLMValidationError(
                f"`continuations[{i}]` must be a list of at least one string or list of token ids",
                parameter="continuations",
                value=_kind(row),
            )
        if len(row) > MAX_PAIRS_PER_CONTEXT:
            raise VLLMValidationError(
                f"`continuations[{i}]` may hold at most {MAX_PAIRS_PER_CONTEXT} continuations; got {len(row)}",
                parameter="continuations",
                value=len(row),
            )
        for j, item in enumerate(row):
            if not _is_prompt(item):
                raise VLLMValidationError(
                    f"`continuations[{i}][{j}]` must be a string or a list of token ids; got {_kind(item)}",
                    parameter="continuations",
                )
    return value


def _kind(value: Any) -> str:
    return f"<{type(value).__name__}>" if not isinstance(value, list) else f"<list of {len(value)}>"


Prompts = Annotated[
    list[Any],
    BeforeValidator(_read_prompts),
    WithJsonSchema({"type": "array", "items": _PROMPT, "minItems": 1}),
]


class ScoringRequest(BaseModel):
    """What both kinds of request have in common."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    add_special_tokens: bool | None = None  # true
    priority: int | None = None
    request_id: str | None = Field(None, max_length=MAX_REQUEST_ID_LENGTH)
    cache_salt: str | None = None


class ScoreContinuationsRequest(ScoringRequest):
    """Given continuations of contexts, to be scored."""

    contexts: Prompts
    continuations: Annotated[
        list[list[Any]],
        BeforeValidator(_read_continuations),
        WithJsonSchema({"type": "array", "items": {"type": "array", "items": _PROMPT, "minItems": 1}}),
    ]
    tokenization: Literal["joint", "separate"] | None = None  # joint
    return_tokens: bool | None = None  # true: the values of single tokens come too


class GenerativeScoringRequest(ScoringRequest):
    """Labels, each a single token, as the next token after a query and an item."""

    query: Annotated[
        StrictStr | list[StrictInt], Field(description="a text or token ids; with `items` of the same kind")
    ] = ""
    items: Prompts
    label_token_ids: list[StrictInt] | None = None
    labels: list[StrictStr] | None = None  # ours: texts in place of ids
    apply_softmax: bool | None = None  # true: among the labels alone
    item_first: bool | None = None  # false
