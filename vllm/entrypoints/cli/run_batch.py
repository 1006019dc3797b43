"""Answer a file of requests in OpenAI's batch format, a JSON object a line."""

import argparse
import asyncio
import pathlib
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal, TextIO

import msgspec
import uvloop

from vllm.engine.cli_args import check_at_least
from vllm.entrypoints.cli.local_args import add_local_flags
from vllm.entrypoints.cli.local_server import LocalServer
from vllm.entrypoints.http_client import Sender
from vllm.exceptions import VLLMValidationError

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
DEFAULT_CONCURRENCY = 256  # requests the engine holds at once; more would only wait, and hold memory

_encode = msgspec.json.Encoder().encode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    parser.add_argument("-i", "--input-file", required=True, metavar="IN", help="requests; - is the standard input")
    parser.add_argument("-o", "--output-file", required=True, metavar="OUT", help="answers; - is the standard output")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        metavar="INT",
        help=f"requests that are answered at once (default: {DEFAULT_CONCURRENCY})",
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_local_flags(parser)
    parser.usage = "%(prog)s -i IN -o OUT --model MODEL [flags]; --help lists them"


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status: 0 also where single requests were refused (see the file)."""
    check_at_least(args, max_concurrency=1)
    lines = read_lines(args.input_file)
    _open_output(args.output_file, "a").close()  # refused before the model loads, and not truncated
    server = LocalServer(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            with _open_output(args.output_file, "w") as out:
                failed = runner.run(
                    _write_answers(server, lines, out, args.max_concurrency, hides_bar=args.disable_tqdm)
                )
        finally:
            runner.run(server.close())
    print(f"vllm run-batch: {len(lines)} requests, {failed} failed", file=sys.stderr)
    return 0


def read_lines(name: str) -> list[bytes]:
    """Return the lines that hold something.

    Raises:
        VLLMValidationError: the file can't be read, or is empty.
    """
    try:
        data = sys.stdin.buffer.read() if name == "-" else pathlib.Path(name).read_bytes()
    except OSError as error:
        raise VLLMValidationError(f"--input-file: {name} can't be read: {error.strerror or error}") from None
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines:
        raise VLLMValidationError(f"--input-file: {name} holds no request")
    return lines


def _open_output(name: str, mode: Literal["a", "w"]) -> TextIO:
    if name == "-":
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return pathlib.Path(name).open(mode, encoding="utf-8")
    except OSError as error:
        raise VLLMValidationError(f"--output-file: {name} can't be written: {error.strerror or error}") from None


async def _write_answers(
    server: Sender, lines: Sequence[bytes], out: TextIO, max_concurrency: int, *, hides_bar: bool
) -> int:
    """Write each answer when it and all before it are there; return how many requests failed."""
    from tqdm import tqdm

    failed = 0
    with tqdm(total=len(lines), unit="req", disable=hides_bar, file=sys.stderr) as bar:
        async for answer in answer_all(server, lines, max_concurrency):
            failed += answer["error"] is not None or answer["response"]["status_code"] != 200
            out.write(_encode(answer).decode() + "\n")
            out.flush()
            bar.update(1)
    return failed


async def answer_all(
    server: Sender, lines: Sequence[bytes], max_concurrency: int = DEFAULT_CONCURRENCY
) -> AsyncIterator[dict[str, Any]]:
    """Yield the answers in the order of the lines."""
    seen: set[str] = set()
    waiting: list[asyncio.Task[dict[str, Any]]] = []
    rest: Iterator[bytes] = iter(lines)
    try:
        while True:
            while len(waiting) < max_concurrency and (line := next(rest, None)) is not None:
                waiting.append(asyncio.create_task(answer_line(server, line, seen)))
            if not waiting:
                return
            yield await waiting[0]
            waiting.pop(0)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def answer_line(server: Sender, line: bytes, seen: set[str]) -> dict[str, Any]:
    """Return one line's answer. A refusal by the API is a response; a line that is no request has an `error`."""
    custom_id: str | None = None
    try:
        request = msgspec.json.decode(line)
        if isinstance(request, dict) and isinstance(request.get("custom_id"), str):
            custom_id = request["custom_id"]
        url, body = check_request(request)
        if custom_id in seen:
            raise VLLMValidationError(f"custom_id {custom_id!r} was used before", parameter="custom_id")
        seen.add(str(custom_id))
    except (msgspec.DecodeError, VLLMValidationError) as error:
        return _make_answer(custom_id, error={"code": "invalid_request", "message": str(error)})
    answer = await server.send("POST", url, body)
    try:
        answered = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        answered = answer.body.decode(errors="replace")
    request_id = answered.get("id") if isinstance(answered, dict) else None
    response = {"status_code": answer.status, "request_id": request_id or uuid.uuid4().hex, "body": answered}
    return _make_answer(custom_id, response=response)


def check_request(request: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a line's request.

    Raises:
        VLLMValidationError: the line is not one.
    """
    if not isinstance(request, dict):
        raise VLLMValidationError("a line must be a JSON object with custom_id, method, url and body")
    if not isinstance(request.get("custom_id"), str):
        raise VLLMValidationError("custom_id must be a string", parameter="custom_id")
    if request.get("method", "POST") != "POST":
        raise VLLMValidationError("method must be POST", parameter="method")
    url, body = request.get("url"), request.get("body")
    if url not in ENDPOINTS:
        raise VLLMValidationError(f"url must be one of {', '.join(ENDPOINTS)}", parameter="url", value=url)
    if not isinstance(body, dict):
        raise VLLMValidationError("body must be a JSON object", parameter="body")
    if body.get("stream"):
        raise VLLMValidationError("a batch has no streams; leave `stream` out", parameter="stream")
    return url, body


def _make_answer(
    custom_id: str | None, *, response: dict[str, Any] | None = None, error: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
