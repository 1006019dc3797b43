"""From clock readings to figures, and when requests are sent."""

import numpy as np
import pytest

from vllm.benchmarks.arrivals import check_rates, make_arrivals, make_ramp_up
from vllm.benchmarks.backends import RequestResult
from vllm.benchmarks.metrics import compute_metrics, read_goodput, read_metric_names, read_percentiles
from vllm.exceptions import VLLMValidationError


def make_result(start: float, gaps: list[float], *, prompt_len: int = 10, tokens: int | None = None) -> RequestResult:
    times = [start + sum(gaps[: i + 1]) for i in range(len(gaps))]
    return RequestResult(
        prompt_len,
        started_at=start,
        first_at=times[0],
        last_at=times[-1],
        itls=gaps[1:],
        token_times=times,
        num_choices=1,
        output_len=len(gaps) if tokens is None else tokens,
    )


def test_figures_by_hand() -> None:
    results = [
        make_result(100.0, [0.1, 0.2, 0.2]),
        make_result(100.2, [0.3, 0.4, 0.4], prompt_len=20),
        RequestResult(99, started_at=100.0, error="refused"),
    ]
    found = compute_metrics(
        results,
        2.0,
        metrics=("ttft", "tpot", "itl", "e2el"),
        percentiles=(50, 99.9),
        goodput={"ttft": 200, "e2el": 600},
    )
    wanted = {
        "duration": 2.0, "completed": 2, "failed": 1, "total_input_tokens": 30, "total_output_tokens": 6,
        "request_throughput": 1.0, "request_goodput": 0.5, "output_throughput": 3.0, "total_token_throughput": 18.0,
        "max_output_tokens_per_s": 5.0, "max_concurrent_requests": 2,
        "mean_ttft_ms": 200.0, "median_ttft_ms": 200.0, "std_ttft_ms": 100.0, "p50_ttft_ms": 200.0,
        "p99.9_ttft_ms": 299.8,
        "mean_tpot_ms": 300.0, "mean_itl_ms": 300.0, "std_itl_ms": 100.0, "mean_e2el_ms": 800.0, "p50_e2el_ms": 800.0,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


def test_failures_alone_give_figures_too() -> None:
    found = compute_metrics([RequestResult(1, error="x")], 1.0, metrics=("ttft", "itl"), percentiles=(99,))
    assert (found["completed"], found["failed"], found["p99_itl_ms"], found["max_output_tokens_per_s"]) == (0, 1, 0, 0)
    assert found["request_goodput"] is None


def test_merged_events_weigh_what_they_hold() -> None:
    found = compute_metrics([make_result(0.0, [0.1, 0.1], tokens=8)], 1.0, metrics=(), percentiles=())
    assert found["max_output_tokens_per_s"] == 8.0


def test_requests_that_follow_each_other_are_not_at_once() -> None:
    results = [make_result(0.0, [1.0]), make_result(1.0, [1.0]), make_result(1.5, [0.1])]
    assert compute_metrics(results, 2.0, metrics=(), percentiles=())["max_concurrent_requests"] == 2


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (read_metric_names, "ttft,latency"),
        (read_percentiles, "99,x"),
        (read_percentiles, "101"),
        (read_goodput, ["ttft=5"]),
        (read_goodput, ["itl:5"]),
        (read_goodput, ["ttft:-1"]),
    ],
)
def test_a_bad_report_flag_is_refused_by_name(read, value) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(VLLMValidationError, match="--"):
        read(value)


# ---------------------------------------------------------------- arrivals


def test_all_at_once_is_all_at_the_start() -> None:
    assert make_arrivals(3, float("inf"), 1.0, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gaps_have_the_rate_and_the_shape(burstiness: float) -> None:
    arrivals = make_arrivals(4000, 8.0, burstiness, np.random.default_rng(0))
    gaps = np.diff([0.0, *arrivals])
    assert arrivals[-1] == pytest.approx(500.0), "every seed has the same load"
    assert (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_seed_repeats_the_times() -> None:
    first, again, other = (make_arrivals(9, 2.0, 1.0, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_begins_and_ends_at_its_rates(strategy: str) -> None:
    arrivals = make_ramp_up(4000, strategy, 2.0, 50.0, 100.0, np.random.default_rng(0))
    gaps = np.diff([0.0, *arrivals])
    assert 1 / gaps[:50].mean() == pytest.approx(2.0, rel=0.35)
    assert 1 / gaps[-50:].mean() == pytest.approx(50.0, rel=0.1)
    assert len(make_ramp_up(1, strategy, 1.0, 2.0, 1.0, np.random.default_rng(0))) == 1


@pytest.mark.parametrize(
    ("rate", "burstiness", "ramp"),
    [
        (0.0, 1.0, (None, None, None)),
        (float("nan"), 1.0, (None, None, None)),
        (1.0, 0.0, (None, None, None)),
        (1.0, 1.0, ("linear", 1.0, 2.0)),
        (float("inf"), 1.0, ("linear", None, 2.0)),
        (float("inf"), 1.0, (None, 1.0, None)),
    ],
)
def test_rates_that_mean_nothing_are_refused(rate: float, burstiness: float, ramp: tuple) -> None:
    with pytest.raises(VLLMValidationError, match="--"):
        check_rates(rate, burstiness, ramp)
