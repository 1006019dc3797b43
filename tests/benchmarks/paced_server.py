"""An OpenAI server of another make: it sends what a test says, when it says, and notes when it did."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any] | str  # a string is sent as it is
Script = Callable[[dict[str, Any]], AsyncIterator[Event]]


def choice(text: str, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


class Refusal(Exception):
    """Raised by a script before its first event: a status and a message."""


class Break(Exception):
    """Raised by a script: the connection is cut."""


async def say_words(body: dict[str, Any]) -> AsyncIterator[Event]:
    """As many words as are asked for, without a pause."""
    num = body.get("max_tokens") or body.get("max_completion_tokens") or 4
    is_chat = "messages" in body
    for place in range(num):
        finish = "length" if place == num - 1 else None
        yield delta(finish, content=" hi") if is_chat else choice(" hi", finish=finish)
    yield usage(7, num)


@dataclass
class PacedServer:
    """Runs in a thread. What it saw can be read once the answers are there."""

    script: Script = say_words
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)  # request line and headers of each request
    sent_at: list[list[float]] = field(default_factory=list)  # each request's events, by time.perf_counter()
    num_connections: int = 0
    num_open: int = 0  # requests that are being answered
    max_open: int = 0
    num_cut: int = 0  # answers whose reader left
    closes_when_idle: bool = False
    models: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "paced"}])

    def __enter__(self) -> "PacedServer":
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self, ready: threading.Event) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [
                    line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length")
                ]
                data = await reader.readexactly(int(lengths[0])) if lengths else b""
                self.heads.append(head)
                if "/v1/models" in head.split("\r\n")[0]:
                    answer_whole(writer, 200, {"data": self.models})
                    continue
                await self._answer(json.loads(data or b"{}"), writer)
                if self.closes_when_idle:
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError, Break):
            pass
        finally:
            writer.close()

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        times: list[float] = []
        self.sent_at.append(times)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            has_started = False
            try:
                async for event in self.script(body):
                    if not has_started:
                        has_started = True
                        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
                        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
                    times.append(time.perf_counter())
                    write_chunk(writer, f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
                    await writer.drain()
            except Refusal as refusal:
                status, message = refusal.args
                answer_whole(
                    writer, status, {"error": {"message": message, "type": "x", "param": None, "code": status}}
                )
                return
            write_chunk(writer, b"data: [DONE]\n\n")
            write_chunk(writer, b"")
            await writer.drain()
        except ConnectionError:
            self.num_cut += 1
            raise
        finally:
            self.num_open -= 1


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def answer_whole(writer: asyncio.StreamWriter, status: int, document: Any) -> None:
    data = json.dumps(document).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
