"""An HTTP client for an event loop, which stamps each piece of an answer with the time it arrived.

`vllm bench serve` measures with it.
"""

import contextlib
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2
import msgspec

from vllm.exceptions import VLLMError, VLLMValidationError

OnData = Callable[[bytes, float], None]  # a piece of the body, and its time by time.perf_counter()

_CONNECT_TIMEOUT_S = 60.0  # of the handshakes, TLS's too; an answer may take any time
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
        try:
            url = httpx2.URL(base_url)
        except httpx2.InvalidURL as error:
            raise VLLMValidationError(f"{base_url!r} is not a URL such as http://127.0.0.1:8000: {error}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise VLLMValidationError(f"{base_url!r} is not a URL such as http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/")
        self._client = httpx2.AsyncClient(
            base_url=self.base_url,
            headers=_encode_headers({"Accept-Encoding": "identity", **(headers or {})}),
            verify=ssl.create_default_context() if url.scheme == "https" and verifies_certificate else False,
            timeout=httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(keepalive_expiry=None),  # any number of connections, kept as long as they last
            trust_env=False,  # no proxy
        )

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
        own = dict(headers or {})
        if body is not None:
            body = msgspec.json.encode(body)
            own["Content-Type"] = "application/json"
        is_new = False

        async def on_event(event: str, _: Mapping[str, Any]) -> None:
            nonlocal is_new
            is_new = is_new or event.startswith("connection.connect")

        request = self._client.build_request(
            method, path, content=body, headers=_encode_headers(own), extensions={"trace": on_event}
        )
        while True:
            answer = Answer()
            is_new = False
            try:
                await self._exchange(request, answer, on_data)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                raise HttpError(f"can't connect to {self.base_url}: {_find_reason(error)}") from None
            except httpx2.HTTPError as error:
                if answer.status:
                    raise HttpError(f"the connection broke in the middle of an answer: {_find_reason(error)}") from None
                if is_new:
                    raise HttpError(f"there is no answer: {_find_reason(error)}") from None
                # The server closed an idle connection just as we wrote; it has not seen the request.
            else:
                return answer

    async def _exchange(self, request: httpx2.Request, answer: Answer, on_data: OnData | None) -> None:
        response = await self._client.send(request, stream=True)
        answer.status, answer.headers = response.status_code, dict(response.headers)
        pieces: list[bytes] = []
        async with contextlib.aclosing(response):
            async for piece in response.aiter_raw():
                if on_data is not None and answer.is_ok:
                    on_data(piece, time.perf_counter())
                else:
                    pieces.append(piece)
        answer.body = b"".join(pieces)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def __aenter__(self) -> "HttpClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


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


def _encode_headers(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    for name, value in headers.items():
        if any(char in "\r\n" for char in name + value):
            raise VLLMValidationError(f"the header {name!r} holds a line break")
    return {name.encode("latin-1", "replace"): value.encode("latin-1", "replace") for name, value in headers.items()}


def _find_reason(error: Exception) -> str:
    """Return what the system says of a connection, where that is behind `error`; otherwise its own message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):  # one for each address of a host
            cause = cause.exceptions[0]
        if isinstance(cause, ConnectionError) and cause.errno:  # asyncio puts the address into its message
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
