"""The server's application in this process, asked without a socket: its answers are those of `vllm serve`."""

import argparse
import asyncio
import time
from typing import Any

import msgspec

from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.http_client import Answer, OnData, make_key_header
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import with_defaults
from vllm.v1.engine.async_llm import AsyncLLM


class LocalServer:
    """An engine and its application; a `Sender`. The engine's core is a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Load the model.

        Raises:
            VLLMError: the arguments or the model are not good.
        """
        args = with_defaults(argparse.Namespace(**{**vars(args), "api_key": []}))
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        self._app = build_app(self._engine, args)
        self._headers = make_key_header(envs.api_key())

    async def send(self, method: str, path: str, body: Any = None, *, on_data: OnData | None = None) -> Answer:
        """Answer as the server would."""
        data = b"" if body is None else msgspec.json.encode(body)
        answer = Answer()
        pieces: list[bytes] = []
        requests = iter([{"type": "http.request", "body": data, "more_body": False}])
        has_left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            for message in requests:
                return message
            await has_left.wait()  # there is no client to disconnect: a caller that stops waiting cancels the answer
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            elif on_data is not None and answer.is_ok:
                on_data(message.get("body", b""), time.perf_counter())
            else:
                pieces.append(message.get("body", b""))

        await self._app(self._make_scope(method, path, data), receive, send)
        answer.body = b"".join(pieces)
        return answer

    async def close(self) -> None:
        """End the engine."""
        self._engine.shutdown()

    def _make_scope(self, method: str, path: str, data: bytes) -> dict[str, Any]:
        headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers | self._headers).items()],
            "client": ("127.0.0.1", 0),
            "server": ("localhost", 80),
        }
