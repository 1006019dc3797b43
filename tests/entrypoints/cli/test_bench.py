"""`vllm bench` with our own server and engine."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from vllm.entrypoints.cli.bench import BENCHMARKS
from vllm.entrypoints.cli.main import main

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_help_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["bench"], ["bench", "--help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in BENCHMARKS)
    assert main(["bench", "thruput"]) == 2
    assert "did you mean 'throughput'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_describes_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"vllm bench {name}" in shown and "--logprobs" in shown


def test_the_load_generator_never_loads_torch() -> None:
    code = "import sys, vllm.benchmarks.serve; print(sorted({'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_our_server_is_measured_with_logprobs(
    backend: str, url: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([
        "bench", "serve", "--backend", backend, "--base-url", url, "--num-prompts", "6", "--input-len", "12",
        "--output-len", "8", "--ignore-eos", "--logprobs", "3", "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(tmp_path), "--result-filename", "r.json",
    ])  # fmt: skip
    shown = capsys.readouterr()
    assert status == 0, shown.err
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["completed"], document["total_output_tokens"]) == (6, 48)
    if backend == "openai":
        assert document["input_lens"] == [12] * 6, "the server counts as many tokens as we made"
    for itls in document["itls"]:
        assert 0 < len(itls) <= 7
    assert "P99 ITL (ms):" in shown.out


def test_the_script_is_the_command(url: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "benchmark_serving.py"), "--base-url", url]
    flags = ["--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--disable-tqdm"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Successful requests: +2$", done.stdout, re.MULTILINE)


def test_the_gaps_of_our_server_s_stream_add_up_to_its_latency(url: str, tmp_path: pathlib.Path) -> None:
    """One request at a time: each token but the first has its gap, the last one too.

    A process that waits for a core while the answer begins merges some: up to five tokens, whatever there are.
    """
    assert main([
        "bench", "serve", "--base-url", url, "--num-prompts", "3", "--input-len", "5", "--output-len", "33",
        "--ignore-eos", "--max-concurrency", "1", "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(tmp_path), "--result-filename", "r.json",
    ]) == 0  # fmt: skip
    document = json.loads((tmp_path / "r.json").read_text())
    for itls, ttft, latency in zip(document["itls"], document["ttfts"], document["latencies"], strict=True):
        assert 24 <= len(itls) <= 32
        assert ttft + sum(itls) == pytest.approx(latency)


def run_offline(name: str, model: pathlib.Path, out: pathlib.Path, *flags: str) -> dict:
    engine = ("--model", str(model), "--kv-cache-memory-bytes", "8M", "--max-model-len", "128")
    assert main(["bench", name, *engine, "--output-json", str(out), *flags]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("mode", [(), ("--async-engine",), ("--backend", "vllm-chat"), ("--disable-detokenize",)])
def test_throughput_counts_every_token(
    mode: tuple[str, ...], model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num-prompts", "4", "--input-len", "10", "--output-len", "5", "--n", "2", "--logprobs", "1")
    figures = run_offline("throughput", model, tmp_path / "t.json", *flags, "--num-warmups", "1", *mode)
    shown = capsys.readouterr().out
    found = re.search(
        r"^Throughput: ([\d.]+) requests/s, ([\d.]+) total tokens/s, ([\d.]+) output tokens/s$", shown, re.M
    )
    assert found and float(found[1]) > 0
    assert (figures["model_id"], figures["num_requests"], figures["total_output_tokens"]) == (str(model), 4, 40)
    if "vllm-chat" not in mode:
        assert figures["total_num_tokens"] == 80
        assert re.search(r"^Total num prompt tokens: +40$", shown, re.M)
    assert re.search(r"^Total num output tokens: +40$", shown, re.M)
    assert figures["requests_per_second"] == pytest.approx(4 / figures["elapsed_time"])
    assert figures["tokens_per_second"] == pytest.approx(figures["total_num_tokens"] / figures["elapsed_time"])


def test_latency_is_an_average_and_percentiles(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--input-len",
        "6",
        "--output-len",
        "3",
        "--batch-size",
        "2",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    )
    figures = run_offline("latency", model, tmp_path / "l.json", *flags, "--disable-tqdm")
    shown = capsys.readouterr().out
    assert len(figures["latencies"]) == 4 and min(figures["latencies"]) > 0
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 4)
    assert list(figures["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert re.search(r"^Avg latency: [\d.e-]+ seconds$", shown, re.M)
    assert len(re.findall(r"^\d+% percentile latency: [\d.e-]+ seconds$", shown, re.M)) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["throughput", "--n", "0", "--model", "x"], "--n"),
        (["throughput", "--backend", "hf"], "--backend"),
        (["latency", "--num-iters", "0", "--model", "x"], "--num-iters"),
        (["latency", "--use-beam-search", "--model", "x"], "--use-beam-search"),
        (["latency", "--model", "x", "--batchsize", "3"], "--batch-size"),
    ],
)
def test_a_bad_flag_is_refused_before_a_model_loads(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err
