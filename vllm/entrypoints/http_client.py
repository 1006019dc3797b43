"""A small HTTP/1.1 client for an event loop, which stamps each piece of an answer with the time it arrived.

A piece goes to its reader inside the socket's callback, so that its time is late by the event loop's own delay alone:
`vllm bench serve` measures with it.
"""

import asyncio
import contextlib
import os
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httptools
import msgspec

from vllm.exceptions import VLLMError, VLLMValidationError

OnData = Callable[[bytes, float], None]  # a piece of the body, and its time by time.perf_counter()

_MAX_SHOWN_BODY = 300  # characters of a refusal that names no reason of its own


class HttpError(VLLMError):
    """There is no answer: the address refuses connections, or the connection broke."""


@dataclass(slots=True)
class Answer:
    """One answer; the body is empty where the pieces went to an `OnData`."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    def describe_refusal(self) -> str:
        """Return the status and the reason that an OpenAI server gives, or how its answer begins."""
        text = self.body[: 4 * _MAX_SHOWN_BODY].decode(errors="replace")[:_MAX_SHOWN_BODY]
        with contextlib.suppress(msgspec.DecodeError, AttributeError, TypeError):
            document = msgspec.json.decode(self.body)
            error = document.get("error") or document
            text = error.get("message") or error.get("detail") or text
        return f"HTTP {self.status}: {' '.join(str(text).split())}"


class Sender(Protocol):
    """Something that answers HTTP requests: a server somewhere, or one in this process."""

    async def send(self, method: str, path: str, body: Any = None, *, on_data: OnData | None = None) -> Answer: ...

    async def close(self) -> None: ...


class HttpClient:
    """Sends requests to one server; connections are kept and used again, one request at a time on each."""

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str] | None = None, verifies_certificate: bool = True
    ) -> None:
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise VLLMValidationError(f"{base_url!r} is not a URL such as http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/")
        self._host = parts.hostname
        try:
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise VLLMValidationError(f"{base_url!r} has no good port") from None
        self._prefix = parts.path.rstrip("/")
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if not verifies_certificate:
                self._tls.check_hostname = False
                self._tls.verify_mode = ssl.CERT_NONE
        self._head = _write_headers({"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})})
        self._idle: list[_Connection] = []

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        on_data: OnData | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send `body` as JSON and return the answer.

        The pieces of a good answer's body go to `on_data` where it is given; a refusal is always read as a whole.

        Raises:
            HttpError: there is no whole answer.
        """
        request = self._write_request(method, path, body, headers)
        while True:
            connection = self._take_idle()
            is_used = connection is not None
            if connection is None:
                connection = await self._connect()
            try:
                answer = await connection.exchange(request, on_data)
            except _ClosedWhileIdle:
                if is_used:  # the server closed it just as we wrote; it has not seen the request
                    continue
                raise HttpError("the server closed the connection without an answer") from None
            except BaseException:
                connection.abort()
                raise
            if connection.is_open:
                self._idle.append(connection)
            return answer

    async def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _write_request(self, method: str, path: str, body: Any, headers: Mapping[str, str] | None) -> bytes:
        own: dict[str, str] = dict(headers or {})
        data = b""
        if body is not None:
            data = msgspec.json.encode(body)
            own |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        return (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode() + self._head + _write_headers(own) + b"\r\n" + data
        )

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection,
                self._host,
                self._port,
                ssl=self._tls,
            )
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            if isinstance(error, ConnectionError) and error.errno:  # asyncio puts the address into strerror
                reason = os.strerror(error.errno)
            raise HttpError(f"can't connect to {self.base_url}: {reason}") from None
        return connection


class _ClosedWhileIdle(Exception):
    """The connection was closed before a byte of an answer came."""


class _Connection(asyncio.Protocol):
    """One connection, and the answer that is read from it."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._done: asyncio.Future[Answer] | None = None
        self._answer = Answer()
        self._pieces: list[bytes] = []
        self._on_data: OnData | None = None
        self._arrived_at = 0.0
        self._ends_with_connection = False
        self.is_open = False

    async def exchange(self, request: bytes, on_data: OnData | None) -> Answer:
        """Write a request and return the answer to it."""
        if not self.is_open:
            raise _ClosedWhileIdle
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()
        self._pieces = []
        self._on_data = on_data
        self._ends_with_connection = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._arrived_at = time.perf_counter()
        if self._done is None or self._done.done():  # an answer without a request
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._fail(cause if isinstance(cause, VLLMError) else HttpError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        if not self._answer.status:
            self._done.set_exception(_ClosedWhileIdle())
        elif self._ends_with_connection and error is None:
            self._finish()
        else:
            self._fail(HttpError(f"the connection broke in the middle of an answer{f': {error}' if error else ''}"))

    # ------------------------------------------------------------ called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self._ends_with_connection = not {"content-length", "transfer-encoding"} & self._answer.headers.keys()

    def on_body(self, piece: bytes) -> None:
        if self._on_data is not None and self._answer.is_ok:
            self._on_data(piece, self._arrived_at)
        else:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._done is None or self._done.done():
            return
        if not self._parser.should_keep_alive():
            self.abort()
        self._finish()

    def _finish(self) -> None:
        self._answer.body = b"".join(self._pieces)
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.abort()


class EventReader:
    """Reads server-sent events from pieces of any size, and gives the data of each to its reader with its time."""

    def __init__(self, on_event: OnData) -> None:
        self._on_event = on_event
        self._line: list[bytes] = []  # pieces of a line that has not ended
        self._data: list[bytes] = []  # lines of an event that has not ended

    def feed(self, piece: bytes, arrived_at: float) -> None:
        """Take the next piece."""
        first, *others = piece.split(b"\n")
        self._line.append(first)
        for other in others:
            self._end_line(b"".join(self._line), arrived_at)
            self._line = [other]

    def _end_line(self, line: bytes, arrived_at: float) -> None:
        line = line.removesuffix(b"\r")
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            self._on_event(data, arrived_at)


def make_key_header(key: str | None) -> dict[str, str]:
    """Return the header that carries an API key; nothing without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def _write_headers(headers: Mapping[str, str]) -> bytes:
    for name, value in headers.items():
        if any(char in "\r\n" for char in name + value):
            raise VLLMValidationError(f"the header {name!r} holds a line break")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1", errors="replace")
