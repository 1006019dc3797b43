"""What happens to every request before a route sees it: size, key, state of the server, request ids. Plain ASGI."""

import hashlib
import hmac
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.protocol import MAX_REQUEST_ID_LENGTH

GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere", "/generative_scoring")
_COUNTED_PREFIXES = ("/v1/completions", "/v1/chat/completions", "/v1/score", "/generative_scoring")


@dataclass(slots=True)
class ServerState:
    """What changes while the server runs."""

    num_open_requests: int = 0  # completions and chats being answered
    stop_reason: str | None = field(default=None)  # set once the server ends: no new work is taken


def path_of(scope: Scope) -> str:
    """Return the path below the root path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


class BodyLimit:
    """Refuses a body that is larger than the server reads, by its announced length or while it arrives."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refusal().response()(scope, receive, send)
            return
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._refusal()
            return message

        await self._app(scope, receive_bounded, send)

    def _refusal(self) -> ApiError:
        return ApiError(
            413,
            f"The body may have at most {self._max_bytes} bytes (--max-request-body-bytes)",
            headers={"Connection": "close"},
        )


class ApiKeys:
    """Refuses requests for the API without one of the keys; keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_guarded = scope["type"] == "http" and scope["method"] != "OPTIONS"
        if is_guarded and path_of(scope).startswith(GUARDED_PREFIXES) and not self._has_key(Headers(scope=scope)):
            await _answer_unauthorized(send)
            return
        await self._app(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever fits
        return scheme.lower() == "bearer" and any(matches)


async def _answer_unauthorized(send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})


class Gate:
    """Counts what is being answered, and takes no new work once the server ends."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not path_of(scope).startswith(_COUNTED_PREFIXES):
            await self._app(scope, receive, send)
            return
        if self._state.stop_reason is not None:
            await ApiError(503, self._state.stop_reason).response()(scope, receive, send)
            return
        self._state.num_open_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.num_open_requests -= 1


class RequestIdHeaders:
    """Sends back the request's X-Request-Id, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id") or uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id[:MAX_REQUEST_ID_LENGTH]
            await send(message)

        await self._app(scope, receive, send_with_id)
