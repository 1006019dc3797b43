"""The forms in which a prompt may come, and the one form that they are brought to."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError


class _PromptOptions(TypedDict, total=False):
    multi_modal_data: Any  # not served
    mm_processor_kwargs: Any  # not served
    cache_salt: str | None  # prompts share cached blocks only under an equal salt


class TextPrompt(_PromptOptions):
    """A prompt as text, which the engine tokenises."""

    prompt: str


class _PromptText(_PromptOptions, total=False):
    prompt: str | None  # the text, where the caller knows it


class TokensPrompt(_PromptText):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt

_KNOWN_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_KEYS_NOT_SERVED = (
    "prompt_embeds",
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "token_type_ids",
    "encoder_prompt",
    "decoder_prompt",
)


class ParsedPrompt(NamedTuple):
    """A prompt in its one form: text, or token ids, or both (then the ids count)."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None


def parse_prompts(prompts: Any) -> list[ParsedPrompt]:
    """Return the parsed prompts of a batch; one prompt that does not stand in a list is a batch of one.

    Raises:
        TypeError: something is no prompt at all.
        VLLMValidationError: a prompt breaks a rule; the message names its index.
    """
    if isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts):
        return [parse_prompt(prompts)]
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise TypeError(f"prompts must be a prompt or a list of prompts; got {type(prompts).__name__}")
    return [parse_prompt(prompt, index) for index, prompt in enumerate(prompts)]


def parse_prompt(prompt: Any, index: int = 0) -> ParsedPrompt:
    """Return one prompt in its one form: a str, a list of token ids, a `TextPrompt` or a `TokensPrompt`.

    Raises:
        TypeError: it is none of these.
        VLLMValidationError: it breaks a rule; the message names it as prompt `index`.
    """
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None, None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, index)
    if isinstance(prompt, bytes) or not hasattr(prompt, "__len__"):
        raise TypeError(
            f"prompt {index} must be a str, a list of token ids, or a dict with prompt or prompt_token_ids; "
            f"got {type(prompt).__name__}"
        )
    return ParsedPrompt(None, _parse_token_ids(prompt, index), None)


def _parse_mapping(prompt: Mapping[str, Any], index: int) -> ParsedPrompt:
    for key in prompt:
        if key in _KNOWN_KEYS:
            continue
        if key not in _KEYS_NOT_SERVED:
            raise VLLMValidationError(
                f"prompt {index} has an unknown key {key!r}; known are {', '.join(_KNOWN_KEYS)}", parameter=str(key)
            )
        value = prompt[key]
        if value is not None and not (hasattr(value, "__len__") and len(value) == 0):
            raise VLLMUnsupportedError(f"prompt {index}: {key} is not served by this engine", parameter=key)
    text, token_ids, salt = (prompt.get(key) for key in _KNOWN_KEYS)
    if text is None and token_ids is None:
        raise VLLMValidationError(f"prompt {index} needs prompt or prompt_token_ids", parameter="prompt")
    for key, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise VLLMValidationError(
                f"prompt {index}: {key} must be a str; got {type(value).__name__}", parameter=key, value=value
            )
    if salt == "":
        raise VLLMValidationError(f"prompt {index}: cache_salt must not be empty", parameter="cache_salt")
    return ParsedPrompt(text, None if token_ids is None else _parse_token_ids(token_ids, index), salt)


def _parse_token_ids(token_ids: Any, index: int) -> list[int]:
    if hasattr(token_ids, "tolist"):  # an array or a tensor
        token_ids = token_ids.tolist()
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
        raise VLLMValidationError(
            f"prompt {index}: token ids must be a list of integers; got {type(token_ids).__name__}",
            parameter="prompt_token_ids",
        )
    if all(type(token_id) is int for token_id in token_ids):
        return list(token_ids)
    for token_id in token_ids:
        if isinstance(token_id, bool) or not _is_whole_number(token_id):
            raise VLLMValidationError(
                f"prompt {index}: token ids must be integers; got {type(token_id).__name__}",
                parameter="prompt_token_ids",
                value=token_id,
            )
    return [operator.index(token_id) for token_id in token_ids]


def _is_token_ids(prompts: Any) -> bool:
    """Say whether this is one prompt of token ids; an empty list is a batch without prompts."""
    if getattr(prompts, "ndim", None) is not None:
        return bool(prompts.ndim == 1 and prompts.dtype != object)
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        return False
    return len(prompts) > 0 and _is_whole_number(prompts[0])


def _is_whole_number(value: Any) -> bool:
    """Say whether this is an integer of any library; an array of one element is none."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0
