"""The client with which we measure and talk."""

import asyncio
import json
import random

import pytest

from tests.benchmarks.paced_server import PacedServer, Refusal
from vllm.entrypoints.http_client import Answer, EventReader, HttpClient, HttpError
from vllm.exceptions import VLLMValidationError


async def answer_raw(data: bytes, *, num_requests: int = 1) -> Answer:
    """Let a server send `data` to each request and close; return the client's last answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(data), 7):  # in small pieces
            writer.write(data[start : start + 7])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        for _ in range(num_requests):
            answer = await client.send("GET", "/x")
        return answer


def test_events_do_not_depend_on_how_the_stream_is_cut() -> None:
    stream = 'data: {"a": "é😀"}\r\n\r\n: a comment\n\nevent: x\ndata:one\ndata: two\n\ndata: [DONE]\n\n'.encode()
    wanted = ['{"a": "é😀"}'.encode(), b"one\ntwo", b"[DONE]"]
    rng = random.Random(0)
    for _ in range(200):
        found: list[bytes] = []
        reader = EventReader(lambda data, _, found=found: found.append(data))
        cuts = sorted(rng.sample(range(1, len(stream)), rng.randrange(12)))
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            reader.feed(stream[start:end], 0.0)
        assert found == wanted


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
    ],
    ids=["a length", "chunks", "until the end"],
)
def test_a_body_is_whole_in_each_of_http_s_three_forms(raw: bytes) -> None:
    answer = asyncio.run(answer_raw(raw, num_requests=2))
    assert (answer.status, answer.body) == (200, b"hello")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", "broke in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "broke in the middle"),
        (b"", "without an answer"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
    ],
)
def test_half_an_answer_is_an_error(raw: bytes, words: str) -> None:
    with pytest.raises(HttpError, match=words):
        asyncio.run(answer_raw(raw))


def test_nobody_listening_is_said_in_a_line() -> None:
    async def ask() -> None:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
        await HttpClient(f"http://127.0.0.1:{port}").send("GET", "/")

    with pytest.raises(HttpError, match=r"can't connect to http://127.0.0.1:\d+: .*refused"):
        asyncio.run(ask())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(VLLMValidationError):
        HttpClient(url)


def test_a_header_can_not_smuggle_another() -> None:
    with pytest.raises(VLLMValidationError, match="line break"):
        HttpClient("http://x", headers={"a": "b\r\nHost: evil"})


def test_a_connection_serves_one_request_after_another() -> None:
    async def ask(url: str) -> None:
        async with HttpClient(url) as client:
            for _ in range(5):
                assert (await client.send("POST", "/v1/completions", {})).is_ok
            await asyncio.gather(*(client.send("POST", "/v1/completions", {}) for _ in range(3)))

    with PacedServer() as server:
        asyncio.run(ask(server.url))
    assert len(server.bodies) == 8 and server.num_connections == 3


def test_a_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    async def ask(url: str) -> None:
        async with HttpClient(url) as client:
            for _ in range(4):
                assert (await client.send("POST", "/v1/completions", {})).is_ok

    with PacedServer(closes_when_idle=True) as server:
        asyncio.run(ask(server.url))
    assert len(server.bodies) == 4


def test_a_refusal_is_read_and_told_whatever_its_form() -> None:
    async def refuse(body: dict):  # type: ignore[no-untyped-def]
        raise Refusal(400, "max_tokens is\ntoo large")
        yield

    async def ask(url: str) -> str:
        pieces: list[bytes] = []
        async with HttpClient(url) as client:
            answer = await client.send("POST", "/v1/x", {}, on_data=lambda piece, _: pieces.append(piece))
        assert not pieces and json.loads(answer.body)["error"]["code"] == 400
        return answer.describe_refusal()

    with PacedServer(refuse) as server:
        assert asyncio.run(ask(server.url)) == "HTTP 400: max_tokens is too large"
    for body in (b"<html>Bad gateway</html>", b"[]", b'"text"', b""):
        raw = b"HTTP/1.1 502 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        answer = asyncio.run(answer_raw(raw))
        assert answer.describe_refusal().startswith("HTTP 502:")


def test_who_stops_waiting_closes_the_connection() -> None:
    async def drip(body: dict):  # type: ignore[no-untyped-def]
        while True:
            yield "x" * 1000
            await asyncio.sleep(0.005)

    async def leave(server: PacedServer) -> None:
        async with HttpClient(server.url) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.send("POST", "/", {}, on_data=lambda *_: None), 0.1)
            for _ in range(200):
                if server.num_open == 0:
                    return
                await asyncio.sleep(0.02)

    with PacedServer(drip) as server:
        asyncio.run(leave(server))
        assert server.num_cut == 1
