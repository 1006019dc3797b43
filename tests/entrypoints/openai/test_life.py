"""A server's life: keys, headers, signals, and the death of its engine."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

from tests.entrypoints.openai.client import Client, assert_same, serve, start_process, stop, wait_until_ready


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


def find_children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.slow
def test_the_death_of_the_engine_ends_open_requests_and_the_server(tiny_model: pathlib.Path) -> None:
    process = start_process(tiny_model, "--port", "0", "--max-model-len", "256")
    try:
        url, _ = wait_until_ready(process)
        host, port = url.removeprefix("http://").split(":")
        client = Client(host, int(port))
        with contextlib.closing(client.connect()) as stream, contextlib.closing(client.connect()) as whole:
            fields = {"prompt": "a", "max_tokens": 250, "n": 8, "ignore_eos": True}
            for connection, streams in ((stream, True), (whole, False)):
                body = json.dumps(fields | {"stream": streams})
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = stream.getresponse()
            response.read(10)
            (core,) = find_children(process.pid)
            killed = time.monotonic()
            os.kill(core, signal.SIGKILL)
            data = response.read()
            answer = whole.getresponse()
            assert time.monotonic() - killed < 1.5
            error = json.loads(data.split(b"data: ")[-2])["error"]
            assert data.endswith(b"data: [DONE]\n\n") and error["code"] == 503
            assert answer.status == 503 and answer.headers["Retry-After"]
        assert client.get("/health").status == 503
        refused = client.complete()
        assert refused.status == 503 and refused.headers["retry-after"]
        assert process.wait(timeout=15) != 0
    finally:
        process.kill()
        process.communicate()


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
