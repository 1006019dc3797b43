"""When requests are sent: all at once, or at a rate with gamma-distributed gaps."""

import math
from collections.abc import Sequence

import numpy as np

from vllm.exceptions import VLLMValidationError

RAMP_UP_STRATEGIES = ("linear", "exponential")


def make_arrivals(num_requests: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Return each request's time in seconds after the start.

    A burstiness of 1 makes a Poisson process; below 1 requests come in bursts, above 1 more evenly. The gaps are scaled
    so that the last request comes after exactly `num_requests / rate` seconds: two seeds have the same load.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    times = np.cumsum(_draw_gaps(np.full(num_requests, rate), burstiness, rng))
    if num_requests and times[-1] > 0:
        times *= num_requests / rate / times[-1]
    return [float(time) for time in times]


def make_ramp_up(
    num_requests: int, strategy: str, start_rate: float, end_rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """Return arrival times whose rate moves from `start_rate` to `end_rate` over the requests."""
    progress = np.arange(num_requests) / max(1, num_requests - 1)
    if strategy == "linear":
        rates = start_rate + (end_rate - start_rate) * progress
    else:
        rates = start_rate * (end_rate / start_rate) ** progress
    return [float(time) for time in np.cumsum(_draw_gaps(rates, burstiness, rng))]


def check_rates(rate: float, burstiness: float, ramp_up: Sequence[float | str | None]) -> None:
    """Raise for rates that mean nothing.

    Raises:
        VLLMValidationError: it names the flag.
    """
    if not rate > 0:
        raise VLLMValidationError(f"--request-rate must be above 0, or inf for all at once; got {rate}")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise VLLMValidationError(f"--burstiness must be above 0; got {burstiness}")
    strategy, start, end = ramp_up
    if strategy is None:
        if start is not None or end is not None:
            raise VLLMValidationError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return
    if math.isfinite(rate):
        raise VLLMValidationError("--request-rate and --ramp-up-strategy say two things; give one")
    for name, value in (("start", start), ("end", end)):
        if not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
            raise VLLMValidationError(f"--ramp-up-strategy needs --ramp-up-{name}-rps above 0; got {value}")


def _draw_gaps(rates: np.ndarray, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    return rng.gamma(shape=burstiness, scale=1.0 / (rates * burstiness))
