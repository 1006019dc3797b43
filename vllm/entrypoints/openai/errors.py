"""Errors over HTTP: OpenAI's body, and which of our exceptions has which status.

400: the caller can correct the request. 503: it may succeed later. 500: a defect of the server.
"""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from vllm.exceptions import (
    MaxQueuedTokensError,
    QueueOverflowError,
    VLLMClientError,
    VLLMError,
    VLLMNotFoundError,
    VLLMValidationError,
    shorten,
)
from vllm.v1.engine.exceptions import EngineDeadError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "1"  # a queue moves within a second; so does a load balancer's next choice

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "Service Unavailable",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
        self.headers = dict(headers or {})
        if status == 503:
            self.headers.setdefault("Retry-After", RETRY_AFTER_S)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body()), self.status, headers=self.headers, media_type="application/json"
        )


class ClientDisconnected(Exception):
    """The client went away; there is nobody to answer."""


def to_api_error(error: BaseException) -> ApiError:
    """Return the answer to a request that failed by `error`; a defect of the server goes into the log too."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _from_schema_errors(error)
    if isinstance(error, VLLMValidationError):
        return ApiError(400, encodable(str(error)), param=error.parameter)
    if isinstance(error, VLLMNotFoundError):
        return ApiError(404, encodable(str(error)))
    if isinstance(error, VLLMClientError):
        return ApiError(400, encodable(str(error)))
    if isinstance(error, QueueOverflowError | MaxQueuedTokensError | EngineDeadError):
        return ApiError(503, encodable(str(error)))
    if isinstance(error, HTTPException):
        message = error.detail if isinstance(error.detail, str) else "HTTP error"
        return ApiError(error.status_code, message, headers=error.headers)
    if isinstance(error, VLLMError):
        logger.error("a request failed: %s", error)
        return ApiError(500, encodable(str(error)))
    logger.error("a request failed with an unexpected %s", type(error).__name__, exc_info=error)
    return ApiError(500, "Internal server error; its cause is in the server's log")


def encodable(text: str) -> str:
    """Replace lone surrogates, which JSON in UTF-8 can't hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _from_schema_errors(error: ValidationError) -> ApiError:
    """A rule of ours that broke while the body was read, or the body's shape."""
    details = error.errors(include_url=False)
    for detail in details:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, VLLMValidationError):
            return to_api_error(cause)
    lines = []
    for detail in details:
        shown = {"type": detail["type"], "loc": _dotted(detail["loc"]), "msg": detail["msg"]}
        lines.append(f"  {shown | {'input': _describe(detail['input'])}}")
    count = f"{len(details)} validation error{'s' if len(details) != 1 else ''}"
    message = encodable(shorten(f"{count}:\n" + "\n".join(lines), 2000))
    return ApiError(400, message, param=_dotted(details[0]["loc"]), kind="Bad Request")


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, ("body", *location)))


def _describe(value: Any) -> str:
    """Return a few characters that say what came; a request's text does not travel back."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return shorten(value, 40)


def add_error_handlers(app: FastAPI) -> None:
    """Have every error of a route answered in OpenAI's form."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnected):
            return Response(status_code=499)
        return to_api_error(error).response()

    for kind in (ApiError, ClientDisconnected, ValidationError, VLLMError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
