"""From the clock readings of all requests to the figures of a report."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm.benchmarks.backends import RequestResult
from vllm.exceptions import VLLMValidationError

# metric → its title in a report
METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Gaps between a stream's events",
    "e2el": "Time to the last token",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


def compute_metrics(
    results: Sequence[RequestResult],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the figures by their names in a result file; those of failed requests are left out.

    Rates are over the whole duration. A metric without a value (no request had two tokens) is 0. `goodput` holds a
    bound in milliseconds for each metric that a good request must keep.
    """
    done = [result for result in results if result.is_success]
    total_input = sum(result.prompt_len for result in done)
    total_output = sum(result.output_len for result in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(done) / duration,
        "request_goodput": count_good(done, goodput) / duration if goodput else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": find_peak_throughput(done),
        "max_concurrent_requests": find_peak_concurrency(done),
        "rtfx": 0.0,  # of audio
    }
    for name in metrics:
        figures |= summarize(name, take_values(name, done), percentiles)
    return figures


def take_values(name: str, results: Sequence[RequestResult]) -> list[float]:
    """Return a metric's values in seconds: one a request, for `itl` one a gap."""
    if name == "itl":
        return [gap for result in results for gap in result.itls]
    if name == "tpot":
        return [tpot for result in results if (tpot := result.tpot) is not None]
    return [result.ttft if name == "ttft" else result.latency for result in results]


def summarize(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles in milliseconds, by their names in a result file."""
    milliseconds = np.asarray(values or [0.0]) * 1000
    figures = {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
    }
    for percentile in percentiles:
        figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return figures


def count_good(results: Sequence[RequestResult], goodput: Mapping[str, float]) -> int:
    """Return how many requests kept all bounds; one of a single token has a time per output token of 0."""
    num_good = 0
    for result in results:
        values = {"ttft": result.ttft, "tpot": result.tpot or 0.0, "e2el": result.latency}
        num_good += all(values[name] * 1000 <= bound for name, bound in goodput.items())
    return num_good


def find_peak_throughput(results: Sequence[RequestResult]) -> float:
    """Return the most output tokens of any second since the first request; merged events count as what they hold."""
    if not results:
        return 0.0
    start = min(result.started_at for result in results)
    seconds = [int(time - start) for result in results for time in result.token_times]
    weights = [result.output_len / len(result.token_times) for result in results for _ in result.token_times]
    return float(np.bincount(seconds, weights).max())


def find_peak_concurrency(results: Sequence[RequestResult]) -> int:
    """Return the most requests that were open at one moment."""
    changes = [(result.started_at, 1) for result in results] + [(result.last_at, -1) for result in results]
    peak = current = 0
    for _, change in sorted(changes):  # at one moment, those that end go first
        current += change
        peak = max(peak, current)
    return peak


def make_details(results: Sequence[RequestResult], start: float) -> dict[str, list[Any]]:
    """Return what `--save-detailed` adds: an entry a request, failed ones too; times in seconds."""
    return {
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [result.output_len if result.is_success else 0 for result in results],
        "ttfts": [result.ttft if result.first_at else 0.0 for result in results],
        "itls": [result.itls for result in results],
        "start_times": [result.started_at - start for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error for result in results],
        "latencies": [result.latency if result.last_at else 0.0 for result in results],
    }


# ---------------------------------------------------------------- flags


def read_metric_names(text: str) -> list[str]:
    """Return the metrics of `--percentile-metrics`.

    Raises:
        VLLMValidationError: one is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise VLLMValidationError(f"--percentile-metrics: {name!r} is none of {', '.join(METRICS)}")
    return names


def read_percentiles(text: str) -> list[float]:
    """Return the percentiles of `--metric-percentiles`.

    Raises:
        VLLMValidationError: one is no number from 0 to 100.
    """
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value <= 100 for value in values):
        raise VLLMValidationError(f"--metric-percentiles must be numbers from 0 to 100, such as 50,99; got {text!r}")
    return values


def read_goodput(bounds: Sequence[str]) -> dict[str, float]:
    """Return the bounds of `--goodput`, in milliseconds.

    Raises:
        VLLMValidationError: one is not of the form ttft:200.
    """
    found: dict[str, float] = {}
    for bound in bounds:
        name, _, value = bound.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in GOODPUT_METRICS or not found[name] >= 0:
            raise VLLMValidationError(
                f"--goodput takes {', '.join(GOODPUT_METRICS)} and milliseconds, such as ttft:200; got {bound!r}"
            )
    return found
