"""The HTTP server: the application, and its life from the first socket to the last answer.

`python -m vllm.entrypoints.openai.api_server --model M` is `vllm serve M`.
"""

# ruff: noqa: E402

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # before the other imports: they take a second, in which `main` hears Ctrl-C
    sys.exit(main(["serve", *sys.argv[1:]]))

import argparse
import asyncio
import contextlib
import errno
import json
import logging
import pathlib
import shlex
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.api_routes import add_api_routes
from vllm.entrypoints.openai.cli_args import read_chat_template, with_defaults
from vllm.entrypoints.openai.context import ServerContext, make_options
from vllm.entrypoints.openai.errors import add_error_handlers
from vllm.entrypoints.openai.instance_routes import add_instance_routes
from vllm.entrypoints.openai.middleware import ApiKeys, BodyLimit, Gate, RequestIdHeaders, ServerState
from vllm.entrypoints.openai.playground_routes import add_playground_routes
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.2
_DEATH_GRACE_S = 3.0  # how long a server whose engine died still answers 503, so that a load balancer notices
_ERRORS_S = 2.0  # after the time for running requests: for the errors of those that did not end in it
ENGINE_DIED = 1


def build_app(engine: AsyncLLM, args: argparse.Namespace, state: ServerState | None = None) -> FastAPI:
    """Return the application that serves `engine` as the checked arguments say (see `with_defaults`)."""
    state = ServerState() if state is None else state
    options = make_options(args, get_served_names(args), read_chat_template(args.chat_template))
    server = ServerContext(engine, options)
    has_docs = not args.disable_fastapi_docs
    app = FastAPI(
        title="vllm",
        root_path=args.root_path,
        openapi_url="/openapi.json" if has_docs else None,
        docs_url="/docs" if has_docs else None,
        redoc_url=None,
        lifespan=_make_lifespan(engine),
    )
    add_api_routes(app, server, has_tokenizer_info=args.enable_tokenizer_info_endpoint)
    add_instance_routes(app, server, state)
    if args.playground:
        add_playground_routes(app)
    add_error_handlers(app)
    # The last one added sees a request first.
    app.add_middleware(Gate, state=state)
    app.add_middleware(BodyLimit, max_bytes=args.max_request_body_bytes)
    keys = [key for key in (*args.api_key, envs.api_key()) if key]
    if keys:
        app.add_middleware(ApiKeys, keys=keys)
    if args.enable_request_id_headers:
        app.add_middleware(RequestIdHeaders)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=_read_words(args.allowed_origins),
        allow_methods=_read_words(args.allowed_methods),
        allow_headers=_read_words(args.allowed_headers),
        allow_credentials=args.allow_credentials,
    )
    return app


def run_server(args: argparse.Namespace) -> int:
    """Serve until a signal or the engine's death; return the exit status.

    Raises:
        VLLMError: the arguments, the address or the model are not good; the message is one line.
    """
    args = with_defaults(args)
    read_chat_template(args.chat_template)
    listener = bind_unix_listener(args.uds) if args.uds else bind_listener(args.host, args.port)
    try:
        with _ending_at_sigterm():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))  # outside of a loop: Ctrl-C works
        try:
            return uvloop.run(_serve(engine, args, listener))
        finally:
            engine.shutdown()
    finally:
        listener.close()
        if args.uds:
            pathlib.Path(args.uds).unlink(missing_ok=True)


@contextlib.contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process and its core while a model loads: the loop that will handle it does not run yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def bind_listener(host: str, port: int) -> socket.socket:
    """Return a socket on the address, taken before the model loads: a busy port is known at once.

    Raises:
        VLLMValidationError: the address can't be taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise VLLMValidationError(f"--host {host} is no address of this machine: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise VLLMValidationError(
            f"can't listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from None
    return listener


def bind_unix_listener(path: str) -> socket.socket:
    """Return a socket at `path`; one that a server before left behind is taken over.

    Raises:
        VLLMValidationError: the path can't be taken, or another process listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if pathlib.Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(path) == 0:
                    raise OSError(errno.EADDRINUSE, "another server listens there")
            pathlib.Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise VLLMValidationError(f"can't listen on --uds {path}: {error.strerror or error}") from None
    return listener


async def _serve(engine: AsyncLLM, args: argparse.Namespace, listener: socket.socket) -> int:
    state = ServerState()
    app = build_app(engine, args, state)
    server = Server(_make_config(app, args), engine, state, lambda: show_ready(args, listener))
    watcher = asyncio.create_task(_watch_engine(engine, server, state))
    try:
        await server.serve(sockets=[listener])
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    return ENGINE_DIED if engine.errored else 0


class Server(uvicorn.Server):
    """uvicorn's server, which ends what runs by itself, and with the exit status of its owner instead of a signal."""

    def __init__(self, config: uvicorn.Config, engine: AsyncLLM, state: ServerState, on_ready: Any) -> None:
        super().__init__(config)
        self._engine = engine
        self._state = state
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.end, "the server is shutting down")
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def end(self, reason: str) -> None:
        """Take no new work and end when what runs is done or the time is up; at once when asked twice.

        Shutting the engine down answers what still runs with an error, so that nothing is left to cancel.
        """
        self._state.stop_reason = reason
        seconds = 0.0 if self.should_exit else (self.config.timeout_graceful_shutdown or 0) - _ERRORS_S
        asyncio.get_running_loop().call_later(seconds, self._engine.shutdown)
        self.should_exit = True


async def _watch_engine(engine: AsyncLLM, server: Server, state: ServerState) -> None:
    """End the server some time after its engine has died."""
    while not engine.errored:
        await asyncio.sleep(_WATCH_INTERVAL_S)
    state.stop_reason = "the engine has died; the server ends"
    logger.error("%s", state.stop_reason)
    if not envs.keep_alive_on_engine_death():
        await asyncio.sleep(_DEATH_GRACE_S)
        server.end(state.stop_reason)


def _make_lifespan(engine: AsyncLLM) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logging_task = asyncio.create_task(_log_statistics(engine))
        try:
            yield
        finally:
            logging_task.cancel()
            await asyncio.gather(logging_task, return_exceptions=True)

    return lifespan


async def _log_statistics(engine: AsyncLLM) -> None:
    interval = envs.log_stats_interval()
    while interval > 0 and engine.metrics is not None:
        await asyncio.sleep(interval)
        if (line := engine.metrics.format_log_line()) is not None:
            logger.info("%s", line)


def _make_config(app: FastAPI, args: argparse.Namespace) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.http_timeout_keep_alive(),
        timeout_graceful_shutdown=args.shutdown_timeout + _ERRORS_S,  # type: ignore[arg-type]
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if args.ssl_ca_certs else ssl.CERT_NONE,
        ws="none",
        server_header=False,
        lifespan="on",
    )


def show_ready(args: argparse.Namespace, listener: socket.socket) -> None:
    """Print where the server is, and a command that asks it something."""
    scheme = "https" if args.ssl_certfile else "http"
    options: list[str] = []
    if args.uds:
        url = f"{scheme}://localhost"
        options += ["--unix-socket", args.uds]
    else:
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        url = f"{scheme}://{host}:{port}"
    if scheme == "https":
        options.append("-k")
    name = get_served_names(args)[0]
    prompt = [1, 2, 3] if getattr(args, "skip_tokenizer_init", False) else "The capital of France is"
    body = json.dumps({"model": name, "prompt": prompt, "max_tokens": 5, "logprobs": 2})
    command = ["curl", "-s", *options, f"{url}/v1/completions", "-H", "Content-Type: application/json"]
    shown = shlex.join(command)
    if args.api_key or envs.api_key():
        shown += ' -H "Authorization: Bearer $VLLM_API_KEY"'
    page = f"page: {url}/\n" if args.playground and not args.uds else ""
    print(f"vllm serves {name} on {url}/v1\n{page}try: {shown} -d {shlex.quote(body)}", flush=True)


def get_served_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names that clients may use, the first one standing in answers and metrics."""
    names = getattr(args, "served_model_name", None)
    return tuple(names) if names else (args.model,)


def _read_words(words: Sequence[str]) -> list[str]:
    """Return the words of a flag that also takes one JSON list."""
    if len(words) == 1 and words[0].lstrip().startswith("["):
        try:
            return list(map(str, json.loads(words[0])))
        except json.JSONDecodeError as error:
            raise VLLMValidationError(f"{words[0]!r} is not a JSON list: {error}") from None
    return list(words)
