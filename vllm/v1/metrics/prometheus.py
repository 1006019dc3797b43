"""What the engine counts, in Prometheus' form.

A request counts once, whatever its n: prompt tokens, latency, time to first token (its first child's), success. Tokens
that were generated are summed over the children; the time between two tokens is a child's own; gauges count sequences.
"""

import itertools
import time
from collections.abc import Collection, Iterable
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from vllm.v1.messages import (
    DecodeBatchTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from vllm.v1.metrics.request_timer import Family, Sequence

CONTENT_TYPE = CONTENT_TYPE_LATEST

LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN_TOKENS_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
STEP_BUCKETS = (1, *(2**i for i in range(3, 15)))
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")

# counter → the field of SchedulerStats that it follows
_FOLLOWED = {
    "prefix_cache_queries": ("num_prefix_queries", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("num_prefix_hits", "prompt tokens found in the prefix cache"),
    "num_preemptions": ("num_preemptions", "times a sequence lost its place for lack of memory"),
    "computed_positions": ("num_computed_positions", "positions that ran through the model"),
    "nan_logits": ("num_nan_rows", "rows of logits that were NaN or +inf"),
}


def make_token_buckets(largest: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, … up to `largest`."""
    buckets: list[int] = []
    for power in itertools.count():
        for digit in (1, 2, 5):
            if (bucket := digit * 10**power) > largest:
                return buckets or [1]
            buckets.append(bucket)
    raise AssertionError("unreachable")


class EngineMetrics:
    """The metrics of one engine, updated by each request and each step."""

    def __init__(self, model_name: str, max_model_len: int, *, engine: str = "0") -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._labels = {"model_name": model_name, "engine": engine}
        self._families: dict[str, Family] = {}
        self._sequences: dict[str, Sequence] = {}
        self._last_stats = SchedulerStats()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._logged: tuple[float, int, int] = (time.monotonic(), 0, 0)
        self._make_gauges()
        self._make_counters(model_name)
        self._make_histograms(make_token_buckets(max_model_len))

    # ------------------------------------------------------------ what happens

    def add_request(self, core_request: EngineCoreRequest, num_copies: int = 1) -> None:
        """Take note of an admitted request; `num_copies` answers are made of each of its sequences (greedy n > 1)."""
        family = Family(core_request, num_copies, time.monotonic())
        self._families[core_request.request_id] = family
        self._sequences.update({sequence.child_id: sequence for sequence in family.sequences})

    def record_step(self, outputs: EngineCoreOutputs, stopped_ids: Collection[str] = ()) -> None:
        """Take note of a step; `stopped_ids` are sequences that a stop string ended in it."""
        now = outputs.timestamp or time.monotonic()
        for output in outputs.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is not None:
                self._record_output(sequence, output, now, output.request_id in stopped_ids)
            elif (family := self._families.get(output.request_id)) is not None and output.finish_reason is not None:
                self._end_family(family, str(output.finish_reason), now)
        if outputs.decode_batch is not None:
            self._record_decode_batch(outputs.decode_batch, now, stopped_ids)
        if outputs.stats is not None:
            self._record_stats(outputs.stats)

    def abort_requests(self, ids: Iterable[str]) -> None:
        """Take note that requests (or single sequences of them) were aborted."""
        now = time.monotonic()
        for request_id in ids:
            if (family := self._families.get(request_id)) is not None:
                self._end_family(family, "abort", now)
            elif (sequence := self._sequences.get(request_id)) is not None:
                self._end_sequence(sequence, "abort", now)

    def count_rejection(self, reason: str) -> None:
        """Take note of a request that a queue limit refused."""
        self._rejections[reason].inc()

    def set_sleep_state(self, state: str) -> None:
        """Take note whether the engine sleeps, and how deeply."""
        for name, gauge in self._sleep_states.items():
            gauge.set(name == state)

    def set_cache_config(self, **labels: Any) -> None:
        """Set the configuration of the KV cache, once."""
        shown = {**{name: str(value) for name, value in labels.items()}, "engine": self._labels["engine"]}
        gauge = Gauge("vllm:cache_config_info", "the KV cache's configuration", list(shown), registry=self.registry)
        gauge.labels(**shown).set(1)

    # ------------------------------------------------------------ output

    def render(self) -> bytes:
        """Return everything in Prometheus' text form."""
        return generate_latest(self.registry)

    def format_log_line(self) -> str | None:
        """Return a line about the time since the last call; None when nothing ran and nothing waits."""
        now, stats = time.monotonic(), self._last_stats
        then, old_prompt, old_generation = self._logged
        self._logged = (now, self._num_prompt_tokens, self._num_generation_tokens)
        num_prompt, num_generation = self._num_prompt_tokens - old_prompt, self._num_generation_tokens - old_generation
        if not (num_prompt or num_generation or stats.num_running or stats.num_waiting):
            return None
        seconds = max(now - then, 1e-9)
        hit_rate = stats.num_prefix_hits / max(stats.num_prefix_queries, 1)
        return (
            f"Engine {self._labels['engine']:0>3}: Avg prompt throughput: {num_prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {num_generation / seconds:.1f} tokens/s, Running: {stats.num_running} reqs, "
            f"Waiting: {stats.num_waiting} reqs, KV cache usage: {_usage(stats):.1%}, "
            f"Prefix cache hit rate: {hit_rate:.1%}"
        )

    # ------------------------------------------------------------ steps of the above

    def _record_output(self, sequence: Sequence, output: EngineCoreOutput, now: float, is_stopped: bool) -> None:
        family = sequence.family
        if not family.has_answered:
            family.has_answered = True
            family.num_cached_tokens = output.num_cached_tokens
            family.scheduled_at = output.scheduled_ts or None
            self._record_prompt(family)
        family.num_preemptions = max(family.num_preemptions, output.num_preemptions)
        if num_new := len(output.new_token_ids):
            if family.first_token_at is None:
                family.first_token_at = now
                self._first_token.observe(max(now - family.arrived_at, 0.0))
            elif sequence.last_token_at is not None:
                for _ in range(num_new):
                    self._between_tokens.observe(max(now - sequence.last_token_at, 0.0) / num_new)
            sequence.last_token_at = family.last_token_at = now
            sequence.num_tokens += num_new
            self._num_generation_tokens += num_new * family.num_copies
            self._generation_tokens.inc(num_new * family.num_copies)
        if output.finish_reason is FinishReason.ERROR:
            self._end_family(family, "error", now)
        elif output.finish_reason is not None:
            self._end_sequence(sequence, str(output.finish_reason), now)
        elif is_stopped:
            self._end_sequence(sequence, "stop", now)

    def _record_decode_batch(self, batch: DecodeBatchTokens, now: float, stopped_ids: Collection[str]) -> None:
        num_tokens = 0
        for request_id in batch.request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is None:
                continue
            family = sequence.family
            if sequence.last_token_at is not None:
                self._between_tokens.observe(max(now - sequence.last_token_at, 0.0))
            sequence.last_token_at = family.last_token_at = now
            sequence.num_tokens += 1
            num_tokens += family.num_copies
            if request_id in stopped_ids:
                self._end_sequence(sequence, "stop", now)
        self._num_generation_tokens += num_tokens
        self._generation_tokens.inc(num_tokens)

    def _record_prompt(self, family: Family) -> None:
        self._num_prompt_tokens += family.num_prompt_tokens
        self._prompt_tokens.inc(family.num_prompt_tokens)
        self._prompt_tokens_cached.inc(family.num_cached_tokens)
        self._prompt_sources["local_cache_hit"].inc(family.num_cached_tokens)
        self._prompt_sources["local_compute"].inc(max(family.num_prompt_tokens - family.num_cached_tokens, 0))

    def _end_sequence(self, sequence: Sequence, reason: str, now: float) -> None:
        if self._sequences.pop(sequence.child_id, None) is None:
            return
        sequence.family.num_open -= 1
        if sequence.family.num_open == 0:
            self._end_family(sequence.family, reason, now)

    def _end_family(self, family: Family, reason: str, now: float) -> None:
        if self._families.pop(family.request_id, None) is None:
            return
        for sequence in family.sequences:
            self._sequences.pop(sequence.child_id, None)
        self._finished[reason].inc()
        for name, value in family.measure(now).items():
            if value is not None:
                self._of_requests[name].observe(value)

    def _record_stats(self, stats: SchedulerStats) -> None:
        last, self._last_stats = self._last_stats, stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_for_capacity.set(stats.num_waiting)
        self._kv_usage.set(_usage(stats))
        for counter, field in self._followed:
            counter.inc(max(getattr(stats, field) - getattr(last, field), 0))
        if (num_computed := stats.num_computed_positions - last.num_computed_positions) > 0:
            self._step_tokens.observe(num_computed)

    # ------------------------------------------------------------ the metrics themselves

    def _make(self, kind: Any, name: str, text: str, labels: dict[str, str] | None = None, **options: Any) -> Any:
        labels = self._labels if labels is None else labels
        metric = kind(f"vllm:{name}", text, list(labels), registry=self.registry, **options)
        return metric.labels(**labels)

    def _make_each(self, kind: Any, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Any]:
        metric = kind(f"vllm:{name}", text, [*self._labels, label], registry=self.registry)
        return {value: metric.labels(**self._labels, **{label: value}) for value in values}

    def _make_gauges(self) -> None:
        self._running = self._make(Gauge, "num_requests_running", "sequences in the batch")
        self._waiting = self._make(Gauge, "num_requests_waiting", "sequences that wait for a place in the batch")
        by_reason = self._make_each(
            Gauge,
            "num_requests_waiting_by_reason",
            "sequences that wait, by reason",
            "reason",
            ("capacity", "deferred"),
        )
        self._waiting_for_capacity = by_reason["capacity"]
        self._kv_usage = self._make(Gauge, "kv_cache_usage_perc", "share of the KV blocks in use, from 0 to 1")
        self._sleep_states = self._make_each(
            Gauge, "engine_sleep_state", "1 for the state that the engine is in", "sleep_state", SLEEP_STATES
        )
        self.set_sleep_state("awake")

    def _make_counters(self, model_name: str) -> None:
        self._followed = [(self._make(Counter, name, text), field) for name, (field, text) in _FOLLOWED.items()]
        text, kinds = "positions that were scored for logprobs", ("sample", "prompt")
        scored = self._make_each(Counter, "logprobs_positions_scored", text, "kind", kinds)
        self._followed += [(scored["sample"], "num_scored_sample_rows"), (scored["prompt"], "num_scored_prompt_rows")]
        cached = self._make(
            Counter, "prompt_logprobs_cached_positions", "prompt positions whose scores came from the prefix cache"
        )
        self._followed.append((cached, "num_cached_prompt_rows"))
        for what in ("external_prefix_cache", "mm_cache"):  # not here; dashboards ask for them
            self._make(Counter, f"{what}_queries", "always 0")
            self._make(Counter, f"{what}_hits", "always 0")
        self._prompt_tokens = self._make(Counter, "prompt_tokens", "prompt tokens, each request's once")
        self._prompt_tokens_cached = self._make(Counter, "prompt_tokens_cached", "prompt tokens that were cached")
        self._prompt_sources = self._make_each(
            Counter,
            "prompt_tokens_by_source",
            "prompt tokens, by where their keys and values came from",
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )
        self._generation_tokens = self._make(Counter, "generation_tokens", "generated tokens, summed over children")
        self._finished = self._make_each(
            Counter, "request_success", "requests that ended, by reason", "finished_reason", FINISH_REASONS
        )
        rejections = Counter(
            "vllm:admission_rejections",
            "requests refused by a queue limit",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._rejections = {reason: rejections.labels(model_name, reason) for reason in REJECTION_REASONS}

    def _make_histograms(self, token_buckets: list[int]) -> None:
        def make(name: str, text: str, buckets: Any) -> Any:
            return self._make(Histogram, name, text, buckets=buckets)

        self._step_tokens = make("iteration_tokens_total", "positions computed in a step", STEP_BUCKETS)
        self._first_token = make(
            "time_to_first_token_seconds", "from a request's arrival to its first token", FIRST_TOKEN_BUCKETS
        )
        self._between_tokens = make(
            "inter_token_latency_seconds", "between two tokens of a sequence", BETWEEN_TOKENS_BUCKETS
        )
        of_requests = [  # what `Family.measure` returns
            ("e2e_request_latency_seconds", "from arrival to the last token", LATENCY_BUCKETS),
            ("request_prompt_tokens", "prompt tokens of a request", token_buckets),
            ("request_generation_tokens", "generated tokens of a request, its children summed", token_buckets),
            ("request_max_num_generation_tokens", "generated tokens of a request's longest child", token_buckets),
            ("request_params_n", "n of a request", N_BUCKETS),
            ("request_params_max_tokens", "max_tokens of a request", token_buckets),
            ("request_num_preemptions", "preemptions of a request", PREEMPTION_BUCKETS),
            ("request_prefill_kv_computed_tokens", "prompt tokens that were not cached", token_buckets),
            ("request_inference_time_seconds", "from a request's first place to its end", LATENCY_BUCKETS),
            ("request_queue_time_seconds", "from arrival to a request's first place in a batch", LATENCY_BUCKETS),
            ("request_prefill_time_seconds", "from a request's first place to its first token", LATENCY_BUCKETS),
            ("request_decode_time_seconds", "from a request's first token to its last", LATENCY_BUCKETS),
            ("request_time_per_output_token_seconds", "decode time for each token after the first",
                 BETWEEN_TOKENS_BUCKETS),
        ]  # fmt: skip
        self._of_requests = {name: make(name, text, buckets) for name, text, buckets in of_requests}


def _usage(stats: SchedulerStats) -> float:
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
