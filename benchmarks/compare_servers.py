"""How do this server and another one do under the same load, in the same minutes, with and without logprobs?

    python -m benchmarks.compare_servers MODEL [--peer PYTHON] [--peer-flags=--enforce-eager] [--rounds 5]
        [--loads burst,steady] [--logprobs none,5] [--num-prompts 64] [--input-len 128] [--output-len 64] [--json FILE]

Both servers are started once, by `PYTHON -m vllm.entrypoints.openai.api_server`; while one is measured the other is
stopped (SIGSTOP). A round measures each server under each load with each logprobs, in turn; the load is sent by
`vllm bench serve`. `burst` sends all requests at once, `steady` one a second. Ratios are medians over rounds.
"""

import argparse
import asyncio
import contextlib
import io
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import uvloop

from benchmarks.peers.engine_process import make_environment
from benchmarks.report import add_output_argument, quartiles, show
from vllm.benchmarks import serve

STARTUP_S = 600.0
LOADS = {"burst": "inf", "steady": "1"}
FIGURES = ["output_throughput", *(f"{s}_{m}_ms" for m in ("ttft", "tpot", "itl") for s in ("mean", "median", "p99"))]
Key = tuple[str, str, str]  # server, load, logprobs


class Server:
    """A server process and its children, which sleep unless they are woken."""

    def __init__(self, name: str, python: str, model: str, flags: list[str], log: pathlib.Path) -> None:
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64", *flags]
        began = time.monotonic()
        with log.open("wb") as output:
            # Away from here: -m looks for vllm in the current directory first.
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=log.parent,
                env=make_environment(is_original_vllm=name == "peer"),
            )
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() - began > STARTUP_S:
                self.close()
                raise SystemExit(f"{name} did not start:\n" + log.read_text(errors="replace")[-2000:])
            time.sleep(0.2)
        self.ready_s = time.monotonic() - began
        os.killpg(self._process.pid, signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def main() -> None:
    args = parse_args()
    loads, logprobs = args.loads.split(","), args.logprobs.split(",")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        specs = [
            ("ours", sys.executable, args.ours_flags),
            *([("peer", args.peer, args.peer_flags)] if args.peer else []),
        ]
        servers = []
        for name, python, flags in specs:
            server = Server(name, python, args.model, shlex.split(flags), folder / name)
            stack.callback(server.close)
            servers.append(server)
            print(f"{name} is ready after {server.ready_s:.1f} s", flush=True)
        figures: dict[Key, list[dict[str, float]]] = {}
        seed = 1000
        for round_index in range(-1, args.rounds):  # the first one warms up and is forgotten
            for load in loads if round_index >= 0 else loads[:1]:
                for k in logprobs:
                    seed += 1  # new prompts for each slice, the same for both: no slice finds another's in a cache
                    for server in servers:
                        with server.awake():
                            measured = measure(server, args, load, k, seed)
                        if round_index >= 0:
                            figures.setdefault((server.name, load, k), []).append(measured)
                            print(f"round {round_index} {server.name} {load} logprobs={k}: {measured}", flush=True)
    for load in loads:
        title = (
            f"{load}: {args.num_prompts} requests × ({args.input_len} in / {args.output_len} out), {args.rounds} rounds"
        )
        columns, rows = make_table(figures, load, [server.name for server in servers], logprobs)
        path = None if args.json is None else args.json.with_stem(f"{args.json.stem}_{load}")
        show(title, columns, rows, path, list_raw(figures, load))


def measure(server: Server, args: argparse.Namespace, load: str, logprobs: str, seed: int) -> dict[str, float]:
    """Send one load and return its figures; no request may fail."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = ["--backend", "vllm", "--host", "127.0.0.1", "--port", str(server.port), "--dataset-name", "random"]
    flags += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
    flags += ["--num-prompts", str(args.num_prompts), "--request-rate", LOADS[load], "--seed", str(seed)]
    flags += ["--ignore-eos", "--disable-tqdm", "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl"]
    flags += [] if logprobs == "none" else ["--logprobs", logprobs]
    with contextlib.redirect_stdout(io.StringIO()), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = runner.run(serve.run_benchmark(parser.parse_args(flags)))
    if document["completed"] != args.num_prompts:
        raise SystemExit(f"{server.name}: {document['completed']} of {args.num_prompts} requests succeeded")
    return {name: round(float(document[name]), 3) for name in FIGURES}


def make_table(
    figures: dict[Key, list[dict[str, float]]], load: str, names: list[str], logprobs: list[str]
) -> tuple[list[str], list[list[object]]]:
    """Return columns and a row a figure: medians, then the ratios with logprobs / without and ours / peer."""
    first = logprobs[0]
    pairs: list[tuple[str, Key, Key]] = []
    for k in logprobs[1:]:
        pairs += [(f"{name} {k}/{first}", (name, load, k), (name, load, first)) for name in names]
    if len(names) > 1:
        pairs += [(f"ours/peer {k}", ("ours", load, k), ("peer", load, k)) for k in logprobs]
    medians = [(f"{name} {k}", figures[name, load, k]) for name in names for k in logprobs]
    rows: list[list[object]] = []
    for figure in FIGURES:
        values: list[object] = [quartiles([run[figure] for run in runs])[1] for _, runs in medians]
        ratios = [_pair(figures[one], figures[other], figure) for _, one, other in pairs]
        rows.append([figure, *values, *ratios])
    return ["", *(title for title, _ in medians), *(title for title, _, _ in pairs)], rows


def _pair(one: list[dict[str, float]], other: list[dict[str, float]], figure: str) -> str:
    ratios = [a[figure] / b[figure] for a, b in zip(one, other, strict=True) if b[figure]]
    low, middle, high = quartiles(ratios or [0.0])
    return f"{middle:.2f} [{low:.2f}–{high:.2f}]"


def list_raw(figures: dict[Key, list[dict[str, float]]], load: str) -> list[dict[str, Any]]:
    return [{"server": key[0], "logprobs": key[2], "runs": runs} for key, runs in figures.items() if key[1] == load]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=os.path.abspath, help="folder of a model that both servers load")
    parser.add_argument("--peer", help="the Python of an environment with another vllm")
    parser.add_argument("--ours-flags", default="", help="further flags of our server")
    parser.add_argument("--peer-flags", default="--enforce-eager", help="further flags of the peer's server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", default="burst,steady", help="of burst and steady")
    parser.add_argument("--logprobs", default="none,5", help="the first one is what the others are compared with")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    add_output_argument(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
