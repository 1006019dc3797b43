"""What all routes share: the engine, the served names, the tokenizer, and what the command line says about answers."""

import argparse
import hashlib
import time
import uuid
from dataclasses import dataclass, fields
from typing import Any

from fastapi import Request

import vllm
from vllm.entrypoints.openai.errors import ApiError, encodable
from vllm.entrypoints.openai.prompts import PromptReader
from vllm.entrypoints.openai.protocol import MAX_REQUEST_ID_LENGTH
from vllm.entrypoints.openai.sampling import SamplingDefaults
from vllm.exceptions import VLLMValidationError, shorten
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.async_llm import AsyncLLM

_BIG_ANSWER = 2_000  # entries: about 2 ms of work, which a stream beside it would notice


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the command line says about answers."""

    served_names: tuple[str, ...]
    chat_template: str | None
    # the flags of these names
    response_role: str
    trust_request_chat_template: bool
    return_tokens_as_token_ids: bool
    enable_prompt_tokens_details: bool
    enable_force_include_usage: bool
    sse_keep_alive_interval: float
    enable_log_requests: bool
    enable_log_outputs: bool
    max_log_len: int | None


class ServerContext:
    """One server's engine and what follows from it; created once, shared by all routes."""

    def __init__(self, engine: AsyncLLM, options: AnswerOptions) -> None:
        model_config = engine.model_config
        self.engine = engine
        self.options = options
        self.created = int(time.time())
        self.tokenizer: Tokenizer | None = engine.tokenizer
        self.max_model_len: int = model_config.max_model_len
        self.vocab_size: int = model_config.vocab_size
        self.scheduling_policy: str = engine.vllm_config.scheduler_config.policy
        self.prompts = PromptReader(model_config, engine.tokenizer)
        self.defaults = SamplingDefaults(model_config.generation_config)
        self.fingerprint = _make_fingerprint(engine)

    @property
    def model_name(self) -> str:
        return self.options.served_names[0]

    def check_model(self, name: str | None) -> str:
        """Return the name that the answer carries.

        Raises:
            ApiError: 404, no such model.
        """
        if not name:
            return self.model_name
        if name not in self.options.served_names:
            known = ", ".join(self.options.served_names)
            raise ApiError(
                404, encodable(f"The model `{shorten(name)}` does not exist. Valid aliases: {known}"), param="model"
            )
        return name

    def choose_chat_template(self, given: str | None) -> str:
        """Return the template of a conversation: the request's own where the server allows that, else the server's.

        Raises:
            VLLMValidationError: there is none, or the request's own is not allowed.
        """
        if given is not None:
            if not self.options.trust_request_chat_template:
                raise VLLMValidationError(
                    "`chat_template` in a request is not allowed by this server: a template is a program (start it "
                    "with --trust-request-chat-template to allow it)",
                    parameter="chat_template",
                )
            return given
        if self.options.chat_template is not None:
            return self.options.chat_template
        if self.tokenizer is None:
            raise VLLMValidationError(
                "this server runs without a tokenizer, so it has no chat; use completions with token ids",
                parameter="messages",
            )
        if self.tokenizer.chat_template is None:
            raise VLLMValidationError(
                "this model has no chat template; start the server with --chat-template FILE, or use completions",
                parameter="messages",
            )
        return self.tokenizer.chat_template

    def is_big(self, num_entries: int) -> bool:
        """Say whether an answer is encoded in a thread, so that streams go on meanwhile."""
        return num_entries > _BIG_ANSWER


def make_request_id(request: Request, given: str | None) -> str:
    """Return the part of an answer's id that the client may choose, by field or by header.

    Raises:
        VLLMValidationError: it is too long or not printable.
    """
    name = given or request.headers.get("x-request-id")
    if not name:
        return uuid.uuid4().hex
    if len(name) > MAX_REQUEST_ID_LENGTH or not name.isprintable():
        raise VLLMValidationError(
            f"a request id must be printable and have at most {MAX_REQUEST_ID_LENGTH} characters",
            parameter="request_id",
        )
    return name


def make_options(args: argparse.Namespace, served_names: tuple[str, ...], chat_template: str | None) -> AnswerOptions:
    """Return what the parsed command line says about answers."""
    flags = {field.name: getattr(args, field.name) for field in fields(AnswerOptions)[2:]}
    return AnswerOptions(served_names, chat_template, **flags)


def _make_fingerprint(engine: AsyncLLM) -> str:
    """Return a name for what computes the answers: it changes when the same seed may give other tokens."""
    config: Any = engine.vllm_config
    parts = (vllm.__version__, config.model_config.path, config.model_config.dtype, config.device)
    return f"vllm-{vllm.__version__}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"
