"""What the benchmarks in this process share: the engine's flags, its start, and writing figures."""

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the engine's flags and those of a report."""
    parser.add_argument("--n", type=int, default=1, metavar="INT", help="choices for each prompt (default: 1)")
    parser.add_argument("--logprobs", type=int, metavar="INT", help="alternatives of each generated token")
    parser.add_argument("--prompt-logprobs", type=int, metavar="INT", help="the same for each token of the prompt")
    parser.add_argument("--disable-detokenize", action="store_true", help="token ids only")
    parser.add_argument("--output-json", type=pathlib.Path, metavar="FILE", help="write the figures")
    EngineArgs.add_cli_args(parser)


def make_params(args: argparse.Namespace, max_tokens: int | None) -> SamplingParams:
    """Return the params of a request that generates all of its tokens."""
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=max_tokens,
        logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
        detokenize=not args.disable_detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def write_json(path: pathlib.Path | None, figures: Mapping[str, Any]) -> None:
    """Write the figures, where a file was asked for.

    Raises:
        VLLMValidationError: it can't be written.
    """
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise VLLMValidationError(f"--output-json: {path} can't be written: {error.strerror or error}") from None
