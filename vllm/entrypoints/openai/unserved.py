"""Fields of the OpenAI and vLLM APIs that this server knows and does not serve.

A value that asks for nothing passes; any other is refused by name, so that a missing feature is never ignored in
silence. Fields that can't change an answer (a user's name, a hint for a cache) are accepted.
"""

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMUnsupportedError
from vllm.sampling_checks import MEANT_INSTEAD

# field → the values beside null, false and empty ones that ask for nothing
UNSERVED_FIELDS: dict[str, tuple[Any, ...]] = {
    # constraints on the text
    "response_format": ({"type": "text"}, "text"),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), ()),
    # tools; how they would be called means nothing without them
    **dict.fromkeys(("tools", "functions", "web_search_options"), ()),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    # other ways to sample
    **dict.fromkeys(("suffix", "use_beam_search", "watermarking", "prediction"), ()),
    "length_penalty": (1,),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),  # and any object without a max_pattern_size
    "verbosity": ("medium",),
    # other inputs and outputs
    **dict.fromkeys(("prompt_embeds", "mm_processor_kwargs", "audio", "return_routed_experts"), ()),
    **dict.fromkeys(("prompt_logprob_token_ids", "prompt_logprob_start"), ()),
    "modalities": (["text"],),
    "routed_experts_prompt_start": (0,),
    # other engines' affairs
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "lora_request"), ()),
    **dict.fromkeys(("logits_processors", "trace_decode_token_ids"), ()),
}

HARMLESS_FIELDS = frozenset(
    ("user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
) | {
    "session_id",
    "parallel_tool_calls",  # no tools, no calls
    "include_reasoning",  # no reasoning is taken out of an answer
}


def refuse_unserved(body: Mapping[str, Any]) -> None:
    """Raise for the first field of a request that asks for what is not served.

    Raises:
        VLLMUnsupportedError: it names the field.
    """
    for name in body.keys() & UNSERVED_FIELDS.keys():
        if not _asks_for_nothing(name, body[name]):
            message = f"`{name}` is not supported by this server; leave it out{MEANT_INSTEAD.get(name, '')}"
            raise VLLMUnsupportedError(message, parameter=name, value=body[name])


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name == "repetition_detection" and isinstance(value, Mapping):
        return not value.get("max_pattern_size")
    return value is None or value is False or value in ("", [], {}, *UNSERVED_FIELDS[name])
