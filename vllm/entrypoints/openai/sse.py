"""Server-sent events: the form of an event, and the response that sends a stream of them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.engine_calls import cancel_all, run_while_connected
from vllm.entrypoints.openai.errors import ClientDisconnected, to_api_error

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


def make_event(data: Any) -> bytes:
    """Return one event that holds `data` as JSON."""
    return b"data: " + _encode(data) + b"\n\n"


class EventPrefix:
    """An event's first fields, which are the same in all events of a stream and so encoded once."""

    def __init__(self, **fields: Any) -> None:
        self._start = b"data: " + _encode(fields)[:-1] + b","

    def make_event(self, **fields: Any) -> bytes:
        """Return an event with `fields` after the common ones."""
        return self._start + _encode(fields)[1:] + b"\n\n"


class EventStream(Response):
    """Sends events until they end or the client goes away; then they are closed, which aborts what makes them.

    `first` is an event that is there already. What goes wrong after it is sent as an event of its own, since the status
    is out already.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], *, keep_alive_s: float = 0.0) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnected):
                await run_while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for event in self._with_keep_alive():
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            body = make_event(to_api_error(error).body()) + DONE
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _with_keep_alive(self) -> AsyncGenerator[bytes, None]:
        """Yield the events, and a comment whenever none came for a while."""
        if self._keep_alive_s <= 0:
            async for event in self._events:
                yield event
            return
        waiting: asyncio.Future[bytes] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(_take_next(self._events))
                done, _ = await asyncio.wait((waiting,), timeout=self._keep_alive_s)
                if not done:
                    yield _KEEP_ALIVE
                    continue
                event, waiting = waiting.result(), None
                if not event:
                    return
                yield event
        finally:
            if waiting is not None:
                await cancel_all([waiting])


async def start_event_stream(
    request: Request, events: AsyncGenerator[bytes, None], *, keep_alive_s: float = 0.0
) -> EventStream:
    """Return the response once its first event is there, so that a refusal still has a status of its own."""
    try:
        first = await run_while_connected(request.receive, _take_next(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, keep_alive_s=keep_alive_s)


async def _take_next(events: AsyncGenerator[bytes, None]) -> bytes:
    """Return the next event, b"" after the last one."""
    return await anext(events, b"")
