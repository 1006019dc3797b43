"""What do logprobs cost: in throughput, in parts of a step, and in Python for each token?

Three tables. The first pairs slices of about a second with and without logprobs, one right after the other on one
engine, so that a machine that wanders slows both alike: the ratio of their times, with quartiles, and CPU seconds a
token. The second says what the parts of the logprobs path take of a step. The third runs without a model
(benchmarks/simulated_engine.py): microseconds and objects for each token of each request.

    python -m benchmarks.bench_logprobs MODEL --json logprobs.json
"""

import argparse
import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.simulated_engine import Cost, SimulatedEngine, Workload
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import load_tokenizer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.step_results import StepResults

SAMPLE_VARIANTS: dict[str, dict[str, Any]] = {
    "logprobs=0": {"logprobs": 0},
    "logprobs=5": {"logprobs": 5},
    "logprobs=20": {"logprobs": 20},
    "logprobs=-1": {"logprobs": -1},
}
PROMPT_VARIANTS: dict[str, dict[str, Any]] = {
    "prompt_logprobs=0": {"prompt_logprobs": 0},
    "prompt_logprobs=5": {"prompt_logprobs": 5},
}
# Part of the logprobs path → the function that it is (or, where it runs without logprobs too, grows in).
STAGES: dict[str, tuple[type, str]] = {
    "scorer": (Sampler, "_score"),
    "copy": (StepResults, "finish"),
    "packing": (Scheduler, "update_from_output"),
    "front end": (OutputProcessor, "process_outputs"),
}
_PROMPT_LEN = 128


class Slice(NamedTuple):
    """One run of requests, timed."""

    wall: float  # seconds
    cpu: float  # seconds of all threads
    num_tokens: int  # generated, or prompt tokens where those are scored


class Bench:
    """An engine, and requests that take it about a second."""

    def __init__(self, model: str, num_requests: int, seconds: float, dtype: str) -> None:
        self.llm = LLM(
            model, dtype=dtype, max_model_len=1024, max_num_seqs=num_requests, max_logprobs=-1,
            max_num_batched_tokens=2048,
        )  # fmt: skip
        self.num_requests = num_requests
        self._vocab_size = self.llm.model_config.vocab_size
        self._draw = random.Random(0)
        self._prompts = [self._make_prompt(32) for _ in range(num_requests)]
        self._num_output = 2
        self.decode({})  # the prompts are in the prefix cache from here on
        one = self.decode({}).wall / self._num_output
        self._num_output = max(2, min(256, round(seconds / one)))
        self._num_scored = 1
        one = self.score({"prompt_logprobs": 5}).wall
        self._num_scored = max(1, min(num_requests, round(seconds / one)))

    def _make_prompt(self, length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [self._draw.randrange(self._vocab_size) for _ in range(length)]}

    def decode(self, options: dict[str, Any]) -> Slice:
        """Generate from prompts that are cached."""
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=self._num_output, **options)
        return self._run(self._prompts, params, self.num_requests * self._num_output)

    def score(self, options: dict[str, Any]) -> Slice:
        """Run prompts that nobody has seen before."""
        prompts = [self._make_prompt(_PROMPT_LEN) for _ in range(self._num_scored)]
        return self._run(prompts, SamplingParams(temperature=0, max_tokens=1, **options), len(prompts) * _PROMPT_LEN)

    def _run(self, prompts: list[dict[str, list[int]]], params: SamplingParams, num_tokens: int) -> Slice:
        wall, cpu = time.perf_counter(), time.process_time()
        self.llm.generate(prompts, params, use_tqdm=False)
        return Slice(time.perf_counter() - wall, time.process_time() - cpu, num_tokens)


def measure_pairs(
    run: Callable[[dict[str, Any]], Slice], variants: dict[str, dict[str, Any]], num_pairs: int
) -> list[list[object]]:
    """Return a row for each variant: quartiles of its speed over that of the slice beside it, and CPU time."""
    pairs: dict[str, list[tuple[Slice, Slice]]] = {name: [] for name in variants}
    for turn in range(num_pairs):
        for name, options in variants.items():
            if turn % 2:
                first = run({})
                pairs[name].append((first, run(options)))
            else:
                second = run(options)
                pairs[name].append((run({}), second))
    rows: list[list[object]] = []
    for name, slices in pairs.items():
        ratios = report.quartiles([without.wall / with_.wall for without, with_ in slices])
        cpu_ratio = report.quartiles([with_.cpu / without.cpu for without, with_ in slices])[1]
        cpu = [
            report.quartiles([1e6 * pair[side].cpu / pair[side].num_tokens for pair in slices])[1] for side in (0, 1)
        ]
        length = report.quartiles([with_.wall for _, with_ in slices])[1]
        rows.append([name, *ratios, *cpu, cpu_ratio, length, len(slices)])
    return rows


PAIR_COLUMNS = [
    "against without", "speed: lower quartile", "median", "upper quartile", "CPU µs/token without", "with", "ratio",
    "s a slice", "pairs",
]  # fmt: skip


@contextmanager
def timing(spent: Counter[str]) -> Iterator[None]:
    """Add up the seconds that each stage takes."""
    originals = {name: vars(owner)[method] for name, (owner, method) in STAGES.items()}

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - begun

        return timed

    try:
        for name, (owner, method) in STAGES.items():
            original = originals[name]
            is_static = isinstance(original, staticmethod)
            timed = wrap(name, original.__func__ if is_static else original)
            setattr(owner, method, staticmethod(timed) if is_static else timed)
        yield
    finally:
        for name, (owner, method) in STAGES.items():
            setattr(owner, method, originals[name])


def measure_stages(bench: Bench, num_turns: int) -> list[list[object]]:
    """Return a row for each number of alternatives: shares of the step in percent, beyond those without logprobs."""
    variants: dict[str, dict[str, Any]] = {"without": {}} | {
        name: options for name, options in SAMPLE_VARIANTS.items() if options["logprobs"] >= 0
    }
    spent: dict[str, list[Counter[str]]] = {name: [] for name in variants}
    for _ in range(num_turns):
        for name, options in variants.items():
            seconds: Counter[str] = Counter()
            with timing(seconds):
                seconds["all"] = bench.decode(options).wall
            spent[name].append(seconds)
    # The least of several turns: what a part takes when nothing else disturbs it.
    least = {name: {stage: min(turn[stage] for turn in turns) for stage in turns[0]} for name, turns in spent.items()}
    rows: list[list[object]] = []
    for name in SAMPLE_VARIANTS:
        if name not in least:
            continue
        parts = [
            100 * (least[name].get(stage, 0.0) - least["without"].get(stage, 0.0)) / least[name]["all"]
            for stage in ("scorer", "copy", "packing", "front end")
        ]
        rows.append([name, *parts, sum(parts)])
    return rows


STAGE_COLUMNS = ["% of a step", "scorer", "copy", "packing", "front end", "together"]


def measure_python(engine: SimulatedEngine, num_turns: int) -> list[list[object]]:
    """Return a row for each workload; times are the least of several alternating turns."""
    kinds = (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
    workloads = [Workload(*case) for case in itertools.product((64, 256), kinds, (None, 5))]
    costs: dict[Workload, Cost] = {}
    for _ in range(num_turns):
        for workload in workloads:
            cost, _outputs = engine.run(workload)
            costs[workload] = Cost(*map(min, cost, costs.get(workload, cost)))
    return [
        [
            f"{workload.num_requests} × {workload.kind.name}, logprobs={workload.num_top}",
            cost.schedule, cost.update, cost.process, cost.front_end, cost.wire, cost.objects,
        ]
        for workload, cost in costs.items()
    ]  # fmt: skip


PYTHON_COLUMNS = [
    "a token of a request",
    "schedule µs",
    "update µs",
    "process µs",
    "front end µs",
    "wire µs",
    "objects",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a slice takes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--part", choices=("all", "pairs", "stages", "python"), default="all")
    report.add_output_argument(parser)
    args = parser.parse_args()

    details: dict[str, list[list[object]]] = {}
    if args.part in ("all", "python"):
        engine = SimulatedEngine(load_tokenizer(args.model), has_wire=True)
        details["python"] = [PYTHON_COLUMNS, *measure_python(engine, args.pairs)]
    if args.part in ("all", "pairs", "stages"):
        bench = Bench(args.model, args.num_requests, args.seconds, args.dtype)
        if args.part != "stages":
            rows = measure_pairs(bench.decode, SAMPLE_VARIANTS, args.pairs)
            details["pairs"] = [PAIR_COLUMNS, *rows, *measure_pairs(bench.score, PROMPT_VARIANTS, args.pairs)]
        if args.part != "pairs":
            details["stages"] = [STAGE_COLUMNS, *measure_stages(bench, args.pairs)]
        bench.llm.shutdown()
    titles = {
        "pairs": f"{args.num_requests} requests at once, or prompts of {_PROMPT_LEN} tokens, {args.dtype}",
        "stages": f"The logprobs path, {args.num_requests} requests at once",
        "python": "No model: the engine's own Python",
    }
    *others, last = details
    for name in others:
        report.show(titles[name], details[name][0], details[name][1:], None)
    report.show(titles[last], details[last][0], details[last][1:], args.json, details)


if __name__ == "__main__":
    main()
