"""Runs the task mc40 by lm-eval's `vllm` class, in whatever environment's Python, and prints one line of JSON.

PYTHON run_mc40.py MODEL REPOSITORY [--warm]

The time is that of lm-eval's own call for loglikelihoods, start-up apart; `--warm` takes the second of two runs. `vllm`
is whatever that environment calls so: this project, or the original.
"""

import argparse
import json
import os
import pathlib
import time

import lm_eval
from lm_eval.models.vllm_causallms import VLLM
from lm_eval.tasks import TaskManager


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("repository", type=pathlib.Path)
    parser.add_argument("--warm", action="store_true")
    args = parser.parse_args()
    os.chdir(args.repository)  # the task names its data from there
    model = VLLM(pretrained=args.model, dtype="float32", max_model_len=1024, batch_size="auto", seed=1234)
    plain = model.loglikelihood
    taken = []

    def timed(requests, *positional, **named):
        start = time.perf_counter()
        answers = plain(requests, *positional, **named)
        taken.append((time.perf_counter() - start, [answer[0] for answer in answers]))
        return answers

    model.loglikelihood = timed
    tasks = TaskManager(include_path=str(args.repository / "benchmarks/data/lm_eval"))
    for _ in range(2 if args.warm else 1):
        results = lm_eval.simple_evaluate(model=model, tasks=["mc40"], task_manager=tasks, bootstrap_iters=0)
    seconds, logprobs = taken[-1]
    found = {"seconds": seconds, "acc": results["results"]["mc40"]["acc,none"], "logprobs": logprobs}
    engine = model.model.llm_engine
    if hasattr(engine, "get_stats"):  # this project's; all runs together
        found["num_computed"] = engine.get_stats().num_computed_positions
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
