"""Routes about the server itself: is it well, what is it, what does it count; and a developer's switches."""

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

import vllm
from vllm import envs
from vllm.entrypoints.openai.context import ServerContext
from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.middleware import ServerState
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.prometheus import CONTENT_TYPE

SLEEP_LEVELS = (0, 1, 2)


def add_instance_routes(app: FastAPI, server: ServerContext, state: ServerState) -> None:
    """Register the routes that every server has."""
    engine = server.engine

    async def health(request: Request) -> Response:
        """Return 200 while the engine lives."""
        try:
            await engine.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        return Response(status_code=200)

    async def version(request: Request) -> Response:
        """Return the server's version."""
        return as_json({"version": vllm.__version__})

    async def load(request: Request) -> Response:
        """Return how many requests are being answered."""
        return as_json({"server_load": state.num_open_requests})

    async def metrics(request: Request) -> Response:
        """Return the metrics in Prometheus' text form."""
        rendered = b"" if engine.metrics is None else engine.metrics.render()
        return Response(rendered, headers={"content-type": CONTENT_TYPE})

    app.add_api_route("/health", health, methods=["GET"], response_class=Response, tags=["server"])
    app.add_api_route("/ping", health, methods=["GET"], response_class=Response, tags=["server"], operation_id="ping")
    app.add_api_route("/ping", health, methods=["POST"], include_in_schema=False)
    app.add_api_route("/version", version, methods=["GET"], tags=["server"])
    app.add_api_route("/load", load, methods=["GET"], tags=["server"])
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=PlainTextResponse, tags=["server"])
    if envs.server_dev_mode():
        add_developer_routes(app, server)


def add_developer_routes(app: FastAPI, server: ServerContext) -> None:
    """Register the switches of VLLM_SERVER_DEV_MODE: every client of the server can stop it with them."""
    engine = server.engine

    async def server_info(request: Request) -> Response:
        """Return the configuration."""
        return as_json({"vllm_config": str(engine.vllm_config)})

    async def reset_prefix_cache(request: Request) -> Response:
        """Forget all cached prefixes."""
        await engine.reset_prefix_cache()
        return Response(status_code=200)

    async def sleep(request: Request) -> Response:
        """Free the memory: level 1 keeps the weights aside, level 2 forgets them."""
        text = request.query_params.get("level", "1")
        if text not in map(str, SLEEP_LEVELS):
            raise ApiError(400, f"level must be one of {SLEEP_LEVELS}", param="level")
        await engine.sleep(int(text))
        return Response(status_code=200)

    async def wake_up(request: Request) -> Response:
        """Take the memory back: all of it, or what the `tags` name."""
        await engine.wake_up(request.query_params.getlist("tags") or None)
        return Response(status_code=200)

    async def is_sleeping(request: Request) -> Response:
        """Say whether the engine sleeps."""
        return as_json({"is_sleeping": await engine.is_sleeping()})

    app.add_api_route("/server_info", server_info, methods=["GET"], tags=["developer"])
    app.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"], tags=["developer"])
    app.add_api_route("/sleep", sleep, methods=["POST"], tags=["developer"])
    app.add_api_route("/wake_up", wake_up, methods=["POST"], tags=["developer"])
    app.add_api_route("/is_sleeping", is_sleeping, methods=["GET"], tags=["developer"])


def as_json(value: Any) -> Response:
    """Return `value` as a JSON answer."""
    return Response(msgspec.json.encode(value), media_type="application/json")
