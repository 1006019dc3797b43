"""`vllm bench serve` as a whole, against a server of another make."""

import asyncio
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.benchmarks.paced_server import Event, PacedServer, Refusal, choice, say_words, usage
from tests.tiny_tokenizers import write_tiny_tokenizer
from vllm.entrypoints.cli.main import main

NO_TOKENIZER = ("--skip-tokenizer-init", "--disable-tqdm", "--input-len", "5", "--output-len", "4")


def bench(server: PacedServer, *flags: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, *flags])


def read_labels(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(\w[^:\n]*): +([\d.]+)$", text, re.MULTILINE)}


def test_the_report_has_its_labels_and_the_file_its_keys(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--num-prompts", "6", "--max-concurrency", "2", "--request-rate", "200",
        "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,99", "--goodput", "ttft:60000", "e2el:60000", "--save-result", "--save-detailed",
        "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json", "--metadata", "who=me", "--ignore-eos",
        "--logprobs", "2", "--top-k", "3", "--extra-body", '{"min_tokens": 4}', "--request-id-prefix", "run-",
    )  # fmt: skip
    with PacedServer() as server:
        assert bench(server, *NO_TOKENIZER, *flags) == 0
    labels = read_labels(capsys.readouterr().out)
    exact = {
        "Successful requests": 6, "Failed requests": 0, "Maximum request concurrency": 2,
        "Request rate configured (RPS)": 200, "Total input tokens": 42, "Total generated tokens": 24,
    }  # fmt: skip
    assert {name: labels[name] for name in exact} == exact
    measured = {
        "Benchmark duration (s)", "Request throughput (req/s)", "Request goodput (req/s)",
        "Output token throughput (tok/s)", "Peak output token throughput (tok/s)", "Peak concurrent requests",
        "Total token throughput (tok/s)",
    }  # fmt: skip
    blocks = {
        f"{stat} {name} (ms)" for stat in ("Mean", "Median", "P50", "P99") for name in ("TTFT", "TPOT", "ITL", "E2EL")
    }
    assert set(labels) == set(exact) | measured | blocks
    document = json.loads((tmp_path / "new" / "r.json").read_text())
    settings = {
        "backend": "openai", "model_id": "paced", "tokenizer_id": None, "num_prompts": 6, "who": "me",
        "request_rate": 200.0, "burstiness": 1.0, "max_concurrency": 2, "completed": 6, "failed": 0,
        "total_input_tokens": 42, "total_output_tokens": 24, "rtfx": 0.0,
    }  # fmt: skip
    assert {name: document[name] for name in settings} == settings
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{stat}_{name}_ms" for stat in ("mean", "median", "std", "p50", "p99")} <= set(document)
    assert document["output_lens"] == [4] * 6 and document["generated_texts"] == [" hi hi hi hi"] * 6
    assert [len(itls) for itls in document["itls"]] == [3] * 6 and document["errors"] == [""] * 6
    assert document["start_times"] == sorted(document["start_times"]) and document["latencies"][0] > 0
    for body in server.bodies:
        sent = {"model": "paced", "max_tokens": 4, "ignore_eos": True, "logprobs": 2, "top_k": 3, "min_tokens": 4}
        assert {name: body[name] for name in sent} == sent and len(body["prompt"]) == 5
    assert server.max_open <= 2 and any("x-request-id: run-0" in head for head in server.heads)


def test_what_is_not_given_is_left_to_the_server() -> None:
    with PacedServer() as server:
        assert bench(server, *NO_TOKENIZER, "--num-prompts", "1", "--backend", "vllm") == 0
    assert set(server.bodies[0]) == {"model", "prompt", "max_tokens", "stream", "stream_options"}


def test_results_are_added_to_a_file_a_line_each(tmp_path: pathlib.Path) -> None:
    flags = (*NO_TOKENIZER, "--num-prompts", "1", "--save-result", "--result-dir", str(tmp_path))
    with PacedServer() as server:
        for append in (True, True, False):
            mode = ("--append-result",) if append else ()
            assert bench(server, *flags, "--result-filename", "all.jsonl", *mode) == 0
            if append:
                lines = (tmp_path / "all.jsonl").read_text().splitlines()
        assert [json.loads(line)["request_rate"] for line in lines] == ["inf", "inf"]
        assert "itls" not in json.loads(lines[0])
        assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 1
        assert bench(server, *flags, "--label", "mine", "--max-concurrency", "1") == 0
    assert [path.name for path in tmp_path.glob("mine-infqps-concurrency1-paced-*.json")]


def test_failures_are_counted_and_said_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    count = iter(range(100))

    async def fail_often(body: dict[str, Any]) -> AsyncIterator[Event]:
        place = next(count)
        if place % 3:
            raise Refusal(503, "the queue is full")
        yield choice("a", finish="stop")

    with PacedServer(fail_often) as server:
        assert bench(server, *NO_TOKENIZER, "--num-prompts", "6", "--max-concurrency", "1") == 0
    shown = capsys.readouterr()
    labels = read_labels(shown.out)
    assert (labels["Successful requests"], labels["Failed requests"]) == (2, 4)
    assert "4 failed: HTTP 503: the queue is full" in shown.err

    async def fail(body: dict[str, Any]) -> AsyncIterator[Event]:
        raise Refusal(400, "no")
        yield

    with PacedServer(fail) as server:
        assert bench(server, *NO_TOKENIZER, "--num-prompts", "2") == 1, "nothing was measured"


def test_a_slow_server_s_gaps_are_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    async def slowly(body: dict[str, Any]) -> AsyncIterator[Event]:
        await asyncio.sleep(0.15)
        for place in range(6):
            yield choice("x", finish="length" if place == 5 else None)
            await asyncio.sleep(0.04)
        yield usage(5, 6)

    with PacedServer(slowly) as server:
        assert bench(server, *NO_TOKENIZER, "--num-prompts", "8", "--percentile-metrics", "ttft,tpot,itl,e2el") == 0
    labels = read_labels(capsys.readouterr().out)
    assert labels["Median ITL (ms)"] == pytest.approx(40, abs=12)
    assert labels["Median TPOT (ms)"] == pytest.approx(40, abs=12)
    assert labels["Median TTFT (ms)"] == pytest.approx(150, abs=50)
    assert labels["Median E2EL (ms)"] == pytest.approx(350, abs=100)
    assert labels["Peak concurrent requests"] == 8 == server.max_open


def test_requests_come_at_the_rate(tmp_path: pathlib.Path) -> None:
    flags = (*NO_TOKENIZER, "--num-prompts", "10", "--request-rate", "20", "--save-result", "--save-detailed")
    with PacedServer() as server:
        assert bench(server, *flags, "--result-dir", str(tmp_path), "--result-filename", "r") == 0
    document = json.loads((tmp_path / "r").read_text())
    assert document["start_times"][-1] == pytest.approx(0.5, abs=0.1), "10 requests at 20 a second"
    assert document["max_concurrent_requests"] < 10


def test_warm_ups_are_sent_before_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with PacedServer() as server:
        assert bench(server, *NO_TOKENIZER, "--num-prompts", "2", "--num-warmups", "3") == 0
    assert len(server.bodies) == 5 and read_labels(capsys.readouterr().out)["Successful requests"] == 2


def test_a_server_that_starts_late_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    ready_at = time.monotonic() + 0.7

    async def late(body: dict[str, Any]) -> AsyncIterator[Event]:
        if time.monotonic() < ready_at:
            raise Refusal(503, "loading")
        async for event in say_words(body):
            yield event

    with PacedServer(late) as server:
        flags = (*NO_TOKENIZER, "--num-prompts", "2", "--ready-check-timeout-sec")
        assert bench(server, *flags, "20") == 0
        assert read_labels(capsys.readouterr().out)["Failed requests"] == 0
        ready_at = float("inf")
        assert bench(server, *flags, "0.1") == 1
    assert "no good answer" in capsys.readouterr().err


def test_the_model_s_tokenizer_is_found_where_the_server_says(tmp_path: pathlib.Path) -> None:
    write_tiny_tokenizer(tmp_path)
    with PacedServer(models=[{"id": "nice", "root": str(tmp_path)}]) as server:
        assert (
            bench(server, "--disable-tqdm", "--num-prompts", "2", "--input-len", "9", "--backend", "openai-chat") == 0
        )
    assert server.heads[-1].startswith("POST /v1/chat/completions ")
    for body in server.bodies:
        assert body["model"] == "nice" and body["messages"][0]["content"].strip()


def test_adapters_and_headers_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with PacedServer() as server:
        flags = ("--num-prompts", "12", "--lora-modules", "one", "two", "--header", "X-Team=a=b")
        assert bench(server, *NO_TOKENIZER, *flags) == 0
    assert {body["model"] for body in server.bodies} == {"one", "two"}
    assert all("Authorization: Bearer secret" in head and "X-Team: a=b" in head for head in server.heads)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--port", "1"], 1, "can't connect to http://127.0.0.1:1"),
        (["--request-rate", "0"], 2, "--request-rate"),
        (["--max-concurrency", "0"], 2, "--max-concurrency"),
        (["--append-result"], 2, "--save-result"),
        (["--metadata", "x"], 2, "KEY=VALUE"),
        (["--extra-body", "[]"], 2, "--extra-body"),
        (["--backend", "openai-chat", "--endpoint", "/v1/completions"], 2, "--endpoint"),
        (["--result-dir", "/proc/nowhere", "--save-result"], 2, "--result-dir"),
        (["--goodput", "speed:3"], 2, "--goodput"),
        (["--base-url", "nowhere"], 2, "is not a URL"),
        (["--max-concurency", "3"], 2, "did you mean '--max-concurrency'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], status: int, words: str
) -> None:
    assert main(["bench", "serve", *flags]) == status
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err and shown.out == ""


def test_ctrl_c_ends_all_requests_quietly() -> None:
    async def for_ever(body: dict[str, Any]) -> AsyncIterator[Event]:
        while True:
            yield choice("x" * 500)
            await asyncio.sleep(0.01)

    with PacedServer(for_ever) as server:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", server.url]
        process = subprocess.Popen(
            [*command, *NO_TOKENIZER, "--num-prompts", "5"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        wait_until(lambda: server.num_open == 5)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=10)
        wait_until(lambda: server.num_open == 0)
    assert process.returncode == 130 and said.splitlines() == ["vllm: interrupted"]


def wait_until(is_so: Any, timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
