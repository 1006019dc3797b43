"""The tokens of an answer: each prompt once, completions summed."""

from typing import Any


def make_usage(num_prompt: int, num_completion: int, num_cached: int | None = None) -> dict[str, Any]:
    """Return the usage of a whole answer; without `num_cached` its details are null."""
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion,
        "completion_tokens": num_completion,
        "prompt_tokens_details": None if num_cached is None else {"cached_tokens": num_cached},
        "completion_tokens_details": None,
    }


def make_stream_usage(num_prompt: int, num_completion: int, num_cached: int | None = None) -> dict[str, Any]:
    """Return the usage that an event of a stream carries: the same without what is null."""
    usage = make_usage(num_prompt, num_completion, num_cached)
    return {name: value for name, value in usage.items() if value is not None}
