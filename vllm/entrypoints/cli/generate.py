"""Continue prompts on a local model and show each token's log-probability."""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.local_args import make_engine_args
from vllm.entrypoints.cli.tables import print_tables
from vllm.entrypoints.llm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

# flag → the type of its value and what it does
SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "n": (int, "choices for each prompt"),
    "max-tokens": (int, "longest answer; 0 only scores the prompt"),
    "min-tokens": (int, "shortest answer"),
    "logprobs": (int, "alternatives of each generated token; 0: the token itself; -1: all"),
    "prompt-logprobs": (int, "the same for each token of the prompt"),
    "temperature": (float, "0 is greedy"),
    "top-p": (float, "smallest set of tokens with this much probability"),
    "top-k": (int, "this many most likely tokens; 0: all"),
    "min-p": (float, "tokens at least this likely, relative to the best"),
    "seed": (int, "choice i has seed + i"),
    "presence-penalty": (float, "against tokens generated before"),
    "frequency-penalty": (float, "against tokens generated often"),
    "repetition-penalty": (float, "against tokens of prompt and answer"),
    "logprobs-mode": (str, "raw_logprobs, processed_logprobs, raw_logits or processed_logits"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--table", dest="form", action="store_const", const="table", help="tables for people (default)")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="one JSON document")
    parser.set_defaults(form="table")
    group = parser.add_argument_group("sampling", "what is not given is the model's default")
    for flag, (kind, help_text) in SAMPLING_FLAGS.items():
        dest = f"sampling_{flag.replace('-', '_')}"
        group.add_argument(f"--{flag}", dest=dest, type=kind, metavar=kind.__name__.upper(), help=help_text)
    group.add_argument("--stop", dest="sampling_stop", action="append", metavar="TEXT", help="ends the answer")
    group.add_argument(
        "--ignore-eos", dest="sampling_ignore_eos", action="store_const", const=True, help="go on past the end token"
    )
    # A seed or a mode given here is the request's.
    EngineArgs.add_cli_args(parser, leave_out=("seed", "logprobs_mode"))


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    if not args.prompt:
        raise VLLMValidationError("generate needs at least one --prompt")
    engine_args = make_engine_args(args)
    engine_args.disable_log_stats = True
    given = {
        name.removeprefix("sampling_"): value
        for name, value in vars(args).items()
        if name.startswith("sampling_") and value is not None
    }
    with LLM.from_engine_args(engine_args) as llm:
        params = llm.get_default_sampling_params()
        fields = {name: getattr(params, name) for name in given_fields(params)}
        outputs = llm.generate(args.prompt, SamplingParams(**{**fields, **given}))
        mode = given.get("logprobs_mode", "raw_logprobs")
        if args.form == "json":
            document = {"model": args.model, "logprobs_mode": mode, "outputs": [describe(output) for output in outputs]}
            json.dump(document, sys.stdout, ensure_ascii=False, allow_nan=False)
            sys.stdout.write("\n")
        else:
            print_tables(outputs, shows_probabilities=mode.endswith("logprobs"))
    return 1 if any(choice.finish_reason == "error" for output in outputs for choice in output.outputs) else 0


def given_fields(params: SamplingParams) -> list[str]:
    """Return the fields in which `params` differs from the defaults of all params."""
    plain = SamplingParams()
    names = [name for name in params.__struct_fields__ if not name.startswith("_")]
    return [name for name in names if getattr(params, name) != getattr(plain, name)]


# ---------------------------------------------------------------- JSON


def describe(output: RequestOutput) -> dict[str, Any]:
    """Return a prompt's answer in JSON's types; a number that JSON can't hold is null."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": describe_positions(output.prompt_logprobs),
        "choices": [_describe_choice(choice) for choice in output.outputs],
    }


def _describe_choice(choice: CompletionOutput) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "cumulative_logprob": _finite(choice.cumulative_logprob),
        "logprobs": describe_positions(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def describe_positions(positions: Any) -> list[list[dict[str, Any]] | None] | None:
    """Return each position's entries, the chosen token first; null for a position without scores."""
    if positions is None:
        return None
    return [None if position is None else _describe_entries(position) for position in positions]


def _describe_entries(position: Mapping[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token_id,
            "token": entry.decoded_token,
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
        }
        for token_id, entry in position.items()
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
