"""From the bytes of a request to a checked model: content type, JSON, known fields, schema."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import BaseModel

from vllm.entrypoints.openai.errors import ApiError, encodable
from vllm.entrypoints.openai.unserved import HARMLESS_FIELDS, UNSERVED_FIELDS, refuse_unserved
from vllm.exceptions import shorten

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)


async def read_json_object(request: Request) -> dict[str, Any]:
    """Return the JSON object that a request carries.

    Raises:
        ApiError: another content type, or no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(400, f"Content-Type must be application/json; got {shorten(kind, 80) or 'none'}")
    body = await request.body()
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        where = _byte_of(str(error))
        raise ApiError(
            400, f"The body is not valid JSON: {encodable(str(error))}", param=f"body{where}", kind="Bad Request"
        ) from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object", param="body", kind="Bad Request")
    return value


async def read_request(request: Request, model: type[Model]) -> Model:
    """Return the body as `model`; fields that this server does not serve are refused, unknown ones are ignored.

    Raises:
        ApiError, pydantic.ValidationError, VLLMValidationError: what came is not served or has another shape.
    """
    body = await read_json_object(request)
    return parse_request(body, model)


def parse_request(body: Mapping[str, Any], model: type[Model]) -> Model:
    """Return a JSON object as `model`; see `read_request`."""
    refuse_unserved(body)
    unknown = body.keys() - model.model_fields.keys() - UNSERVED_FIELDS.keys() - HARMLESS_FIELDS
    if unknown and logger.isEnabledFor(logging.DEBUG):
        logger.debug("unknown fields are ignored: %s", shorten(encodable(", ".join(sorted(unknown)))))
    return model.model_validate(body)


def _byte_of(message: str) -> str:
    """Return ".N" for a decoder's message that ends with "(byte N)"."""
    number = message.rpartition("(byte ")[2].rstrip(")")
    return f".{number}" if number.isdigit() else ""
