"""Calls of the engine on behalf of one HTTP request: several prompts at once, errors, a client that goes away."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.types import Receive

from vllm.entrypoints.openai.errors import ClientDisconnected
from vllm.entrypoints.openai.prompts import Prompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

Result = TypeVar("Result")

_MAX_WAITING_OUTPUTS = 8  # of several prompts' streams; behind them each stream merges its own


class Call(NamedTuple):
    """All that the engine is asked for by one HTTP request."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    request_id: str
    priority: int = 0


def start(engine: AsyncLLM, call: Call) -> list[AsyncGenerator[RequestOutput, None]]:
    """Return a stream of outputs a prompt; nothing runs before it is iterated.

    Raises:
        QueueOverflowError, MaxQueuedTokensError: the queue has no room for all of them.
    """
    num_tokens = sum(len(prompt.token_ids) for prompt in call.prompts)
    engine.check_queue_limits(len(call.prompts) * call.params.n, num_tokens)
    ids = [call.request_id]
    if len(call.prompts) > 1:
        ids = [f"{call.request_id}-{i}" for i in range(len(call.prompts))]
    return [
        engine.generate(prompt.as_input(), call.params, request_id, priority=call.priority)
        for prompt, request_id in zip(call.prompts, ids, strict=True)
    ]


async def generate_all(engine: AsyncLLM, call: Call) -> list[RequestOutput]:
    """Return the last output of each prompt; if one fails or this is cancelled, the others are aborted."""
    streams = start(engine, call)
    if len(streams) == 1:
        return [await read_last(streams[0])]
    tasks = [asyncio.create_task(read_last(stream)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def generate_stream(engine: AsyncLLM, call: Call) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (prompt index, output) as the outputs come; closing it aborts what still runs."""
    streams = start(engine, call)
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for output in stream:
                _check(output)
                yield 0, output
        return
    waiting: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(_MAX_WAITING_OUTPUTS)
    tasks = [asyncio.create_task(_pump(i, stream, waiting)) for i, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await waiting.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield index, item
    finally:
        await cancel_all(tasks)


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` returns; cancel it if the client goes away first.

    Raises:
        ClientDisconnected: it did.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        await cancel_all([working, leaving])


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection; the body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_last(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """Return the last output of one prompt.

    Raises:
        EngineGenerateError: the request failed.
    """
    last = None
    async with contextlib.aclosing(stream):
        async for output in stream:
            _check(output)
            last = output
    if last is None:
        raise EngineGenerateError("the engine ended a request without an output")
    return last


async def _pump(
    index: int,
    stream: AsyncGenerator[RequestOutput, None],
    waiting: "asyncio.Queue[tuple[int, RequestOutput | BaseException | None]]",
) -> None:
    try:
        async with contextlib.aclosing(stream):
            async for output in stream:
                _check(output)
                await waiting.put((index, output))
    except Exception as error:
        await waiting.put((index, error))
    else:
        await waiting.put((index, None))


def _check(output: RequestOutput) -> None:
    """Raise for a request that failed: an answer over HTTP is whole or an error."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise EngineGenerateError(
                f"request {output.request_id} failed: {completion.stop_reason or 'no cause given'}"
            )


async def cancel_all(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel what still runs and wait for its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
