"""POST /v1/chat/completions: the request."""

from typing import Any

from vllm.entrypoints.openai.protocol import GenerationRequest, LogprobsCount
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError

# Names that belong to the call of a template, not to the template.
RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "chat_template", "add_generation_prompt", "continue_final_message", "tools", "documents", "tokenize"}
)


class ChatCompletionRequest(GenerationRequest):
    """A conversation to continue."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: LogprobsCount = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    # ---- vLLM's
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def adds_generation_prompt(self) -> bool:
        return self.add_generation_prompt is not False

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise VLLMValidationError(
                "when using `top_logprobs`, `logprobs` must be set to true.", parameter="top_logprobs"
            )
        if self.logprob_token_ids and not self.logprobs:
            raise VLLMValidationError(
                "`logprob_token_ids` needs `logprobs: true`",
                parameter="logprob_token_ids",
                value=self.logprob_token_ids,
            )
        if self.continue_final_message and self.adds_generation_prompt:
            raise VLLMValidationError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                parameter="continue_final_message",
                value=True,
            )
        reserved = sorted((self.chat_template_kwargs or {}).keys() & RESERVED_TEMPLATE_NAMES)
        if reserved:
            raise VLLMValidationError(
                f"`chat_template_kwargs` must not hold {reserved[0]!r}: it is a field of the request",
                parameter="chat_template_kwargs",
                value=reserved[0],
            )

    def template_variables(self, template: str) -> dict[str, Any]:
        """Return what the template sees beside the messages.

        Raises:
            VLLMUnsupportedError: reasoning_effort, where the template doesn't know it.
        """
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None and self.reasoning_effort != "none":
            if "reasoning_effort" not in template:
                raise VLLMUnsupportedError(
                    "`reasoning_effort` is not supported by this model's chat template; leave it out",
                    parameter="reasoning_effort",
                    value=self.reasoning_effort,
                )
            variables["reasoning_effort"] = self.reasoning_effort
        return variables
