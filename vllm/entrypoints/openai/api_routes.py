"""The API's routes, and their description for /openapi.json."""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import ChatAnswer
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import CompletionAnswer
from vllm.entrypoints.openai.context import ServerContext
from vllm.entrypoints.openai.instance_routes import as_json
from vllm.entrypoints.openai.models import describe_model, list_models
from vllm.entrypoints.openai.request_body import read_request
from vllm.entrypoints.openai.scoring.protocol import GenerativeScoringRequest, ScoreContinuationsRequest
from vllm.entrypoints.openai.scoring.serving import create_continuation_scores, create_generative_scores
from vllm.entrypoints.openai.tokenization.protocol import DetokenizeRequest, TokenizeRequest
from vllm.entrypoints.openai.tokenization.serving import describe_tokenizer, detokenize, tokenize

REQUEST_MODELS: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ScoreContinuationsRequest,
    GenerativeScoringRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request breaks a rule; `error.param` names the field"},
    401: {"description": "a key is needed"},
    404: {"description": "no such model"},
    413: {"description": "the body is too large"},
    503: {"description": "the queue is full, or the server ends"},
}


def add_api_routes(app: FastAPI, server: ServerContext, *, has_tokenizer_info: bool = True) -> None:
    """Register the routes of the OpenAI API and of the tokenizer."""

    async def completions(request: Request) -> Response:
        """Continue prompts, score them, or both."""
        return await CompletionAnswer(server, await read_request(request, CompletionRequest)).respond(request)

    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        return await ChatAnswer(server, await read_request(request, ChatCompletionRequest)).respond(request)

    async def score_continuations(request: Request) -> Response:
        """Score given continuations of contexts."""
        body = await read_request(request, ScoreContinuationsRequest)
        return await create_continuation_scores(request, body, server)

    async def generative_scoring(request: Request) -> Response:
        """Compare labels, each a single token, as what follows a query and an item."""
        body = await read_request(request, GenerativeScoringRequest)
        return await create_generative_scores(request, body, server)

    async def models(request: Request) -> Response:
        """List the served models."""
        return as_json(list_models(server))

    async def model(request: Request, model_id: str) -> Response:
        """Describe one served model; its name may hold slashes."""
        return as_json(describe_model(server, model_id))

    async def tokenize_route(request: Request) -> Response:
        """Turn a text or a conversation into token ids."""
        return as_json(await tokenize(await read_request(request, TokenizeRequest), server))

    async def detokenize_route(request: Request) -> Response:
        """Turn token ids into text."""
        return as_json(await detokenize(await read_request(request, DetokenizeRequest), server))

    async def tokenizer_info(request: Request) -> Response:
        """Return the special tokens and the chat template."""
        return as_json(describe_tokenizer(server))

    _post(app, "/v1/completions", completions, CompletionRequest)
    _post(app, "/v1/chat/completions", chat_completions, ChatCompletionRequest)
    _post(app, "/v1/score/continuations", score_continuations, ScoreContinuationsRequest)
    _post(app, "/generative_scoring", generative_scoring, GenerativeScoringRequest)
    app.add_api_route("/v1/models", models, methods=["GET"], tags=["models"])
    app.add_api_route(
        "/v1/models/{model_id:path}", model, methods=["GET"], tags=["models"], responses={404: _ERRORS[404]}
    )
    _post(app, "/tokenize", tokenize_route, TokenizeRequest)
    _post(app, "/detokenize", detokenize_route, DetokenizeRequest)
    if has_tokenizer_info:
        app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"], tags=["tokenizer"])
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]


def _post(app: FastAPI, path: str, route: Any, model: type[BaseModel]) -> None:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    app.add_api_route(path, route, methods=["POST"], responses=_ERRORS, openapi_extra={"requestBody": body})


def _describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document: the routes read their bodies themselves, so their models are added here."""
    if app.openapi_schema is None:
        document = get_openapi(title="vllm", version=vllm.__version__, routes=app.routes)
        _, schemas = models_json_schema(
            [(model, "validation") for model in REQUEST_MODELS], ref_template="#/components/schemas/{model}"
        )
        components = document.setdefault("components", {}).setdefault("schemas", {})
        components.update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
