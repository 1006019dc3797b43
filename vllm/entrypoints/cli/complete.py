"""Continue texts that you type: with a model that a server has (--url), or one that is loaded here (--model)."""

import argparse
from collections.abc import Callable

from vllm.entrypoints.cli.dialogue import Dialogue, add_dialogue_flags, hold_dialogue, make_sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    parser.usage = "%(prog)s [--url URL | --model MODEL] [flags]; --help lists them"
    add_dialogue_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    return hold_dialogue(args, "each line is continued; Ctrl-D ends", lambda dialogue: _begin(args, dialogue))


def _begin(args: argparse.Namespace, dialogue: Dialogue) -> Callable[[str], None]:
    fields = make_sampling(args)
    if args.logprobs:
        fields["logprobs"] = 0

    def answer(line: str) -> None:
        dialogue.ask("/completions", {"prompt": line, **fields})

    return answer
