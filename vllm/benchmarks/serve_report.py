"""What `vllm bench serve` prints and saves."""

import argparse
import collections
import json
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.benchmarks.backends import RequestResult
from vllm.benchmarks.metrics import METRICS
from vllm.exceptions import VLLMValidationError

_WIDTH = 52
_DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors", "latencies")
_MAX_SHOWN_ERRORS = 3


def format_report(
    figures: Mapping[str, Any],
    *,
    request_rate: float,
    max_concurrency: int | None,
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> str:
    """Return the report; its labels are vLLM's, so that what reads that reads this."""
    lines = [" Serving benchmark ".center(_WIDTH, "=")]
    lines.append(_line("Successful requests:", figures["completed"]))
    lines.append(_line("Failed requests:", figures["failed"]))
    if max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", max_concurrency))
    if math.isfinite(request_rate):
        lines.append(_line("Request rate configured (RPS):", request_rate))
    lines.append(_line("Benchmark duration (s):", figures["duration"]))
    lines.append(_line("Total input tokens:", figures["total_input_tokens"]))
    lines.append(_line("Total generated tokens:", figures["total_output_tokens"]))
    lines.append(_line("Request throughput (req/s):", figures["request_throughput"]))
    if figures["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", figures["request_goodput"]))
    lines.append(_line("Output token throughput (tok/s):", figures["output_throughput"]))
    lines.append(_line("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]))
    lines.append(_line("Peak concurrent requests:", figures["max_concurrent_requests"]))
    lines.append(_line("Total token throughput (tok/s):", figures["total_token_throughput"]))
    for name in metrics:
        lines.append(f" {METRICS[name]} ".center(_WIDTH, "-"))
        lines.append(_line(f"Mean {name.upper()} (ms):", figures[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {name.upper()} (ms):", figures[f"median_{name}_ms"]))
        for percentile in percentiles:
            value = figures[f"p{percentile:g}_{name}_ms"]
            lines.append(_line(f"P{percentile:g} {name.upper()} (ms):", value))
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _line(label: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()


def format_failures(results: Sequence[RequestResult]) -> list[str]:
    """Return a line for each of the commonest reasons why requests failed."""
    reasons = collections.Counter(" ".join(result.error.split()) for result in results if result.error)
    lines = [f"{count} failed: {reason}" for reason, count in reasons.most_common(_MAX_SHOWN_ERRORS)]
    if len(reasons) > _MAX_SHOWN_ERRORS:
        lines.append(f"… and {len(reasons) - _MAX_SHOWN_ERRORS} other reasons")
    return lines


def make_document(
    args: argparse.Namespace,
    figures: Mapping[str, Any],
    *,
    model_id: str,
    tokenizer_id: str | None,
    metadata: Mapping[str, str],
) -> dict[str, Any]:
    """Return what a result file holds. An infinite rate, which JSON lacks, is "inf"."""
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": args.label,
        "model_id": model_id,
        "tokenizer_id": tokenizer_id,
        "num_prompts": args.num_prompts,
        **metadata,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **figures,
    }


def save_document(args: argparse.Namespace, document: Mapping[str, Any]) -> pathlib.Path:
    """Write or append the document as one line of JSON, and return the file.

    Raises:
        VLLMValidationError: the file can't be written.
    """
    kept = {name: value for name, value in document.items() if args.save_detailed or name not in _DETAILS}
    path = pathlib.Path(args.result_dir or ".") / (args.result_filename or _make_name(args, document))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(kept, allow_nan=False) + "\n")
    except OSError as error:
        raise VLLMValidationError(f"the result can't be written to {path}: {error.strerror or error}") from None
    return path


def check_result_path(args: argparse.Namespace) -> None:
    """Raise before the run for a folder that can't hold its result.

    Raises:
        VLLMValidationError: it can't be created.
    """
    folder = pathlib.Path(args.result_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VLLMValidationError(f"--result-dir {folder} can't be made: {error.strerror or error}") from None


def _make_name(args: argparse.Namespace, document: Mapping[str, Any]) -> str:
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    model = pathlib.PurePath(document["model_id"]).name
    start = args.label or args.backend
    return f"{start}-{document['request_rate']}qps{concurrency}-{model}-{document['date']}.json"
