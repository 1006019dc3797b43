"""One request's course, as the metrics see it."""

from dataclasses import dataclass

from vllm.v1.messages import EngineCoreRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """One child of a request."""

    family: "Family"
    child_id: str
    num_tokens: int = 0
    last_token_at: float | None = None


class Family:
    """A request and its children. Times are `time.monotonic()`."""

    def __init__(self, core_request: EngineCoreRequest, num_copies: int, now: float) -> None:
        self.request_id = core_request.request_id
        self.arrived_at = now
        self.num_prompt_tokens = len(core_request.prompt_token_ids)
        self.max_tokens = core_request.sampling_params.max_tokens or 0
        self.num_copies = num_copies
        self.sequences = [Sequence(self, child_id) for child_id in core_request.child_ids]
        self.num_open = len(self.sequences)
        self.has_answered = False
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    def measure(self, now: float) -> dict[str, float | None]:
        """Return what is observed once, at a request's end, by its metric's name; None where it has no meaning."""
        counts = [sequence.num_tokens for sequence in self.sequences]
        first, last, begun = self.first_token_at, self.last_token_at, self.scheduled_at
        decode_time = None if first is None or last is None else last - first
        longest = max(counts)
        num_computed = self.num_prompt_tokens - self.num_cached_tokens
        return {
            "e2e_request_latency_seconds": max(now - self.arrived_at, 0.0),
            "request_prompt_tokens": self.num_prompt_tokens,
            "request_generation_tokens": sum(counts) * self.num_copies,
            "request_max_num_generation_tokens": longest,
            "request_params_n": len(counts) * self.num_copies,
            "request_params_max_tokens": self.max_tokens,
            "request_num_preemptions": self.num_preemptions,
            "request_prefill_kv_computed_tokens": num_computed if self.has_answered else None,
            "request_inference_time_seconds": None if begun is None else max(now - begun, 0.0),
            "request_queue_time_seconds": None if begun is None else max(begun - self.arrived_at, 0.0),
            "request_prefill_time_seconds": None if begun is None or first is None else max(first - begun, 0.0),
            "request_decode_time_seconds": decode_time,
            "request_time_per_output_token_seconds": (
                decode_time / (longest - 1) if decode_time is not None and longest > 1 else None
            ),
        }
