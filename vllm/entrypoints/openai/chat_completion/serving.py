"""POST /v1/chat/completions: from a checked conversation to its answer, whole or streamed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import msgspec
from fastapi import Request, Response

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.columnar import ColumnarLogprobs
from vllm.entrypoints.openai.context import ServerContext, make_request_id
from vllm.entrypoints.openai.engine_calls import Call, generate_all, generate_stream, run_while_connected
from vllm.entrypoints.openai.logprobs import SequenceLogprobs, write_prompt_logprobs
from vllm.entrypoints.openai.prompts import Prompt
from vllm.entrypoints.openai.request_log import log_answer, log_request
from vllm.entrypoints.openai.sampling import check_priority
from vllm.entrypoints.openai.sse import DONE, EventPrefix, start_event_stream
from vllm.entrypoints.openai.usage import make_stream_usage, make_usage
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_checks import count_entries
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.chat_template import flatten_message

_encode = msgspec.json.Encoder().encode


class Conversation(NamedTuple):
    """A conversation as the engine gets it, and what its answer repeats of it."""

    prompt: Prompt
    text: str  # the rendered template
    role: str  # of the answer
    echoed: str  # what stands in front of each choice's content


async def create_chat_completion(request: Request, body: ChatCompletionRequest, server: ServerContext) -> Response:
    """Answer a chat request."""
    answer = await _prepare(request, body, server)
    if body.stream:
        return await start_event_stream(request, answer.stream(), keep_alive_s=server.options.keep_alive_s)
    encoded = await run_while_connected(request, answer.collect())
    return Response(encoded, media_type="application/json")


async def _prepare(request: Request, body: ChatCompletionRequest, server: ServerContext) -> "ChatAnswer":
    """Check everything that can be checked before the engine sees the request."""
    model = server.check_model(body.model)
    body.check()
    request_id = f"chatcmpl-{make_request_id(request, body.request_id)}"
    params = _make_params(body, server)
    priority = check_priority(body, server.scheduling_policy)
    conversation = await _read_conversation(body, server)
    with _top_logprobs_named():
        server.prompts.check_params(params, [conversation.prompt])
    call = Call([conversation.prompt], params, request_id, priority)
    log_request(server.options, call)
    return ChatAnswer(server, body, call, conversation, model)


def _make_params(body: ChatCompletionRequest, server: ServerContext) -> SamplingParams:
    with _top_logprobs_named():
        return server.defaults.make_params(
            body,
            n=body.num_choices,
            max_tokens=body.token_limit,
            logprobs=body.sample_logprobs_count,
            prompt_logprobs=body.prompt_logprobs_count,
        )


@contextlib.contextmanager
def _top_logprobs_named() -> Any:
    """Name the field that a chat client knows: the engine's `logprobs` is its `top_logprobs`."""
    try:
        yield
    except VLLMValidationError as error:
        if error.parameter != "logprobs":
            raise
        raise type(error)(error.message, parameter="top_logprobs", value=error.value) from None


def render_conversation(body: ChatCompletionRequest, server: ServerContext) -> str:
    """Return the text that the chat template makes of the messages.

    Raises:
        VLLMValidationError: a message or a template is not served.
    """
    template = server.choose_chat_template(body.chat_template)
    if server.tokenizer is None:
        raise VLLMValidationError("this server runs without a tokenizer, so it has no chat", parameter="messages")
    return server.tokenizer.apply_chat_template(
        body.messages,
        chat_template=template,
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        **body.template_variables(template),
    )


async def _read_conversation(body: ChatCompletionRequest, server: ServerContext) -> Conversation:
    text = render_conversation(body, server)
    prompt = await server.prompts.read_rendered(body, text)
    final = flatten_message(body.messages[-1], len(body.messages) - 1)
    role = server.options.response_role if body.adds_generation_prompt else str(final["role"])
    echoed = str(final.get("content") or "") if body.echo and final["role"] == role else ""
    return Conversation(prompt, text, role, echoed)


class ChatAnswer:
    """One request's answer in the making."""

    def __init__(
        self,
        server: ServerContext,
        body: ChatCompletionRequest,
        call: Call,
        conversation: Conversation,
        model: str,
    ) -> None:
        self._server = server
        self._body = body
        self._call = call
        self._conversation = conversation
        self._params: SamplingParams = call.params
        self._as_token_ids = bool(body.return_tokens_as_token_ids) or server.options.returns_tokens_as_token_ids
        self._ids = bool(body.return_token_ids)
        k = call.params.prompt_logprobs
        self._prompt_width = count_entries(server.vocab_size if k == -1 else k, server.vocab_size)
        self._head: dict[str, Any] = {
            "id": call.request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }

    # ------------------------------------------------------------ whole

    async def collect(self) -> bytes:
        """Return the whole answer as JSON."""
        outputs = await generate_all(self._server.engine, self._call)
        log_answer(self._server.options, self._call.request_id, outputs)
        writers = [self._make_writer() for _ in outputs[0].outputs]
        num_rows = sum(len(completion.token_ids) for completion in outputs[0].outputs)
        num_entries = self._num_prompt * self._prompt_width + num_rows * (
            writers[0].num_entries_a_row if writers else 0
        )
        if self._server.is_big(num_entries):
            return await asyncio.to_thread(self._encode_whole, outputs[0], writers)
        return self._encode_whole(outputs[0], writers)

    def _encode_whole(self, output: RequestOutput, writers: Sequence[SequenceLogprobs]) -> bytes:
        completions = sorted(output.outputs, key=lambda completion: completion.index)
        choices = [
            {
                "index": completion.index,
                "message": {
                    "role": self._conversation.role,
                    "content": self._conversation.echoed + completion.text,
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "reasoning": None,
                },
                "logprobs": self._write(writer, completion),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "token_ids": list(completion.token_ids) if self._ids else None,
                "routed_experts": None,
            }
            for completion, writer in zip(completions, writers, strict=True)
        ]
        num_completion = sum(len(completion.token_ids) for completion in completions)
        answer = {
            **self._head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._server.fingerprint,
            "usage": make_usage(self._num_prompt, num_completion, self._told_cached(output)),
            "prompt_logprobs": self._write_prompt(output),
            **self._tell_prompt(),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return _encode(answer)

    # ------------------------------------------------------------ streamed

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's events: who speaks, for each choice; then what comes; then what it cost."""
        events = EventPrefix(**self._head)
        has_usage = self._body.includes_usage or self._server.options.forces_usage
        writers = [self._make_writer() for _ in range(self._params.n)]
        counts = [0] * self._params.n
        num_cached = None
        has_started = False
        async with contextlib.aclosing(generate_stream(self._server.engine, self._call)) as outputs:
            async for _, output in outputs:
                num_cached = self._told_cached(output)
                if not has_started:
                    has_started = True
                    for event in await self._make_first_events(events, output):
                        yield event
                for completion in output.outputs:
                    index = completion.index
                    if not completion.text and not completion.token_ids and completion.finish_reason is None:
                        continue
                    counts[index] += len(completion.token_ids)
                    extra: dict[str, Any] = {}
                    if self._body.has_continuous_usage:
                        extra["usage"] = make_stream_usage(self._num_prompt, counts[index])
                    if completion.finish_reason is not None and not has_usage:
                        extra["system_fingerprint"] = self._server.fingerprint
                    choice = await self._make_chunk(writers[index], completion)
                    yield events.make_event(choices=[choice], **extra)
        if has_usage:
            usage = make_stream_usage(self._num_prompt, sum(counts), num_cached)
            yield events.make_event(choices=[], usage=usage, system_fingerprint=self._server.fingerprint)
        yield DONE

    async def _make_first_events(self, events: EventPrefix, output: RequestOutput) -> list[bytes]:
        """Return each choice's first event, with who speaks, and the prompt's scores in the very first one."""
        extra: dict[str, Any] = {}
        if self._body.has_continuous_usage:
            extra["usage"] = make_stream_usage(self._num_prompt, 0)
        extra |= self._tell_prompt()
        scores: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None:
            if self._server.is_big(self._num_prompt * self._prompt_width):
                scores["prompt_logprobs"] = await asyncio.to_thread(self._write_prompt, output)
            else:
                scores["prompt_logprobs"] = self._write_prompt(output)
        made = []
        for index in range(self._params.n):
            delta = {"role": self._conversation.role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            made.append(events.make_event(choices=[choice], **(scores if index == 0 else {}), **extra))
        if self._conversation.echoed:
            for index in range(self._params.n):
                choice = {"index": index, "delta": {"content": self._conversation.echoed}}
                made.append(events.make_event(choices=[{**choice, "logprobs": None, "finish_reason": None}]))
        return made

    async def _make_chunk(self, writer: SequenceLogprobs, completion: CompletionOutput) -> dict[str, Any]:
        if self._server.is_big(len(completion.token_ids) * writer.num_entries_a_row):
            logprobs = await asyncio.to_thread(self._write, writer, completion)
        else:
            logprobs = self._write(writer, completion)
        choice: dict[str, Any] = {
            "index": completion.index,
            "delta": {"content": completion.text},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        if completion.finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        choice["token_ids"] = list(completion.token_ids) if self._ids else None
        return choice

    # ------------------------------------------------------------ both

    @property
    def _num_prompt(self) -> int:
        return len(self._conversation.prompt.token_ids)

    def _told_cached(self, output: RequestOutput) -> int | None:
        return output.num_cached_tokens or 0 if self._server.options.tells_prompt_details else None

    def _tell_prompt(self) -> dict[str, Any]:
        return {
            "prompt_token_ids": self._conversation.prompt.token_ids if self._ids else None,
            "prompt_text": self._conversation.text if self._body.return_prompt_text else None,
        }

    def _make_writer(self) -> SequenceLogprobs:
        return SequenceLogprobs(
            self._server.tokenizer,
            self._conversation.prompt.token_ids,
            self._params,
            as_token_ids=self._as_token_ids,
            vocab_size=self._server.vocab_size,
        )

    def _write(self, writer: SequenceLogprobs, completion: CompletionOutput) -> dict[str, Any] | msgspec.Raw | None:
        if not self._body.logprobs:
            return None
        scores = completion.logprobs
        flat = scores if isinstance(scores, FlatLogprobs) else FlatLogprobs()
        if self._body.is_columnar:
            return ColumnarLogprobs.of(flat).encode()
        return {"content": writer.write_chat(completion.token_ids, flat, completion.finish_reason)}

    def _write_prompt(self, output: RequestOutput) -> list[msgspec.Raw | None] | msgspec.Raw | None:
        scores: Any = output.prompt_logprobs
        if not isinstance(scores, FlatLogprobs):
            return None
        if self._body.is_columnar:
            return ColumnarLogprobs.of(scores).encode()
        return write_prompt_logprobs(scores, self._prompt_width)
