"""A small HTTP client, and a server to talk to: a process of its own, as users start it."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STARTUP_S = 120.0


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Compare JSON values; numbers may differ by rounding, since two runs share their steps with other requests."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert list(one) == list(other), where
        for name, value in one.items():
            assert_same(value, other[name], f"{where}.{name}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), where
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}[{i}]")
    elif isinstance(one, float) and isinstance(other, float):
        assert abs(one - other) < 1e-4, where
    else:
        assert one == other, where


@dataclass
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the last one is the string [DONE]."""
        data = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


@dataclass
class Client:
    host: str
    port: int
    process: "subprocess.Popen[str] | None" = None

    def connect(self, timeout: float = 60.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, raw: bytes | None = None
    ) -> Answer:
        with contextlib.closing(self.connect()) as connection:
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            sent = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, sent | (headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read().decode())

    def get(self, path: str, **options: Any) -> Answer:
        return self.send("GET", path, **options)

    def complete(self, **body: Any) -> Answer:
        return self.send("POST", "/v1/completions", {"prompt": "the way", "max_tokens": 4, "seed": 7} | body)

    def chat(self, **body: Any) -> Answer:
        messages = [{"role": "user", "content": "the way"}]
        return self.send("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 4, "seed": 7} | body)

    def metric(self, name: str, **labels: str) -> float:
        """Return one metric's value (the sum over what the labels leave open)."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            found = re.fullmatch(rf"vllm:{name}\{{(.*)\}} (\S+)", line)
            if found and all(f'{label}="{value}"' in found[1] for label, value in labels.items()):
                total += float(found[2])
        return total

    def wait_until_idle(self, timeout: float = 20.0) -> None:
        """Wait until nothing runs or waits."""
        end = time.monotonic() + timeout
        while self.metric("num_requests_running") + self.metric("num_requests_waiting") > 0:
            assert time.monotonic() < end, "requests are still there"
            time.sleep(0.05)

    def wait_until_closed(self, timeout: float = 20.0) -> None:
        """Wait until nothing runs or waits, and no answer is open: the engine knows first, by a few milliseconds."""
        self.wait_until_idle(timeout)
        end = time.monotonic() + timeout
        while self.get("/load").json["server_load"] > 0:
            assert time.monotonic() < end, "answers are still open"
            time.sleep(0.01)


def start_process(model: pathlib.Path, *flags: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
    )


def find_children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def wait_until_ready(process: "subprocess.Popen[str]") -> tuple[str, list[str]]:
    """Return the URL of the ready line, and all lines before it."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if found := re.search(r" on (https?://\S+)/v1$", line.rstrip()):
            return found[1], lines
    raise AssertionError("the server did not start:\n" + "\n".join(lines))


@contextlib.contextmanager
def serve(model: pathlib.Path, *flags: str, **environment: str) -> Iterator[Client]:
    """Start a server on a free port; at the end it must stop quietly within its time."""
    process = start_process(model, "--port", "0", "--max-model-len", "256", *flags, **environment)
    try:
        url, _ = wait_until_ready(process)
        host, port = url.removeprefix("http://").split(":")
        yield Client(host, int(port), process)
    finally:
        stop(process)


def stop(process: "subprocess.Popen[str]", number: int = signal.SIGTERM, timeout: float = 15.0) -> tuple[int, str]:
    """Send a signal and return the exit status and what was still said."""
    process.send_signal(number)
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, said
