"""Checks of one value of `SamplingParams`: each returns the value in its one form, or refuses it by name."""

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from vllm import envs
from vllm.exceptions import VLLMValidationError, shorten

INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1  # the largest integer that travels

# What the refusal of a field that is not served adds to its name.
MEANT_INSTEAD = {
    "prompt_logprob_start": "; prompt_logprobs_start is the first token that prompt_logprobs scores, and "
    "prompt_logprob_start is the first row of prompt_logprob_token_ids, which is not served"
}

# generation_config.json → SamplingParams
_MODEL_DEFAULTS = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
_MODEL_DEFAULTS["max_new_tokens"] = "max_tokens"


def read_model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a model's generation config sets."""
    found = {field: generation_config.get(name) for name, field in _MODEL_DEFAULTS.items()}
    return {field: value for field, value in found.items() if value is not None}


def refusal(name: str, value: Any, why: str) -> VLLMValidationError:
    """Return the error about the `value` of the field `name`: its name and `why`."""
    return VLLMValidationError(f"{name} {why}", parameter=name, value=value)


class StrictMeta(msgspec.StructMeta):
    """Suggests the nearest keyword for one that is misspelled."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fields = [name for name in cls.__struct_fields__ if not name.startswith("_")]
        for name in kwargs.keys() - cls.__struct_fields__:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{cls.__name__} got an unexpected keyword argument {name!r}{hint}")
        return super().__call__(*args, **kwargs)


class Encoder(Protocol):
    """The part of a tokenizer that turns bad words into ids."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class FloatRule(NamedTuple):
    name: str
    accepts: Callable[[float], bool]  # false for NaN
    what: str


FLOAT_RULES = (
    FloatRule("presence_penalty", lambda x: -2 <= x <= 2, "from -2 to 2"),
    FloatRule("frequency_penalty", lambda x: -2 <= x <= 2, "from -2 to 2"),
    FloatRule("repetition_penalty", lambda x: 0 < x < math.inf, "finite and above 0"),
    FloatRule("temperature", lambda x: 0 <= x <= 2, "from 0 to 2"),
    FloatRule("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    FloatRule("min_p", lambda x: 0 <= x <= 1, "from 0 to 1"),
)
INT_RULES: tuple[tuple[str, int, int, bool], ...] = (  # name, lowest, highest, may be None
    ("top_k", -1, INT64_MAX, False),
    ("seed", -(2**63), UINT64_MAX, True),
    ("max_tokens", 0, INT64_MAX, True),
    ("min_tokens", 0, INT64_MAX, False),
    ("stream_interval", 1, INT64_MAX, True),
    ("thinking_token_budget", -1, INT64_MAX, True),
    ("routed_experts_prompt_start", 0, INT64_MAX, False),
    ("prompt_logprob_start", 0, INT64_MAX, True),
    ("prompt_logprobs_start", 0, INT64_MAX, True),
)
BOOL_FIELDS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_clone",
)


def check_float(rule: FloatRule, value: Any) -> float:
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    try:
        number = float(value) if is_number and not isinstance(value, bool) else math.nan
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if not rule.accepts(number):
        raise refusal(rule.name, value, f"must be a number {rule.what}; got {describe(value)}")
    return number


def as_int(value: Any) -> int:
    """Return `value` as an int; a bool, a fraction or a string is a TypeError."""
    if isinstance(value, bool):
        raise TypeError("a bool is no number here")
    return operator.index(value)


def check_int(name: str, value: Any, low: int, high: int, is_optional: bool) -> Any:
    if value is None and is_optional:
        return None
    try:
        number = as_int(value)
    except TypeError:
        raise refusal(name, value, f"must be a whole number; got {describe(value)}") from None
    if number < low:
        raise refusal(name, value, f"must be at least {low}, got {shorten(number)}.")
    if number > high:
        raise refusal(name, value, f"must be at most {high}, got {shorten(number)}.")
    return number


def check_num_logprobs(name: str, value: Any) -> int | None:
    if value is None or value is False:
        return None
    try:
        number = operator.index(value)  # True is 1
    except TypeError:
        raise refusal(name, value, f"must be a whole number, -1 or None; got {describe(value)}") from None
    if number < -1:
        raise refusal(name, value, f"must be non-negative or -1, got {shorten(number)}.")
    return number


def check_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_"):  # numpy's
        return bool(value)
    raise refusal(name, value, f"must be True or False; got {describe(value)}")


def as_word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def check_list(name: str, value: Any, convert: Callable[[Any], Any]) -> list[Any] | None:
    if value is None:
        return None
    what = "strings" if convert is as_word else "whole numbers"
    try:
        if isinstance(value, (str, bytes, dict)):
            raise TypeError("not a list")
        return [convert(item) for item in value]
    except TypeError:
        raise refusal(name, value, f"must be a list of {what}; got {describe(value)}") from None


def check_logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise refusal("logit_bias", bias, "must map token ids to numbers")
    rule = FloatRule("logit_bias", lambda x: x < math.inf, "below infinity")
    try:
        return {as_int(key): check_float(rule, value) for key, value in bias.items()}
    except TypeError:
        bad = [key for key in bias if isinstance(key, bool) or not hasattr(key, "__index__")]
        raise VLLMValidationError(
            f"the keys of logit_bias must be token ids; got {shorten(bad)}", parameter="logit_bias", value=bad
        ) from None


def parse_logit_bias(bias: dict[Any, Any]) -> dict[int, float]:
    bad = [key for key in bias if not (isinstance(key, str) and _is_whole(key)) and not hasattr(key, "__index__")]
    if bad:
        raise VLLMValidationError(
            f"the keys of logit_bias must be token ids; got {shorten(bad)}", parameter="logit_bias", value=bad
        )
    checked = check_logit_bias({int(key): value for key, value in bias.items()})
    return {key: min(100.0, max(-100.0, value)) for key, value in checked.items()}


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def encode_words(name: str, words: Iterable[str], tokenizer: Encoder) -> list[list[int]]:
    """Return each word as ids, as it stands and after a space: a text can hold either."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids:
                raise VLLMValidationError(f"{name}: {word!r} has no tokens", parameter=name, value=word)
            sequences[token_ids] = None
    if len(sequences) > (limit := envs.max_num_bad_words()):
        raise VLLMValidationError(
            f"{name} may come to at most {limit} token sequences; got {len(sequences)} (VLLM_MAX_NUM_BAD_WORDS)",
            parameter=name,
            value=len(sequences),
        )
    return [list(token_ids) for token_ids in sequences]


def check_travels(value: Any) -> None:
    """Refuse integers that no message can hold, however deep they lie in `extra_args`."""
    if isinstance(value, dict):
        check_travels(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_travels(item)
    elif isinstance(value, int) and not -(2**63) <= value <= UINT64_MAX:
        raise VLLMValidationError(
            f"integers in extra_args must be from -2^63 to 2^64 - 1; got {shorten(value)}", parameter="extra_args"
        )


def check_ids_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise refusal(name, token_id, f"must hold token ids from 0 to {vocab_size - 1}; got {shorten(token_id)}")


def describe(value: Any) -> str:
    """Return `value` as a message shows it; Python refuses to print integers of more than 4,300 digits."""
    try:
        return shorten(repr(value))
    except ValueError:
        return "an integer too large to print"


def count_entries(k: int | None, vocab_size: int) -> int:
    """Return the most entries that a row can have: the k most likely, and the chosen one."""
    return 0 if k is None else min(k + 1, vocab_size)


def is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


def unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))
