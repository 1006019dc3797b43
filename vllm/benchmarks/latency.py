"""Time one batch from its first token in to its last token out, again and again, in this process."""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

from vllm.benchmarks.offline import add_engine_flags, make_params, write_json
from vllm.engine.cli_args import check_at_least
from vllm.entrypoints.cli.local_args import make_engine_args
from vllm.entrypoints.llm import LLM
from vllm.exceptions import VLLMUnsupportedError
from vllm.inputs import TokensPrompt

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    for flag, default, help_text in (
        ("--input-len", 32, "tokens of a prompt"),
        ("--output-len", 128, "tokens of an answer"),
        ("--batch-size", 8, "prompts"),
        ("--num-iters-warmup", 10, "runs before the clock starts"),
        ("--num-iters", 30, "runs that count"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="INT", help=f"{help_text} (default: {default})")
    parser.add_argument("--use-beam-search", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    check_at_least(args, input_len=1, output_len=1, batch_size=1, num_iters_warmup=0, num_iters=1, n=1)
    if args.use_beam_search:
        raise VLLMUnsupportedError("--use-beam-search is not supported; --n draws several choices")
    params = make_params(args, args.output_len)
    rng = np.random.default_rng(getattr(args, "seed", 0))
    with LLM.from_engine_args(make_engine_args(args)) as llm:
        vocab_size = llm.model_config.vocab_size
        prompts = [
            TokensPrompt(prompt_token_ids=ids)
            for ids in rng.integers(0, vocab_size, (args.batch_size, args.input_len)).tolist()
        ]

        def time_once() -> float:
            llm.reset_prefix_cache()  # or every run after the first would find its prompts computed
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start

        latencies = _time_all(time_once, args.num_iters_warmup, args.num_iters, args.disable_tqdm)
    _report(args, latencies)
    return 0


def _time_all(time_once: Callable[[], float], num_warmups: int, num_iters: int, hides_bar: bool) -> list[float]:
    from tqdm import tqdm

    for _ in tqdm(range(num_warmups), desc="warm-up", disable=hides_bar, file=sys.stderr):
        time_once()
    return [time_once() for _ in tqdm(range(num_iters), desc="measured", disable=hides_bar, file=sys.stderr)]


def _report(args: argparse.Namespace, latencies: list[float]) -> None:
    percentiles = dict(zip(PERCENTILES, np.percentile(latencies, PERCENTILES).tolist(), strict=True))
    average = float(np.mean(latencies))
    print(f"Avg latency: {average} seconds")
    for percentile, latency in percentiles.items():
        print(f"{percentile}% percentile latency: {latency} seconds")
    figures = {
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": {str(percentile): latency for percentile, latency in percentiles.items()},
    }
    write_json(args.output_json, figures)
