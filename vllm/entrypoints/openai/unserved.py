"""Fields of the OpenAI and vLLM APIs that this server knows and does not serve.

A value that asks for nothing passes; any other is refused by name, so that a missing feature is never ignored in
silence. Fields that can't change an answer (a user's name, a hint for a cache) are accepted.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.exceptions import VLLMUnsupportedError
from vllm.sampling_checks import MEANT_INSTEAD


def _asks_for_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _one_of(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: _asks_for_nothing(value) or value in neutral


def _is_text_format(value: Any) -> bool:
    return _asks_for_nothing(value) or value == {"type": "text"} or value == "text"


def _detects_nothing(value: Any) -> bool:
    return _asks_for_nothing(value) or (isinstance(value, Mapping) and not value.get("max_pattern_size"))


# field → whether a value asks for nothing
UNSERVED_FIELDS: dict[str, Callable[[Any], bool]] = {
    # constraints on the text
    "response_format": _is_text_format,
    "structured_outputs": _asks_for_nothing,
    "guided_json": _asks_for_nothing,
    "guided_regex": _asks_for_nothing,
    "guided_choice": _asks_for_nothing,
    "guided_grammar": _asks_for_nothing,
    "guided_decoding_backend": _asks_for_nothing,
    "guided_whitespace_pattern": _asks_for_nothing,
    # tools; how they would be called means nothing without them
    "tools": _asks_for_nothing,
    "tool_choice": _one_of("none", "auto"),
    "functions": _asks_for_nothing,
    "function_call": _one_of("none", "auto"),
    "web_search_options": _asks_for_nothing,
    # other ways to sample
    "suffix": _asks_for_nothing,
    "use_beam_search": _asks_for_nothing,
    "length_penalty": _one_of(1),
    "thinking_token_budget": _one_of(-1),
    "repetition_detection": _detects_nothing,
    "watermarking": _asks_for_nothing,
    "prediction": _asks_for_nothing,
    "verbosity": _one_of("medium"),
    # other inputs and outputs
    "prompt_embeds": _asks_for_nothing,
    "mm_processor_kwargs": _asks_for_nothing,
    "modalities": _one_of(["text"]),
    "audio": _asks_for_nothing,
    "routed_experts_prompt_start": _one_of(0),
    "return_routed_experts": _asks_for_nothing,
    "prompt_logprob_token_ids": _asks_for_nothing,
    "prompt_logprob_start": _asks_for_nothing,
    # other engines' affairs
    "kv_transfer_params": _asks_for_nothing,
    "ec_transfer_params": _asks_for_nothing,
    "vllm_xargs": _asks_for_nothing,
    "lora_request": _asks_for_nothing,
    "logits_processors": _asks_for_nothing,
    "trace_decode_token_ids": _asks_for_nothing,
}

HARMLESS_FIELDS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "parallel_tool_calls",  # no tools, no calls
        "include_reasoning",  # no reasoning is taken out of an answer
    }
)


def refuse_unserved(body: Mapping[str, Any]) -> None:
    """Raise for the first field of a request that asks for what is not served.

    Raises:
        VLLMUnsupportedError: it names the field.
    """
    for name in body.keys() & UNSERVED_FIELDS.keys():
        if not UNSERVED_FIELDS[name](body[name]):
            message = f"`{name}` is not supported by this server; leave it out{MEANT_INSTEAD.get(name, '')}"
            raise VLLMUnsupportedError(message, parameter=name, value=body[name])
