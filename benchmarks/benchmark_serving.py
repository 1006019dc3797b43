"""Measure an OpenAI server: `vllm bench serve` under the name that vLLM's scripts know."""

import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
