"""How requests are counted: once each, whatever their n."""

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm.sampling_params import SamplingParams
from vllm.v1.messages import (
    DecodeBatchTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
    make_child_id,
)
from vllm.v1.metrics.prometheus import EngineMetrics, make_token_buckets


class Engine:
    """Tells the metrics what an engine would."""

    def __init__(self, uses_table: bool = False) -> None:
        self.metrics = EngineMetrics("m", 2048)
        self.now = time.monotonic()
        self.uses_table = uses_table
        self.has_spoken: set[str] = set()

    def _just_goes_on(self, name: str, count: int, reason: Any) -> bool:
        return self.uses_table and name in self.has_spoken and count == 1 and reason is None

    def add(self, request_id: str, n: int = 1, num_prompt: int = 4, num_copies: int = 1, max_tokens: int = 9) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(range(num_prompt)),
            sampling_params=params,
            seeds=list(range(n)),
        )
        self.metrics.add_request(request, num_copies)

    def step(
        self,
        outputs: dict[str, Any],
        stopped: tuple[str, ...] = (),
        seconds: float = 1.0,
        scheduled_ts: float = 0.0,
        **stats: int,
    ) -> None:
        """`outputs`: sequence → (number of new tokens, finish reason)."""
        self.now += seconds
        made = [
            EngineCoreOutput(
                request_id=name,
                new_token_ids=[7] * count,
                finish_reason=reason,
                num_cached_tokens=1,
                num_preemptions=2,
                scheduled_ts=scheduled_ts,
            )
            for name, (count, reason) in outputs.items()
            if not self._just_goes_on(name, count, reason)
        ]
        names = [name for name, (count, reason) in outputs.items() if self._just_goes_on(name, count, reason)]
        table = DecodeBatchTokens(request_ids=names, token_ids=[7] * len(names), rows=[]) if names else None
        self.has_spoken.update(outputs)
        self.metrics.record_step(
            EngineCoreOutputs(
                outputs=made,
                prompt_scores=[],
                decode_batch=table,
                stats=SchedulerStats(**stats) if stats else None,
                timestamp=self.now,
            ),
            stopped,
        )

    def read(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.metrics.render().decode()):
            for sample in family.samples:
                if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        raise AssertionError(f"there is no {name} {labels}")


@pytest.fixture(params=[False, True], ids=["outputs", "table"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


def test_a_family_counts_once_and_its_tokens_are_summed(engine: Engine) -> None:
    engine.add("f", n=3)
    children = [make_child_id("f", i, 3) for i in range(3)]
    engine.step(dict.fromkeys(children, (1, None)))
    engine.step({children[0]: (1, FinishReason.STOP), children[1]: (1, None), children[2]: (1, None)})
    assert engine.read("request_success_total", finished_reason="stop") == 0, "two children still run"
    engine.step({children[1]: (1, None), children[2]: (1, FinishReason.LENGTH)})
    engine.step({children[1]: (1, FinishReason.LENGTH)})
    assert engine.read("generation_tokens_total") == 2 + 4 + 3
    assert engine.read("prompt_tokens_total") == 4 and engine.read("prompt_tokens_cached_total") == 1
    assert engine.read("request_success_total", finished_reason="length") == 1
    assert engine.read("request_success_total", finished_reason="stop") == 0
    for name in ("e2e_request_latency_seconds", "request_params_n", "time_to_first_token_seconds"):
        assert engine.read(f"{name}_count") == 1, name
    assert engine.read("request_params_n_sum") == 3
    assert engine.read("request_generation_tokens_sum") == 9
    assert engine.read("request_max_num_generation_tokens_sum") == 4
    assert engine.read("inter_token_latency_seconds_count") == 1 + 3 + 2, "each child has its own gaps"
    assert engine.read("request_time_per_output_token_seconds_sum") == pytest.approx(1.0)
    assert engine.read("request_num_preemptions_sum") == 2


def test_greedy_copies_count_as_choices_of_one_request(engine: Engine) -> None:
    engine.add("g", num_copies=4)
    engine.step({"g": (1, None)})
    engine.step({"g": (1, FinishReason.LENGTH)})
    assert engine.read("generation_tokens_total") == 8
    assert engine.read("request_params_n_sum") == 4
    assert engine.read("request_max_num_generation_tokens_sum") == 2


def test_a_stop_string_ends_a_sequence_that_the_core_would_go_on_with(engine: Engine) -> None:
    engine.add("s")
    engine.step({"s": (1, None)}, stopped=("s",))
    assert engine.read("request_success_total", finished_reason="stop") == 1
    engine.metrics.abort_requests(["s"])
    assert engine.read("request_success_total", finished_reason="abort") == 0


def test_an_abort_counts_once(engine: Engine) -> None:
    engine.add("f", n=3)
    engine.step({"0_f": (1, None), "1_f": (1, None), "2_f": (1, FinishReason.STOP)})
    engine.metrics.abort_requests(["f"])
    engine.metrics.abort_requests(["f", "0_f"])
    assert engine.read("request_success_total", finished_reason="abort") == 1
    assert engine.read("e2e_request_latency_seconds_count") == 1
    engine.step({"0_f": (1, None)})
    assert engine.read("generation_tokens_total") == 3, "what was in flight is not counted"


@pytest.mark.parametrize("name", ["f", "1_f"], ids=["before the fork", "after it"])
def test_an_error_of_one_child_is_the_parents(engine: Engine, name: str) -> None:
    engine.add("f", n=2)
    engine.step({name: (0, FinishReason.ERROR)})
    assert engine.read("request_success_total", finished_reason="error") == 1
    engine.step({"0_f": (1, FinishReason.STOP)})
    assert engine.read("request_success_total", finished_reason="stop") == 0


def test_a_request_waits_then_reads_its_prompt_then_generates(engine: Engine) -> None:
    engine.add("a")
    started = engine.now
    engine.step({"a": (1, None)}, seconds=3.0, scheduled_ts=started + 2.0)
    engine.step({"a": (1, FinishReason.LENGTH)}, seconds=4.0)
    for name, seconds in (("queue", 2.0), ("prefill", 1.0), ("decode", 4.0), ("inference", 5.0)):
        assert engine.read(f"request_{name}_time_seconds_sum") == pytest.approx(seconds, abs=0.1), name


def test_scoring_only_succeeds_without_a_first_token(engine: Engine) -> None:
    engine.add("p", max_tokens=0)
    engine.step({"p": (0, FinishReason.LENGTH)})
    assert engine.read("request_success_total", finished_reason="length") == 1
    assert engine.read("time_to_first_token_seconds_count") == 0
    assert engine.read("request_time_per_output_token_seconds_count") == 0


def test_gauges_follow_and_counters_grow_by_what_is_new(engine: Engine) -> None:
    first = {"num_running": 3, "num_waiting": 5, "num_used_blocks": 5, "num_blocks": 10, "num_computed_positions": 100}
    engine.step({}, **first, num_nan_rows=1, num_scored_sample_rows=4, num_scored_prompt_rows=9)
    engine.step({}, **first | {"num_running": 1, "num_waiting": 0, "num_computed_positions": 130}, num_nan_rows=1)
    assert engine.read("num_requests_running") == 1 and engine.read("num_requests_waiting") == 0
    assert engine.read("kv_cache_usage_perc") == 0.5
    assert engine.read("computed_positions_total") == 130 and engine.read("nan_logits_total") == 1
    assert engine.read("logprobs_positions_scored_total", kind="sample") == 4
    assert engine.read("logprobs_positions_scored_total", kind="prompt") == 9
    assert engine.read("iteration_tokens_total_count") == 2 and engine.read("iteration_tokens_total_sum") == 130


def test_nothing_of_an_ended_request_is_kept(engine: Engine) -> None:
    for i in range(5):
        engine.add(str(i), n=2)
    for i in range(5):
        engine.step({f"0_{i}": (1, FinishReason.STOP), f"1_{i}": (1, FinishReason.LENGTH)})
    assert not engine.metrics._families and not engine.metrics._sequences


def test_labels_and_states(engine: Engine) -> None:
    assert engine.read("num_requests_running", model_name="m", engine="0") == 0
    engine.metrics.set_sleep_state("discard_all")
    assert engine.read("engine_sleep_state", sleep_state="discard_all") == 1
    assert engine.read("engine_sleep_state", sleep_state="awake") == 0
    engine.metrics.count_rejection("max_num_queued_reqs")
    assert engine.read("admission_rejections_total", reason="max_num_queued_reqs") == 1
    engine.metrics.set_cache_config(block_size=16, num_gpu_blocks=10)
    assert engine.read("cache_config_info", block_size="16") == 1


def test_the_log_line_tells_rates_and_is_silent_when_nothing_runs(engine: Engine) -> None:
    assert engine.metrics.format_log_line() is None
    engine.add("a", num_prompt=100)
    engine.step({"a": (1, None)}, num_running=1, num_blocks=10, num_used_blocks=1, num_waiting=2)
    line = engine.metrics.format_log_line()
    assert line is not None and "Running: 1 reqs" in line and "Waiting: 2 reqs" in line and "10.0%" in line


def test_token_buckets_reach_up_to_the_models_length() -> None:
    assert make_token_buckets(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert make_token_buckets(1) == [1]
