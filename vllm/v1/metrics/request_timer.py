"""One request's course, as the metrics see it."""

from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.messages import EngineCoreRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """One child of a request."""

    family: "Family"
    child_id: str
    num_tokens: int = 0
    last_token_at: float | None = None


class Measures(NamedTuple):
    """What is observed once, at a request's end; None where it has no meaning. Times are in seconds."""

    latency: float
    num_prompt_tokens: int
    num_generation_tokens: int  # summed over the children
    most_generation_tokens: int  # of one child
    n: int
    max_tokens: int
    num_preemptions: int
    num_prompt_tokens_computed: int | None
    inference_time: float | None
    queue_time: float | None
    prefill_time: float | None
    decode_time: float | None
    time_per_token: float | None  # of the longest child, without its first


class Family:
    """A request and its children. Times are `time.monotonic()`."""

    __slots__ = (
        "arrived_at",
        "first_token_at",
        "has_answered",
        "last_token_at",
        "max_tokens",
        "num_cached_tokens",
        "num_copies",
        "num_open",
        "num_preemptions",
        "num_prompt_tokens",
        "request_id",
        "scheduled_at",
        "sequences",
    )

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

    def measure(self, now: float) -> Measures:
        """Return what there is to observe at the request's end."""
        counts = [sequence.num_tokens for sequence in self.sequences]
        first, last, begun = self.first_token_at, self.last_token_at, self.scheduled_at
        decode_time = None if first is None or last is None else last - first
        longest = max(counts)
        return Measures(
            latency=max(now - self.arrived_at, 0.0),
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=sum(counts) * self.num_copies,
            most_generation_tokens=longest,
            n=len(counts) * self.num_copies,
            max_tokens=self.max_tokens,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens_computed=self.num_prompt_tokens - self.num_cached_tokens if self.has_answered else None,
            inference_time=None if begun is None else max(now - begun, 0.0),
            queue_time=None if begun is None else max(begun - self.arrived_at, 0.0),
            prefill_time=None if begun is None or first is None else max(first - begun, 0.0),
            decode_time=decode_time,
            time_per_token=decode_time / (longest - 1) if decode_time is not None and longest > 1 else None,
        )
