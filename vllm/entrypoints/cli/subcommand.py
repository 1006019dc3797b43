"""A sub-command of the `vllm` command: where it lives, and how its module is loaded and run."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterable
from typing import NamedTuple


class Subcommand(NamedTuple):
    """Where a sub-command lives: a module with `add_arguments(parser)` and `run(args) -> exit status`."""

    module: str
    summary: str


def run_subcommand(name: str, subcommand: Subcommand, argv: list[str]) -> int:
    """Load the sub-command's module, and none of another, and run it on its arguments."""
    module = importlib.import_module(subcommand.module)
    cli_args = importlib.import_module("vllm.engine.cli_args")
    parser = argparse.ArgumentParser(prog=f"vllm {name}", description=module.__doc__, allow_abbrev=False)
    module.add_arguments(parser)
    args = parse(parser, cli_args.with_dashes(argv))
    return args if isinstance(args, int) else module.run(args)


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace | int:
    """Return the parsed arguments, or the exit status where argparse ended the command."""
    try:
        args, unknown = parser.parse_known_args(argv)
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 2
    if unknown:
        near = _nearest(unknown[0].partition("=")[0], parser._option_string_actions)
        return fail(f"{parser.prog}: unknown argument {unknown[0]!r}{near}", status=2)
    return args


def suggest(name: str, known: Iterable[str]) -> str:
    """Return how the message about an unknown name goes on: the nearest name, or all that there are."""
    return _nearest(name, known) or f"; there are: {', '.join(known)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def fail(message: str, *, status: int) -> int:
    """Say in one line why the command ends, and return its exit status."""
    print(f"vllm: {' '.join(message.split())}", file=sys.stderr)
    return status
