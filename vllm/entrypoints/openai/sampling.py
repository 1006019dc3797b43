"""From a request's fields to `SamplingParams`: the request's value, else the model's default, else the engine's."""

from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.protocol import GenerationRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_checks import read_model_defaults
from vllm.sampling_params import RequestOutputKind, SamplingParams

# Fields that have the same name and meaning in a request and in the engine.
_PLAIN_FIELDS = GenerationRequest.model_fields.keys() & set(SamplingParams.__struct_fields__) - {"n", "prompt_logprobs"}


class SamplingDefaults:
    """What a model says about sampling where a request says nothing, and the most tokens that it may generate."""

    def __init__(self, generation_config: Mapping[str, Any]) -> None:
        self.values = read_model_defaults(generation_config)
        self.max_new_tokens: int | None = self.values.pop("max_tokens", None)

    def make_params(self, request: GenerationRequest) -> SamplingParams:
        """Return the params of a request.

        Raises:
            VLLMValidationError: a field breaks a rule.
        """
        given = {name: getattr(request, name) for name in _PLAIN_FIELDS}
        fields = {**self.values, **{name: value for name, value in given.items() if value is not None}}
        max_tokens, logprobs = request.token_limit, request.asked_logprobs
        if self.max_new_tokens is not None:
            max_tokens = self.max_new_tokens if max_tokens is None else min(max_tokens, self.max_new_tokens)
        return SamplingParams.from_optional(
            **fields,
            n=request.num_candidates,
            max_tokens=max_tokens,
            # candidates are ranked by their values, so those are computed even where nobody reads them
            logprobs=0 if logprobs is None and request.num_candidates > request.num_choices else logprobs,
            prompt_logprobs=request.prompt_logprobs_count,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        )


def check_priority(priority: int | None, policy: str) -> int:
    """Return a request's priority, which is refused where the engine does not look at it."""
    priority = priority or 0
    if priority != 0 and policy != "priority":
        raise VLLMValidationError(
            f"priority is not looked at under the scheduling policy {policy!r}; start the server with "
            "--scheduling-policy priority, or leave it out",
            parameter="priority",
            value=priority,
        )
    return priority
