"""GET /v1/models: the served names."""

import uuid
from typing import Any

from vllm.entrypoints.openai.context import ServerContext


def list_models(server: ServerContext) -> dict[str, Any]:
    """Return all served names."""
    return {"object": "list", "data": [describe_model(server, name) for name in server.options.served_names]}


def describe_model(server: ServerContext, name: str) -> dict[str, Any]:
    """Return one served name; harnesses read `max_model_len` here.

    Raises:
        ApiError: 404, no such model.
    """
    return {
        "id": server.check_model(name),
        "object": "model",
        "created": server.created,
        "owned_by": "vllm",
        "root": server.engine.model_config.model,
        "parent": None,
        "max_model_len": server.max_model_len,
        "permission": [_make_permission(server.created)],
    }


def _make_permission(created: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{uuid.uuid4().hex}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
