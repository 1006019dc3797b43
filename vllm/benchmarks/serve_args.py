"""The flags of `vllm bench serve`."""

import argparse
from collections.abc import Sequence

from vllm.benchmarks.arrivals import RAMP_UP_STRATEGIES, check_rates
from vllm.benchmarks.backends import CHAT, ENDPOINTS
from vllm.benchmarks.datasets import add_dataset_flags, check_dataset_flags
from vllm.engine.cli_args import check_at_least, read_json_object
from vllm.exceptions import VLLMValidationError

# flag → the type of its value; each goes into the request's body as it is
SAMPLING_FLAGS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
}


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` all flags."""
    _add_server_flags(parser)
    add_dataset_flags(parser)
    _add_request_flags(parser)
    _add_load_flags(parser)
    _add_report_flags(parser)


def check_serve_flags(args: argparse.Namespace) -> None:
    """Raise for values that break a rule, before anything is sent.

    Raises:
        VLLMValidationError: it names the flag.
    """
    check_dataset_flags(args)
    check_rates(
        args.request_rate, args.burstiness, (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    )
    check_at_least(args, max_concurrency=1, num_warmups=0, ready_check_timeout_sec=0, logprobs=0)
    endpoint = args.endpoint or ENDPOINTS[args.backend]
    if endpoint.endswith("/chat/completions") != args.backend.endswith("-chat"):
        raise VLLMValidationError(
            f"--backend {args.backend} does not fit --endpoint {endpoint}; conversations are --backend openai-chat"
        )
    if args.append_result and not args.save_result:
        raise VLLMValidationError("--append-result needs --save-result")


def read_pairs(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Return the values of a flag that takes KEY=VALUE.

    Raises:
        VLLMValidationError: one is not of that form.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise VLLMValidationError(f"{flag} takes KEY=VALUE; got {pair!r}")
        found[key] = value
    return found


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the server")
    group.add_argument(
        "--backend", choices=tuple(ENDPOINTS), default="openai", help="completions, or conversations (default: openai)"
    )
    group.add_argument("--base-url", metavar="URL", help="in place of host and port")
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, metavar="INT", help="(default: 8000)")
    group.add_argument("--endpoint", metavar="PATH", help=f"(default: the backend's, such as {CHAT})")
    group.add_argument("--header", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help="more headers")
    group.add_argument("--insecure", action="store_true", help="don't check the server's certificate")
    group.add_argument("--model", metavar="NAME", help="(default: the first one that the server lists)")
    group.add_argument("--served-model-name", metavar="NAME", help="the model's name in requests, if it is another")
    group.add_argument("--lora-modules", nargs="+", metavar="NAME", help="models, one of which each request takes")
    group.add_argument("--tokenizer", metavar="PATH", help="folder, .gguf file or hub id (default: the model's)")
    group.add_argument("--tokenizer-mode", default="auto", help="(default: auto)")
    group.add_argument("--trust-remote-code", action="store_true", help="passed on to the tokenizer")
    group.add_argument(
        "--skip-tokenizer-init", action="store_true", help="no tokenizer: random prompts are token ids below 256"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0, metavar="S", help="wait so long for a first answer"
    )


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("each request", "what is not given is left to the server")
    group.add_argument("--logprobs", type=int, metavar="INT", help="ask for the logprobs of so many alternatives")
    group.add_argument("--ignore-eos", action="store_true", help="answers of full length (not every server can)")
    group.add_argument("--use-beam-search", action="store_true", help="ask for beam search (not every server can)")
    for name, kind in SAMPLING_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper())
    group.add_argument(
        "--extra-body", type=read_json_object, default={}, metavar="JSON", help="fields laid over each body"
    )
    group.add_argument("--request-id-prefix", metavar="TEXT", help="of the x-request-id header (default: a random one)")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the load")
    group.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="R", help="requests a second (default: inf)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of the gamma-distributed gaps; 1: a Poisson process, less: bursts, more: even (default: 1)",
    )
    group.add_argument("--max-concurrency", type=int, metavar="INT", help="requests that are open at once")
    group.add_argument("--ramp-up-strategy", choices=RAMP_UP_STRATEGIES, help="let the rate move")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="the first rate")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="the last rate")
    group.add_argument("--num-warmups", type=int, default=0, metavar="INT", help="requests before the clock starts")
    group.add_argument("--seed", type=int, default=0, metavar="INT", help="of prompts, lengths and times (default: 0)")
    group.add_argument("--profile", action="store_true", help="POST /start_profile and /stop_profile around the run")


def _add_report_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the report")
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="of ttft, tpot, itl, e2el"
    )
    group.add_argument("--metric-percentiles", default="99", metavar="NUMBERS", help="such as 50,99 (default: 99)")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count the requests that keep all of these, such as ttft:200 e2el:5000",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    group.add_argument("--save-detailed", action="store_true", help="with an entry for each request")
    group.add_argument("--append-result", action="store_true", help="add a line to the file, in place of a new file")
    group.add_argument("--metadata", nargs="*", action="extend", default=[], metavar="KEY=VALUE", help="into the file")
    group.add_argument("--result-dir", metavar="PATH", help="where the file is written (default: here)")
    group.add_argument("--result-filename", metavar="NAME", help="(default: made of backend, rate, model and time)")
    group.add_argument("--label", metavar="TEXT", help="begins the default file name, in place of the backend")
