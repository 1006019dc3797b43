"""The `vllm` command: `vllm --help` lists what there is, and loads none of it."""

import argparse
import os
import sys

import vllm
from vllm.entrypoints.cli.subcommand import Subcommand, fail, parse, run_subcommand, suggest
from vllm.exceptions import VLLMClientError, VLLMError

SUBCOMMANDS = {
    "generate": Subcommand(
        "vllm.entrypoints.cli.generate", "continue prompts and show each token's log-probability, as a table or JSON"
    ),
    "serve": Subcommand("vllm.entrypoints.cli.serve", "serve a model over HTTP, with the routes of the OpenAI API"),
    "chat": Subcommand("vllm.entrypoints.cli.chat", "talk with a model, served somewhere or loaded here"),
    "complete": Subcommand("vllm.entrypoints.cli.complete", "continue texts that you type"),
    "score": Subcommand("vllm.entrypoints.cli.score", "score a file of texts or of contexts with choices"),
    "run-batch": Subcommand("vllm.entrypoints.cli.run_batch", "answer a file of requests (OpenAI's batch format)"),
    "bench": Subcommand("vllm.entrypoints.cli.bench", "measure a server, or the engine in this process"),
    "collect-env": Subcommand("vllm.entrypoints.cli.collect_env", "describe this machine, for a bug report"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (our fault or the model's), 2 (the caller's), 130 (Ctrl-C)."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0].startswith("-"):
        return _run_top_level(argv)
    name, rest = argv[0], argv[1:]
    if name not in SUBCOMMANDS:
        return fail(f"unknown command {name!r}{suggest(name, SUBCOMMANDS)}", status=2)
    try:
        return run_subcommand(name, SUBCOMMANDS[name], rest)
    except VLLMClientError as error:
        return fail(str(error), status=2)
    except VLLMError as error:
        return fail(str(error), status=1)
    except KeyboardInterrupt:
        return fail("interrupted", status=130)
    except BrokenPipeError:  # the reader of our output, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run_top_level(argv: list[str]) -> int:
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {subcommand.summary}" for name, subcommand in SUBCOMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="vllm",
        usage="vllm [--help] [--version] COMMAND …",
        description="Log-probabilities and parallel sampling for language models.",
        epilog=f"commands:\n{listed}\n\nvllm COMMAND --help describes one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-v", "--version", action="store_true", help="show the version and leave")
    args = parse(parser, argv)
    if isinstance(args, int):
        return args
    if args.version:
        print(vllm.__version__)
        return 0
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
