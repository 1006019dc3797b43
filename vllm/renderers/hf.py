"""A name that lm-eval imports and calls once at start-up, for every model, with or without a chat template."""

from typing import Any


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None, tools: list[dict[str, Any]] | None, *, model_config: Any
) -> str | None:
    """Return the chat template that counts: the one given, else the tokenizer's own; None where there is none."""
    found = chat_template or getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):  # named templates
        return found.get("tool_use" if tools and "tool_use" in found else "default")
    return found
