"""The flags of sub-commands that load a model for themselves: the engine's, and what `vllm serve` knows of answers."""

import argparse

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

# They have another form here, or mean nothing without a server.
_LEFT_OUT = (
    "served_model_name",
    "shutdown_timeout",
    "enable_log_requests",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
)


def make_engine_args(args: argparse.Namespace, kind: type[EngineArgs] = EngineArgs) -> EngineArgs:
    """Return the engine's arguments; the cap on logprobs, which protects servers, is off."""
    engine_args = kind.from_cli_args(args)
    if not hasattr(args, "max_logprobs"):
        engine_args.max_logprobs = -1
    return engine_args


def add_local_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of a `LocalServer`."""
    group = parser.add_argument_group("a model that is loaded here")
    group.add_argument(
        "--served-model-name", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help="its names in requests"
    )
    group.add_argument(
        "--chat-template", default=argparse.SUPPRESS, metavar="FILE", help="in place of the model's own chat template"
    )
    AsyncEngineArgs.add_cli_args(parser, leave_out=_LEFT_OUT)
