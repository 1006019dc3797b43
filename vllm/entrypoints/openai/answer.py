"""From a checked request to its answer, whole or streamed: what completions and chat have in common."""

import abc
import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Request, Response

from vllm.entrypoints.openai.columnar import ColumnarLogprobs
from vllm.entrypoints.openai.context import ServerContext, make_request_id
from vllm.entrypoints.openai.engine_calls import Call, generate_all, generate_stream, run_while_connected
from vllm.entrypoints.openai.logprobs import CompletionLogprobs, SequenceLogprobs, write_prompt_logprobs
from vllm.entrypoints.openai.prompts import Prompt
from vllm.entrypoints.openai.protocol import GenerationRequest
from vllm.entrypoints.openai.request_log import log_answer, log_request
from vllm.entrypoints.openai.sampling import check_priority
from vllm.entrypoints.openai.sse import DONE, EventPrefix, start_event_stream
from vllm.entrypoints.openai.usage import make_stream_usage, make_usage
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_checks import count_entries

Body = TypeVar("Body", bound=GenerationRequest)
Logprobs = CompletionLogprobs | ColumnarLogprobs | dict[str, Any] | msgspec.Raw | None
Result = TypeVar("Result")

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class PromptPart:
    """What all choices of a prompt share, written once."""

    prompt: Prompt
    text: str = ""  # in front of each choice's own
    logprobs: CompletionLogprobs | ColumnarLogprobs | None = None  # of that text
    prompt_logprobs: list[msgspec.Raw | None] | msgspec.Raw | None = None


@dataclass(slots=True)
class Choice:
    """One choice of an answer, and how much of it has been written."""

    index: int
    part: PromptPart
    writer: SequenceLogprobs
    num_tokens: int = 0
    has_started: bool = False


class Answer(abc.ABC, Generic[Body]):
    """One request's answer in the making; a subclass reads its route's prompts and gives choices their shape."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    logprobs_field = "logprobs"  # what the route calls the engine's `logprobs`
    _call: Call
    _head: dict[str, Any]

    def __init__(self, server: ServerContext, body: Body) -> None:
        self._server = server
        self._body = body
        self._as_token_ids = bool(body.return_tokens_as_token_ids) or server.options.return_tokens_as_token_ids
        self._ids = bool(body.return_token_ids)

    async def respond(self, request: Request) -> Response:
        """Check everything that can be checked before the engine sees the request, then answer it."""
        try:
            await self._check(request)
        except VLLMValidationError as error:
            if error.parameter != "logprobs":
                raise
            raise type(error)(error.message, parameter=self.logprobs_field, value=error.value) from None
        log_request(self._server.options, self._call)
        if self._body.stream:
            return await start_event_stream(
                request, self._stream(), keep_alive_s=self._server.options.sse_keep_alive_interval
            )
        encoded = await run_while_connected(request.receive, self._collect())
        return Response(encoded, media_type="application/json")

    async def _check(self, request: Request) -> None:
        server, body = self._server, self._body
        model = server.check_model(body.model)
        body.check()
        request_id = f"{self.id_prefix}-{make_request_id(request, body.request_id)}"
        params = server.defaults.make_params(body)
        priority = check_priority(body.priority, server.scheduling_policy)
        prompts = await self._read_prompts()
        server.prompts.check_params(params, prompts)
        self._call = Call(prompts, params, request_id, priority)
        vocab_size = server.vocab_size
        k = params.prompt_logprobs
        self._prompt_width = count_entries(vocab_size if k == -1 else k, vocab_size)
        object_name = self.chunk_object_name if body.stream else self.object_name
        self._head = {"id": request_id, "object": object_name, "created": int(time.time()), "model": model}

    # ------------------------------------------------------------ a route's own

    @abc.abstractmethod
    async def _read_prompts(self) -> list[Prompt]:
        """Return the prompts of the request."""

    @abc.abstractmethod
    def _make_choice(self, choice: Choice, completion: CompletionOutput, logprobs: Logprobs) -> dict[str, Any]:
        """Return a choice of a whole answer."""

    @abc.abstractmethod
    def _make_chunk(self, choice: Choice, completion: CompletionOutput, logprobs: Logprobs) -> dict[str, Any]:
        """Return what an event of a stream says about a choice."""

    @abc.abstractmethod
    def _write_tokens(self, choice: Choice, completion: CompletionOutput, scores: FlatLogprobs) -> Logprobs:
        """Return the entries of a completion's tokens in the route's own form."""

    def _make_part(self, prompt: Prompt, output: RequestOutput) -> PromptPart:
        """Return what stands in front of each choice; a stream has the prompt's scores only when asked for."""
        part = PromptPart(prompt)
        scores = output.prompt_logprobs
        if isinstance(scores, FlatLogprobs) and (self._body.prompt_logprobs is not None or not self._body.stream):
            if self._body.is_columnar:
                part.prompt_logprobs = ColumnarLogprobs.of(scores).encode()
            else:
                part.prompt_logprobs = write_prompt_logprobs(scores, self._prompt_width)
        return part

    def _choose_best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """Return the completions that are answered, of all of a prompt, which come ordered by index."""
        return completions

    def _describe_prompt(self, part: PromptPart) -> dict[str, Any]:
        """Return what a whole answer says about its one prompt."""
        return {}

    def _make_first_chunks(self, part: PromptPart) -> list[dict[str, Any]]:
        """Return the fields of the events that come before all others of a prompt."""
        return []

    # ------------------------------------------------------------ whole

    async def _collect(self) -> bytes:
        """Return the whole answer as JSON."""
        outputs = await generate_all(self._server.engine, self._call)
        log_answer(self._server.options, self._call.request_id, outputs)
        num_sampled = _count_tokens(outputs)
        num_entries = self._num_prompt * self._prompt_width + num_sampled * self._make_writer("").num_entries_a_row
        return await self._run(num_entries, self._encode_whole, outputs)

    def _encode_whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices: list[dict[str, Any]] = []
        for prompt, output in zip(self._call.prompts, outputs, strict=True):
            part = self._make_part(prompt, output)
            completions = sorted(output.outputs, key=lambda completion: completion.index)
            for completion in self._choose_best(completions):
                choice = Choice(len(choices), part, self._make_writer(part.text))
                choices.append(self._make_choice(choice, completion, self._write_logprobs(choice, completion)))
        assert len(choices) == self._body.num_choices * len(outputs), "every prompt has n choices"
        num_cached = self._sum_cached([output.num_cached_tokens for output in outputs])
        answer = {
            **self._head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._server.fingerprint,
            "usage": make_usage(self._num_prompt, _count_tokens(outputs), num_cached),
            **self._describe_prompt(part),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return _encode(answer)

    # ------------------------------------------------------------ streamed

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's events."""
        events = EventPrefix(**self._head)
        has_usage = self._body.includes_usage or self._server.options.enable_force_include_usage
        parts: dict[int, PromptPart] = {}
        choices: dict[int, Choice] = {}
        num_cached: list[int | None] = [None] * len(self._call.prompts)
        async with contextlib.aclosing(generate_stream(self._server.engine, self._call)) as outputs:
            async for prompt_index, output in outputs:
                num_cached[prompt_index] = output.num_cached_tokens
                if (part := parts.get(prompt_index)) is None:
                    prompt = self._call.prompts[prompt_index]
                    num_entries = len(prompt.token_ids) * self._prompt_width
                    parts[prompt_index] = part = await self._run(num_entries, self._make_part, prompt, output)
                    for fields in self._make_first_chunks(part):
                        yield events.make_event(**fields)
                for completion in output.outputs:
                    if not completion.text and not completion.token_ids and completion.finish_reason is None:
                        continue
                    index = prompt_index * self._body.num_choices + completion.index
                    if (choice := choices.get(index)) is None:
                        choices[index] = choice = Choice(index, part, self._make_writer(part.text))
                    yield events.make_event(**await self._advance(choice, completion, has_usage))
        if has_usage:
            num_completion = sum(choice.num_tokens for choice in choices.values())
            usage = make_stream_usage(self._num_prompt, num_completion, self._sum_cached(num_cached))
            yield events.make_event(choices=[], usage=usage, system_fingerprint=self._server.fingerprint)
        yield DONE

    async def _advance(self, choice: Choice, completion: CompletionOutput, has_usage: bool) -> dict[str, Any]:
        """Return the fields of the event that holds a choice's next tokens."""
        num_entries = len(completion.token_ids) * choice.writer.num_entries_a_row
        num_prompt = len(choice.part.prompt.token_ids)
        if choice.part.logprobs is not None and not choice.has_started:
            num_entries += num_prompt * self._prompt_width
        logprobs = await self._run(num_entries, self._write_logprobs, choice, completion)
        fields: dict[str, Any] = {"choices": [self._make_chunk(choice, completion, logprobs)]}
        choice.has_started = True
        choice.num_tokens += len(completion.token_ids)
        if self._body.has_continuous_usage:
            fields["usage"] = make_stream_usage(num_prompt, choice.num_tokens)
        if completion.finish_reason is not None and not has_usage:
            fields["system_fingerprint"] = self._server.fingerprint
        return fields

    # ------------------------------------------------------------ both

    async def _run(self, num_entries: int, work: Callable[..., Result], *args: Any) -> Result:
        """Return what `work` returns; where it is much, from a thread, so that streams go on meanwhile."""
        return await asyncio.to_thread(work, *args) if self._server.is_big(num_entries) else work(*args)

    def _make_writer(self, text: str) -> SequenceLogprobs:
        """Return the writer of a choice that has `text` in front."""
        tokenizer, params = self._server.tokenizer, self._call.params
        return SequenceLogprobs(
            params,
            as_token_ids=self._as_token_ids,
            vocab_size=self._server.vocab_size,
            hidden_ids=tokenizer.all_special_ids if tokenizer is not None and params.skip_special_tokens else (),
            start_offset=len(text),
        )

    def _write_logprobs(self, choice: Choice, completion: CompletionOutput) -> Logprobs:
        """Return the entries of a completion's tokens; the choice's first ones come behind those of its prompt."""
        if self._body.asked_logprobs is None:
            return None
        scores = completion.logprobs if isinstance(completion.logprobs, FlatLogprobs) else FlatLogprobs()
        echoed = None if choice.has_started else choice.part.logprobs
        if self._body.is_columnar:
            columns = ColumnarLogprobs.of(scores)
            return (echoed.followed_by(columns) if isinstance(echoed, ColumnarLogprobs) else columns).encode()
        written = self._write_tokens(choice, completion, scores)
        if isinstance(echoed, CompletionLogprobs) and isinstance(written, CompletionLogprobs):
            return echoed.followed_by(written)
        return written

    @property
    def _num_prompt(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._call.prompts)

    def _sum_cached(self, counts: Sequence[int | None]) -> int | None:
        return sum(count or 0 for count in counts) if self._server.options.enable_prompt_tokens_details else None


def _count_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
