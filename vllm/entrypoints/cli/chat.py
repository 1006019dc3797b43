"""Talk with a model: one that a server has (--url), or one that is loaded here (--model)."""

import argparse
from collections.abc import Callable

from vllm.entrypoints.cli.dialogue import Dialogue, add_dialogue_flags, hold_dialogue, make_sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    parser.usage = "%(prog)s [--url URL | --model MODEL] [flags]; --help lists them"
    add_dialogue_flags(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="the system message before the conversation")


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    return hold_dialogue(
        args, "Ctrl-C ends an answer, Ctrl-D the conversation", lambda dialogue: _begin(args, dialogue)
    )


def _begin(args: argparse.Namespace, dialogue: Dialogue) -> Callable[[str], None]:
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    fields = make_sampling(args)
    if args.logprobs:
        fields |= {"logprobs": True, "top_logprobs": 0}

    def answer(line: str) -> None:
        asked = [*messages, {"role": "user", "content": line}]
        answered = dialogue.ask("/chat/completions", {"messages": asked, **fields})
        # A turn that failed or was interrupted did not take place.
        messages[:] = [*asked, {"role": "assistant", "content": answered.text}]

    return answer
