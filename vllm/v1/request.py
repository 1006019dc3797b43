"""One sequence's life in the core.

A family (one prompt, n children) is a single `Request` with n seeds until its prompt is computed; the fork turns it
into n requests with a seed each. A family of one is simply a request.
"""

import enum
from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams
from vllm.v1.messages import EngineCoreRequest, FinishReason, make_child_id

# Requests are ordered by it, lowest first: in the queue, in a step, and (from behind) when memory must be found.
Precedence = tuple[float, ...]


class RequestStatus(enum.Enum):
    """Where a request stands; a preempted one waits again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class SharedBlocks:
    """The prompt's blocks, held once for all children of a fork that have not entered the batch yet."""

    block_ids: list[int]  # fewer, or none, once memory was short; none after the last child took them over
    num_holders: int
    precedence: Precedence


@dataclass(slots=True, eq=False)
class Request:
    """What the core knows about one sequence, or about a family before its fork."""

    message: EngineCoreRequest  # shared by all children
    request_id: str
    seeds: list[int]
    precedence: Precedence
    num_prompt_tokens: int
    max_positions: int  # positions that it can ever write into the KV cache
    num_scored: int  # prompt tokens that are owed no score (any more): at least token 0
    keeps_scores: bool = False  # its blocks keep what prompt logprobs need
    can_read_scores: bool = False  # kept scores have as many alternatives as it asks for
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_scheduled_tokens: int | None = None  # in the step that runs now; None: it has no part in it
    num_cached_tokens: int | None = None  # None until it first enters
    num_preemptions: int = 0
    scheduled_ts: float = 0.0  # time.monotonic() when it first entered
    has_news: bool = True  # its next output tells more than a token
    end_token_ids: frozenset[int] = field(init=False)  # may end it, unless min_tokens holds them back
    wants_rows: bool = field(init=False)  # logprobs of its generated tokens
    # kept by the KV cache manager
    block_ids: list[int] = field(default_factory=list)
    block_hashes: tuple[bytes, ...] = ()  # of its leading full blocks, as far as anyone asked
    num_cached_blocks: int = 0  # leading blocks of the table that the prefix cache was told of
    cache_generation: int = 0
    shared_blocks: SharedBlocks | None = None

    def __post_init__(self) -> None:
        params = self.message.sampling_params
        own_end = [] if params.ignore_eos or self.message.eos_token_id is None else [self.message.eos_token_id]
        self.end_token_ids = frozenset([*own_end, *(params.stop_token_ids or ())])
        self.wants_rows = params.num_logprobs is not None

    @property
    def family_id(self) -> str:
        return self.message.request_id

    @property
    def sampling_params(self) -> SamplingParams:
        return self.message.sampling_params

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def is_score_only(self) -> bool:
        return self.message.sampling_params.max_tokens == 0

    @property
    def num_missing_tokens(self) -> int:
        """Positions to compute before its next token or, when it only scores, before its end."""
        if self.output_token_ids or not self.is_score_only:
            return self.num_prompt_tokens + len(self.output_token_ids) - self.num_computed_tokens
        return self.max_positions - self.num_computed_tokens

    @property
    def num_readable_tokens(self) -> int:
        """Leading positions that may come from the prefix cache.

        The last known token must run, since its row makes the next one; so must, where blocks keep nothing for them,
        each row that a prompt score is owed for (token i is scored by row i − 1).
        """
        if self.owes_scores and not self.keeps_scores:
            return self.num_scored - 1
        return self.max_positions if self.is_score_only else self.num_tokens - 1

    @property
    def owes_scores(self) -> bool:
        return self.num_scored < self.num_prompt_tokens

    def get_token_ids(self, first: int, end: int) -> list[int]:
        """Return the tokens at positions first … end − 1."""
        num_prompt = self.num_prompt_tokens
        if first >= num_prompt:
            return self.output_token_ids[first - num_prompt : end - num_prompt]
        from_prompt = self.message.prompt_token_ids[first:end]
        return from_prompt + self.output_token_ids[max(0, first - num_prompt) : max(0, end - num_prompt)]

    def make_child(self, index: int, shared_blocks: SharedBlocks) -> "Request":
        """Return child `index` of this family, which waits with the prompt computed."""
        return Request(
            message=self.message,
            request_id=make_child_id(self.request_id, index, len(self.seeds)),
            seeds=[self.seeds[index]],
            precedence=(*self.precedence, index),
            num_prompt_tokens=self.num_prompt_tokens,
            max_positions=self.max_positions,
            num_scored=self.num_scored,
            keeps_scores=self.keeps_scores,
            num_computed_tokens=self.num_computed_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            scheduled_ts=self.scheduled_ts,
            block_hashes=self.block_hashes,
            cache_generation=self.cache_generation,
            shared_blocks=shared_blocks,
        )
