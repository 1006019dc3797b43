"""Measure a server, or the engine in this process."""

import argparse

from vllm.entrypoints.cli.subcommand import Subcommand, run_subcommand, suggest
from vllm.exceptions import VLLMValidationError

BENCHMARKS = {
    "serve": Subcommand("vllm.benchmarks.serve", "send a load to an OpenAI server: latencies and throughput"),
    "throughput": Subcommand("vllm.benchmarks.throughput", "answer many prompts at once in this process"),
    "latency": Subcommand("vllm.benchmarks.latency", "time one batch, again and again, in this process"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    width = max(map(len, BENCHMARKS))
    listed = "\n".join(f"  {name:<{width}}  {benchmark.summary}" for name, benchmark in BENCHMARKS.items())
    parser.usage = "%(prog)s BENCHMARK …"
    parser.epilog = f"benchmarks:\n{listed}\n\nvllm bench BENCHMARK --help describes one."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("benchmark", nargs="?", metavar="BENCHMARK", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(print_help=parser.print_help)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    name = args.benchmark
    if name is None:
        args.print_help()
        return 0
    if name not in BENCHMARKS:
        raise VLLMValidationError(f"unknown benchmark {name!r}{suggest(name, BENCHMARKS)}")
    return run_subcommand(f"bench {name}", BENCHMARKS[name], args.arguments)
