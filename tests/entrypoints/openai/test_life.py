"""A server's life: keys, headers, signals, and the death of its engine."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.entrypoints.openai.client import (
    Client,
    assert_same,
    find_children,
    serve,
    start_process,
    stop,
    wait_until_ready,
)


def test_keys_headers_and_a_quiet_end_by_control_c(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        "api-key: [first, second]\nenable-request-id-headers: true\nenable-prompt-tokens-details: true\n"
        "enable-force-include-usage: true\nallowed-origins: ['http://a.example']\nmax-request-body-bytes: 2000\n"
        "sse-keep-alive-interval: 0.001\nmax-log-len: 5\nenable-log-requests: true\n"
    )
    with serve(tiny_model, "--config", str(config), VLLM_API_KEY="third") as client:
        check_keys(client)
        check_headers(client)
        connection = client.connect()
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 200, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, with_key("first"))
        connection.getresponse().read(10)
        started = time.monotonic()
        assert client.process is not None
        status, said = stop(client.process, signal.SIGINT)
        assert status == 0 and time.monotonic() - started < 5.0
        assert "Traceback" not in said and "first" not in said


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def check_keys(client: Client) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
    ):
        refused = client.send("POST", "/v1/completions", {"prompt": "a"}, headers=headers)
        assert refused.status == 401 and refused.json == {"error": "Unauthorized"}
        assert client.get("/v1/models", headers=headers).status == 401
    for key in ("first", "second", "third"):
        assert client.send("POST", "/v1/completions", {"prompt": "a"}, headers=with_key(key)).status == 200
    for path in ("/health", "/metrics", "/version"):
        assert client.get(path).status == 200
    assert client.send("POST", "/tokenize", {"prompt": "a"}).status == 200


def check_headers(client: Client) -> None:
    body = {"prompt": "the way " * 9, "max_tokens": 2, "stream": True}
    streamed = client.send("POST", "/v1/completions", body, headers=with_key("first") | {"X-Request-Id": "mine"})
    assert streamed.headers["x-request-id"] == "mine"
    assert "usage" in streamed.events[-2] and streamed.events[-2]["choices"] == []
    body["stream"] = False
    usage = client.send("POST", "/v1/completions", body, headers=with_key("first")).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
    assert (
        client.send("OPTIONS", "/v1/completions", headers=asked).headers["access-control-allow-origin"]
        == asked["Origin"]
    )
    other = client.send("OPTIONS", "/v1/completions", headers=asked | {"Origin": "http://b.example"})
    assert "access-control-allow-origin" not in other.headers
    large = client.send("POST", "/v1/completions", {"prompt": "a" * 3000}, headers=with_key("first"))
    assert large.status == 413 and large.error["code"] == 413


@pytest.mark.slow
def test_what_runs_may_end_within_its_time(tiny_model: pathlib.Path) -> None:
    """SIGTERM with --shutdown-timeout: an answer that is being made still comes."""
    process = start_process(
        tiny_model, "--port", "0", "--max-model-len", "256", "--shutdown-timeout", "20", "--disable-fastapi-docs"
    )
    url, _ = wait_until_ready(process)
    host, port = url.removeprefix("http://").split(":")
    client = Client(host, int(port))
    assert client.get("/openapi.json").status == 404
    with contextlib.closing(client.connect()) as connection:
        body = json.dumps({"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        first = response.read(50)
        process.send_signal(signal.SIGTERM)
        rest = response.read()
    assert (first + rest).endswith(b"data: [DONE]\n\n")
    assert process.wait(timeout=10) == 0


def open_many(client: Client) -> list[http.client.HTTPConnection]:
    """Open 40 requests that run for long, streamed and whole, of one choice and several."""
    connections = []
    for i in range(40):
        fields = {"prompt": "a", "max_tokens": 250, "n": 1 + i % 4, "ignore_eos": True, "stream": i % 2 == 0}
        connection = client.connect()
        connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        connections.append(connection)
    return connections


def read_error(connection: http.client.HTTPConnection) -> tuple[dict[str, Any], float]:
    """Return the error that ends a request, in its stream or as its answer, and when it had come."""
    answer = connection.getresponse()
    data = answer.read()
    came = time.monotonic()
    if answer.status == 200:
        assert data.endswith(b"data: [DONE]\n\n")
        data = data.split(b"data: ")[-2]
    else:
        assert answer.status == 503 and answer.headers["Retry-After"]
    error: dict[str, Any] = json.loads(data)["error"]
    return error, came


def find_shared_memory(pid: int) -> set[str]:
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "/dev/shm/" in line}


def test_a_killed_engine_ends_all_open_requests_and_the_server_and_leaves_nothing(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """kill -9 of the core under load: errors within a second, 503, an exit status, no process and no file left."""
    process = start_process(tiny_model, "--port", "0", "--max-model-len", "256", TMPDIR=str(tmp_path))
    try:
        url, _ = wait_until_ready(process)
        host, port = url.removeprefix("http://").split(":")
        client = Client(host, int(port))
        (core,) = find_children(process.pid)
        connections = open_many(client)
        end = time.monotonic() + 20
        while client.metric("num_requests_running") < 40 and time.monotonic() < end:
            time.sleep(0.02)
        shared = find_shared_memory(process.pid) | find_shared_memory(core)
        with ThreadPoolExecutor(len(connections)) as pool:
            reading = [pool.submit(read_error, connection) for connection in connections]
            killed = time.monotonic()
            os.kill(core, signal.SIGKILL)
            for future in reading:
                error, came = future.result()
                assert error["code"] == 503 and came - killed < 1.5
        for connection in connections:
            connection.close()
        assert client.get("/health").status == 503
        refused = client.complete()
        assert refused.status == 503 and refused.headers["retry-after"]
        assert process.wait(timeout=15) != 0
        assert not pathlib.Path(f"/proc/{core}").exists()
        assert list(tmp_path.iterdir()) == [] and not any(map(os.path.exists, shared))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_while_the_model_loads_ends_both_processes_quietly(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, number: int
) -> None:
    process = start_process(tiny_model, "--port", "0", TMPDIR=str(tmp_path))
    end = time.monotonic() + 60
    while not (children := find_children(process.pid)):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)  # the core imports what it needs
    started = time.monotonic()
    status, said = stop(process, number)
    assert status in (128 + number, -number) and time.monotonic() - started < 8.0
    assert "Traceback" not in said, said
    while pathlib.Path(f"/proc/{children[0]}").exists():
        assert time.monotonic() - started < 8.0, "the core was left behind"
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/server_info", "/is_sleeping"])
def test_a_developers_switches_are_there_only_when_asked_for(server: Client, path: str) -> None:
    assert server.get(path).status == 200  # the session's server runs with VLLM_SERVER_DEV_MODE=1


def test_the_engine_sleeps_and_wakes(server: Client) -> None:
    before = server.complete(logprobs=1).json["choices"]
    assert server.send("POST", "/sleep?level=7").error["param"] == "level"
    assert server.send("POST", "/sleep?level=1").status == 200
    assert server.get("/is_sleeping").json == {"is_sleeping": True}
    assert server.metric("engine_sleep_state", sleep_state="weights_offloaded") == 1
    assert server.send("POST", "/wake_up").status == 200
    assert server.get("/is_sleeping").json == {"is_sleeping": False}
    assert server.send("POST", "/reset_prefix_cache").status == 200
    assert_same(server.complete(logprobs=1).json["choices"], before)


def test_the_document_describes_the_requests(server: Client) -> None:
    document = server.get("/openapi.json").json
    schemas = document["components"]["schemas"]
    assert {"CompletionRequest", "ChatCompletionRequest", "StreamOptions", "TokenizeRequest"} <= set(schemas)
    assert "best_of" in schemas["CompletionRequest"]["properties"]
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in schemas, name
