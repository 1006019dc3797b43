"""Chat templates: Jinja in a sandbox, with the names that templates of Hugging Face models expect.

Jinja is imported with the first template: most programs start without one, and 60 ms sooner.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError

if TYPE_CHECKING:
    import jinja2
    import jinja2.sandbox

# Parts of a message that hold something other than text: refused by name, never dropped.
_TEXT_PART_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Return the prompt that `template` makes of a conversation.

    `variables` are what the template sees beside the messages: special tokens by name, tools, documents and the
    caller's own. Raises VLLMValidationError for a bad conversation, a bad template, and where the template refuses.
    """
    if continue_final_message and add_generation_prompt:
        raise VLLMValidationError(
            "continue_final_message and add_generation_prompt can't both be set: one continues the last message, the "
            "other begins a new one; set add_generation_prompt=False",
            parameter="continue_final_message",
            value=True,
        )
    import jinja2

    conversation = [flatten_message(message, index) for index, message in enumerate(messages)]
    if not conversation:
        raise VLLMValidationError("messages must hold at least one message; got none", parameter="messages")
    try:
        prompt = compile_template(template).render(
            messages=conversation, add_generation_prompt=add_generation_prompt, **variables
        )
    except _TemplateRefusal as error:
        raise VLLMValidationError(
            f"the chat template refuses this conversation: {error}", parameter="messages"
        ) from None
    except jinja2.TemplateError as error:
        raise VLLMValidationError(f"the chat template can't be rendered: {error}", parameter="chat_template") from error
    except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise VLLMValidationError(
            f"the chat template fails on this conversation ({type(error).__name__}: {error})", parameter="messages"
        ) from error
    return _cut_after_final_message(prompt, conversation) if continue_final_message else prompt


@functools.lru_cache(maxsize=32)
def compile_template(template: str) -> "jinja2.Template":
    """Return the compiled template; raises VLLMValidationError where its syntax is wrong."""
    import jinja2

    try:
        return _make_environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise VLLMValidationError(
            f"the chat template is not valid Jinja: {error.message} (line {error.lineno})", parameter="chat_template"
        ) from error


def flatten_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of a message whose content, if it is a list of text parts, is one string (joined by newlines)."""
    if not isinstance(message, Mapping):
        raise VLLMValidationError(
            f"messages[{index}] must be a dict with a role and a content; got {type(message).__name__}",
            parameter="messages",
            value=message,
        )
    if not isinstance(message.get("role"), str):
        raise VLLMValidationError(
            f"messages[{index}] must have a role, such as 'user'; got {message.get('role')!r}", parameter="messages"
        )
    flat = dict(message)
    content = flat.get("content")
    if content is None:
        flat["content"] = None if flat.get("tool_calls") else ""
    elif not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise VLLMValidationError(
                f"the content of messages[{index}] must be a string or a list of parts; got {type(content).__name__}",
                parameter="messages",
            )
        flat["content"] = "\n".join(_part_text(part, index) for part in content)
    return flat


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PART_TYPES:
        raise VLLMUnsupportedError(
            f"a part of type {kind!r} in messages[{index}] is not served: this engine reads text only",
            parameter="messages",
            value=kind,
        )
    text = part.get(kind, part.get("text"))
    if not isinstance(text, str):
        raise VLLMValidationError(
            f"a part of type {kind!r} in messages[{index}] must hold a string under 'text'; got {text!r}",
            parameter="messages",
        )
    return text


def _cut_after_final_message(prompt: str, conversation: list[dict[str, Any]]) -> str:
    """Cut the prompt behind the last message's text, so that the model goes on with that message."""
    final = conversation[-1]["content"] or ""
    core = final.strip()  # a template may strip a message's text
    trailing = final[len(final.rstrip()) :]
    place = prompt.rfind(core)
    if core and place >= 0:
        end = place + len(core)
        return prompt[: end + len(trailing)] if prompt.startswith(trailing, end) else prompt[:end]
    raise VLLMValidationError(
        "continue_final_message needs a chat template that shows the last message's text unchanged, and a text that is "
        "not empty",
        parameter="continue_final_message",
        value=True,
    )


# ---------------------------------------------------------------- the environment


class _TemplateRefusal(Exception):
    """A template called raise_exception()."""


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter writes < as \u003c for HTML; a prompt is not HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _make_environment() -> "jinja2.sandbox.ImmutableSandboxedEnvironment":
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %} … {% endgeneration %}` marks the assistant's part for training: its body is shown."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(names)
    return environment
