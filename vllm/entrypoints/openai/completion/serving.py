"""POST /v1/completions: from a checked request to its answer, whole or streamed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response

from vllm.entrypoints.openai.columnar import ColumnarLogprobs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.context import ServerContext, make_request_id
from vllm.entrypoints.openai.echo import EchoedPrompt
from vllm.entrypoints.openai.engine_calls import Call, generate_all, generate_stream, run_while_connected
from vllm.entrypoints.openai.logprobs import CompletionLogprobs, SequenceLogprobs, write_prompt_logprobs
from vllm.entrypoints.openai.prompts import Prompt
from vllm.entrypoints.openai.request_log import log_answer, log_request
from vllm.entrypoints.openai.sampling import check_priority
from vllm.entrypoints.openai.sse import DONE, EventPrefix, start_event_stream
from vllm.entrypoints.openai.usage import make_stream_usage, make_usage
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_checks import count_entries
from vllm.sampling_params import SamplingParams

_encode = msgspec.json.Encoder().encode


async def create_completion(request: Request, body: CompletionRequest, server: ServerContext) -> Response:
    """Answer a completions request."""
    answer = await _prepare(request, body, server)
    if body.stream:
        return await start_event_stream(request, answer.stream(), keep_alive_s=server.options.keep_alive_s)
    encoded = await run_while_connected(request, answer.collect())
    return Response(encoded, media_type="application/json")


async def _prepare(request: Request, body: CompletionRequest, server: ServerContext) -> "CompletionAnswer":
    """Check everything that can be checked before the engine sees the request."""
    model = server.check_model(body.model)
    body.check()
    request_id = f"cmpl-{make_request_id(request, body.request_id)}"
    params = server.defaults.make_params(
        body,
        n=body.num_candidates,
        max_tokens=body.token_limit,
        # candidates are ranked by their values, so those are computed even where nobody reads them
        logprobs=0 if body.logprobs is None and body.num_candidates > body.num_choices else body.logprobs,
        prompt_logprobs=body.prompt_logprobs_count,
    )
    priority = check_priority(body, server.scheduling_policy)
    prompts = await server.prompts.read_all(body, body.prompt)
    server.prompts.check_params(params, prompts)
    call = Call(prompts, params, request_id, priority)
    log_request(server.options, call)
    return CompletionAnswer(server, body, call, model)


class CompletionAnswer:
    """One request's answer in the making."""

    def __init__(self, server: ServerContext, body: CompletionRequest, call: Call, model: str) -> None:
        self._server = server
        self._body = body
        self._call = call
        self._params: SamplingParams = call.params
        self._as_token_ids = bool(body.return_tokens_as_token_ids) or server.options.returns_tokens_as_token_ids
        self._prompt_width = count_entries(_known(call.params.prompt_logprobs, server.vocab_size), server.vocab_size)
        self._head: dict[str, Any] = {
            "id": call.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    # ------------------------------------------------------------ whole

    async def collect(self) -> bytes:
        """Return the whole answer as JSON."""
        outputs = await generate_all(self._server.engine, self._call)
        log_answer(self._server.options, self._call.request_id, outputs)
        if self._server.is_big(self._count_entries(outputs)):
            return await asyncio.to_thread(self._encode_whole, outputs)
        return self._encode_whole(outputs)

    def _encode_whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        n = self._body.num_choices
        choices: list[dict[str, Any]] = []
        for prompt, output in zip(self._call.prompts, outputs, strict=True):
            shared = PromptPart(self, prompt, output.prompt_logprobs)
            for completion in self._choose_best(output.outputs):
                choices.append(self._make_choice(len(choices), prompt, shared, completion))
        assert len(choices) == n * len(outputs), "every prompt has n choices"
        num_completion = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        answer = {
            **self._head,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._server.fingerprint,
            "usage": make_usage(self._count_prompt(), num_completion, self._count_cached(outputs)),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return _encode(answer)

    def _choose_best(self, completions: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        """Return the n candidates with the largest sum of logprobs, best first; without best_of all, in order."""
        ordered = sorted(completions, key=lambda completion: completion.index)
        if len(ordered) == self._body.num_choices:
            return ordered
        ordered.sort(key=lambda completion: -(completion.cumulative_logprob or 0.0))  # stable: ties by index
        return ordered[: self._body.num_choices]

    def _make_choice(
        self, index: int, prompt: Prompt, shared: "PromptPart", completion: CompletionOutput
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._write_logprobs(self.make_writer(prompt, shared), completion, shared)
        ids = bool(self._body.return_token_ids)
        return {
            "index": index,
            "text": shared.text + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids) if ids else None,
            "prompt_logprobs": shared.prompt_logprobs,
            "prompt_token_ids": prompt.token_ids if ids else None,
            "routed_experts": None,
        }

    # ------------------------------------------------------------ streamed

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's events."""
        n = self._body.num_choices
        states: dict[int, ChoiceState] = {}
        shared: dict[int, PromptPart] = {}
        events = EventPrefix(**self._head)
        has_usage = self._body.includes_usage or self._server.options.forces_usage
        num_cached: list[int | None] = [None] * len(self._call.prompts)
        async with contextlib.aclosing(generate_stream(self._server.engine, self._call)) as outputs:
            async for prompt_index, output in outputs:
                prompt = self._call.prompts[prompt_index]
                if prompt_index not in shared:
                    shared[prompt_index] = await self._make_prompt_part(prompt, output)
                num_cached[prompt_index] = output.num_cached_tokens
                for completion in output.outputs:
                    index = prompt_index * n + completion.index
                    state = states.get(index)
                    if state is None:
                        states[index] = state = ChoiceState(self, prompt, shared[prompt_index])
                    if state.has_nothing_new(completion):
                        continue
                    choice = await self._make_chunk(state, index, completion)
                    extra = self._make_chunk_extra(state, completion, has_usage)
                    yield events.make_event(choices=[choice], **extra)
        if has_usage:
            num_completion = sum(state.num_tokens for state in states.values())
            yield events.make_event(
                choices=[],
                usage=make_stream_usage(self._count_prompt(), num_completion, self._sum_cached(num_cached)),
                system_fingerprint=self._server.fingerprint,
            )
        yield DONE

    async def _make_prompt_part(self, prompt: Prompt, output: RequestOutput) -> "PromptPart":
        if self._server.is_big(len(prompt.token_ids) * self._prompt_width):
            return await asyncio.to_thread(PromptPart, self, prompt, output.prompt_logprobs)
        return PromptPart(self, prompt, output.prompt_logprobs)

    async def _make_chunk(self, state: "ChoiceState", index: int, completion: CompletionOutput) -> dict[str, Any]:
        is_first = not state.has_started
        logprobs = None
        if state.writer is not None:
            num_entries = len(completion.token_ids) * state.writer.num_entries_a_row
            echoed = state.shared if is_first else None
            if is_first and self._body.echo:
                num_entries += len(state.prompt.token_ids) * self._prompt_width
            if self._server.is_big(num_entries):
                logprobs = await asyncio.to_thread(self._write_logprobs, state.writer, completion, echoed)
            else:
                logprobs = self._write_logprobs(state.writer, completion, echoed)
        ids = bool(self._body.return_token_ids)
        has_prompt_ids = is_first and (ids or bool(self._body.echo))
        choice: dict[str, Any] = {
            "index": index,
            "text": state.shared.text + completion.text if is_first else completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "prompt_token_ids": state.prompt.token_ids if has_prompt_ids else None,
            "token_ids": list(completion.token_ids) if ids else None,
        }
        if is_first and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = state.shared.prompt_logprobs
        state.has_started = True
        state.num_tokens += len(completion.token_ids)
        return choice

    def _make_chunk_extra(self, state: "ChoiceState", completion: CompletionOutput, has_usage: bool) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._body.has_continuous_usage:
            extra["usage"] = make_stream_usage(len(state.prompt.token_ids), state.num_tokens)
        if completion.finish_reason is not None and not has_usage:
            extra["system_fingerprint"] = self._server.fingerprint
        return extra

    # ------------------------------------------------------------ both

    def make_echo(self, prompt: Prompt) -> EchoedPrompt | None:
        if not self._body.echo:
            return None
        is_whole = self._params.max_tokens == 0
        return EchoedPrompt(self._server.tokenizer, prompt.token_ids, prompt.text, is_whole=is_whole)

    def write_echo(self, echo: EchoedPrompt, scores: FlatLogprobs) -> CompletionLogprobs | ColumnarLogprobs:
        if self._body.is_columnar:
            return ColumnarLogprobs.of(scores)
        return echo.write(scores, as_token_ids=self._as_token_ids, max_entries=self._prompt_width)

    def write_prompt(self, scores: FlatLogprobs) -> list[msgspec.Raw | None] | msgspec.Raw:
        if self._body.is_columnar:
            return ColumnarLogprobs.of(scores).encode()
        return write_prompt_logprobs(scores, self._prompt_width)

    @property
    def wants_logprobs(self) -> bool:
        return self._body.logprobs is not None

    @property
    def repeats_prompt_logprobs(self) -> bool:
        """Say whether the prompt's scores stand under `prompt_logprobs` too (a stream has them only when asked for)."""
        return self._body.prompt_logprobs is not None or not self._body.stream

    def make_writer(self, prompt: Prompt, shared: "PromptPart") -> SequenceLogprobs:
        return SequenceLogprobs(
            self._server.tokenizer,
            prompt.token_ids,
            self._params,
            as_token_ids=self._as_token_ids,
            vocab_size=self._server.vocab_size,
            start_offset=len(shared.text),
        )

    def _write_logprobs(
        self, writer: SequenceLogprobs, completion: CompletionOutput, shared: "PromptPart | None"
    ) -> CompletionLogprobs | msgspec.Raw:
        """Return the entries of the completion's tokens, those of an echoed prompt in front."""
        scores = _as_flat(completion.logprobs)
        echoed = None if shared is None else shared.logprobs
        if self._body.is_columnar:
            columns = ColumnarLogprobs.of(scores)
            return (echoed.followed_by(columns) if isinstance(echoed, ColumnarLogprobs) else columns).encode()
        written = writer.write_completion(
            completion.token_ids, scores, completion.finish_reason, completion.stop_reason
        )
        return echoed.followed_by(written) if isinstance(echoed, CompletionLogprobs) else written

    def _count_prompt(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self._call.prompts)

    def _count_cached(self, outputs: Sequence[RequestOutput]) -> int | None:
        return self._sum_cached([output.num_cached_tokens for output in outputs])

    def _sum_cached(self, counts: Sequence[int | None]) -> int | None:
        return sum(count or 0 for count in counts) if self._server.options.tells_prompt_details else None

    def _count_entries(self, outputs: Sequence[RequestOutput]) -> int:
        k = len(self._params.logprob_token_ids or ()) or _known(self._params.logprobs, self._server.vocab_size)
        width = count_entries(k, self._server.vocab_size)
        num_sampled = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        return self._count_prompt() * self._prompt_width + num_sampled * width


class PromptPart:
    """What all choices of a prompt share: its echo and its scores, written once."""

    def __init__(self, answer: CompletionAnswer, prompt: Prompt, scores: Any) -> None:
        echo = answer.make_echo(prompt)
        self.text = "" if echo is None else echo.text
        self.logprobs: CompletionLogprobs | ColumnarLogprobs | None = None
        self.prompt_logprobs: list[msgspec.Raw | None] | msgspec.Raw | None = None
        if not scores:
            return
        flat = _as_flat(scores)
        if echo is not None and answer.wants_logprobs:
            self.logprobs = answer.write_echo(echo, flat)
        if answer.repeats_prompt_logprobs:
            self.prompt_logprobs = answer.write_prompt(flat)


class ChoiceState:
    """How far one choice of a stream has come."""

    __slots__ = ("has_started", "num_tokens", "prompt", "shared", "writer")

    def __init__(self, answer: CompletionAnswer, prompt: Prompt, shared: PromptPart) -> None:
        self.prompt = prompt
        self.shared = shared
        self.writer = answer.make_writer(prompt, shared) if answer.wants_logprobs else None
        self.num_tokens = 0
        self.has_started = False

    def has_nothing_new(self, completion: CompletionOutput) -> bool:
        return not completion.text and not completion.token_ids and completion.finish_reason is None


def _as_flat(scores: Any) -> FlatLogprobs:
    """Return the rows of an output; without any, no rows."""
    return scores if isinstance(scores, FlatLogprobs) else FlatLogprobs()


def _known(k: int | None, vocab_size: int) -> int | None:
    return vocab_size if k == -1 else k
