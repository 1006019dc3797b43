"""What does it cost to score many texts that begin alike, and the same text again?

    python -m benchmarks.bench_scoring MODEL [--peer vllm=PYTHON] [--lm-eval PYTHON] [--runs 3] [--json FILE]

Forty four-choice questions behind 600 tokens of examples (benchmarks/data/mc40.jsonl), float32. The first rows are this
process: `LLM.score_continuations`, with the positions that it computes beside those that there are. The others run the
same questions by lm-eval's `vllm` class in environments of their own, start-up apart: `--lm-eval` names a Python that
has lm-eval and this project, `--peer vllm=PYTHON` one that has lm-eval and the original. Values are compared too.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from benchmarks.data.make_mc40 import make_beginning
from benchmarks.peers.engine_process import make_environment
from benchmarks.report import add_output_argument, show
from vllm import LLM, SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks/data/mc40.jsonl"
RUNNER = ROOT / "benchmarks/data/lm_eval/run_mc40.py"
LENGTH = 700  # of the prompt that is scored twice

COLUMNS = ["what", "seconds", "positions computed", "positions there are", "accuracy", "largest difference"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, help="a Hugging Face folder")
    parser.add_argument("--peer", metavar="vllm=PYTHON", help="the original, with lm-eval in the same environment")
    parser.add_argument("--lm-eval", metavar="PYTHON", help="an environment with lm-eval and this project")
    parser.add_argument("--runs", type=int, default=3)
    add_output_argument(parser)
    args = parser.parse_args()
    if args.peer is not None and not args.peer.startswith("vllm="):
        parser.error("--peer must be vllm=PYTHON")
    items = [json.loads(line) for line in DATA.read_text().splitlines()]
    with LLM(str(args.model), dtype="float32", max_model_len=1024) as llm:
        rows, values = measure_ours(llm, items, args.runs)
        rows += measure_repetition(llm, args.runs)
    for name, python in (("lm-eval on this engine", args.lm_eval), ("lm-eval on vLLM", (args.peer or "")[5:])):
        if python:
            rows.append(measure_lm_eval(name, python, args.model, items, values))
            print(*rows[-1], flush=True)  # the next one takes minutes
    show(f"Scoring: {args.model.name}, float32, {os.cpu_count()} cores", COLUMNS, rows, args.json)


def measure_ours(llm: LLM, items: list[dict[str, Any]], runs: int) -> tuple[list[list[object]], list[float]]:
    """Return a row for a cold cache and one for a warm one, and the values."""
    contexts, choices = [item["context"] for item in items], [item["choices"] for item in items]
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(runs):
        llm.reset_prefix_cache()
        num_before = count_positions(llm)
        cold.append(time_call(lambda: llm.score_continuations(contexts, choices, use_tqdm=False)))
        num_cold = count_positions(llm) - num_before
        warm.append(time_call(lambda: llm.score_continuations(contexts, choices, use_tqdm=False)))
        num_warm = count_positions(llm) - num_before - num_cold
    scores = llm.score_continuations(contexts, choices, use_tqdm=False)
    num_right = sum(
        max(range(4), key=lambda i, row=row: row[i].logprob) == item["answer"]  # type: ignore[misc]
        for row, item in zip(scores, items, strict=True)
    )
    num_there = count_distinct(llm, items, scores)
    accuracy = num_right / len(items)
    rows: list[list[object]] = [
        ["score_continuations, cold", min(cold), num_cold, num_there, accuracy, "-"],
        ["score_continuations, again", min(warm), num_warm, "-", accuracy, "-"],
    ]
    return rows, [score.logprob for row in scores for score in row]


def count_distinct(llm: LLM, items: list[dict[str, Any]], scores: list[Any]) -> int:
    """Return the shared beginning once, each question once, and of each continuation all but its last token."""
    tokenizer = llm.llm_engine.tokenizer
    assert tokenizer is not None
    num_shared = len(tokenizer.encode(make_beginning()))
    num_questions = sum(row[0].num_context_tokens - num_shared for row in scores)
    return num_shared + num_questions + sum(score.num_tokens - 1 for row in scores for score in row)


def measure_repetition(llm: LLM, runs: int) -> list[list[object]]:
    """Score one prompt of 700 tokens with a cold cache and again."""
    tokenizer = llm.llm_engine.tokenizer
    assert tokenizer is not None
    prompt = {"prompt_token_ids": (tokenizer.encode(make_beginning()) * 2)[:LENGTH]}
    params = SamplingParams(prompt_logprobs=1, max_tokens=0, temperature=0)
    first, second = [], []
    for _ in range(max(runs, 5)):
        llm.reset_prefix_cache()
        first.append(time_call(lambda: llm.generate([prompt], params, use_tqdm=False)))
        second.append(time_call(lambda: llm.generate([prompt], params, use_tqdm=False)))
    share = f"{min(second) / min(first):.1%} of the first"
    return [
        [f"{LENGTH} tokens scored once", min(first), LENGTH - 1, LENGTH - 1, "-", "-"],
        [f"{LENGTH} tokens scored again", min(second), share, "-", "-", "-"],
    ]


def measure_lm_eval(
    name: str, python: str, model: pathlib.Path, items: list[dict[str, Any]], values: list[float]
) -> list[object]:
    """Run lm-eval in another environment, cold."""
    environment = make_environment(is_original_vllm=True)  # this project does without, and takes no notice
    command = [python, str(RUNNER), str(model.resolve()), str(ROOT)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        print(f"{name}: left out:\n{run.stderr[-2000:]}", file=sys.stderr)
        return [name, "failed", "-", "-", "-", "-"]
    found = json.loads(next(line for line in reversed(run.stdout.splitlines()) if line.startswith('{"seconds"')))
    difference = max(abs(one - other) for one, other in zip(found["logprobs"], values, strict=True))
    return [name, found["seconds"], found.get("num_computed", "-"), "-", found["acc"], f"{difference:.1e}"]


def count_positions(llm: LLM) -> int:
    return llm.llm_engine.get_stats().num_computed_positions


def time_call(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
