"""Serve a model over HTTP, with the routes of the OpenAI API."""

import argparse

from vllm.entrypoints.openai.api_server import run_server
from vllm.entrypoints.openai.cli_args import add_serve_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    add_serve_args(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    return run_server(args)
