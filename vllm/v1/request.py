"""One sequence's life in the core.

A family (one prompt, n children) is a single `Request` with n seeds until its prompt is computed; the fork turns it
into n requests with a seed each. A family of one is simply a request.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.logprobs.block import WholeRows
from vllm.sampling_params import SamplingParams
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RowRange, make_child_id

# Requests are ordered by it, lowest first: in the queue, in a step, and (from behind) when memory must be found.
Precedence = tuple[float, ...]


class RequestStatus(enum.Enum):
    """Where a request stands; a preempted one waits again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Ending(NamedTuple):
    """Why a sequence ends; `stop_reason` is the stop token's id, unless that is the model's own end token."""

    finish_reason: FinishReason
    stop_reason: int | None = None


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
    num_scored: int  # leading prompt tokens whose scores are not pending (any more): at least token 0
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
    has_metadata: bool = True  # its next output reports more than tokens and their logprobs
    has_own_rows: bool = False  # its logprobs come in blocks of their own
    end_token_ids: frozenset[int] = field(init=False)  # may end it, unless min_tokens holds them back
    wants_rows: bool = field(init=False)  # logprobs of its generated tokens
    # kept by the KV cache manager
    block_ids: list[int] = field(default_factory=list)
    block_hashes: tuple[bytes, ...] = ()  # of its leading full blocks, as far as anyone asked
    num_cached_blocks: int = 0  # leading blocks of the table that the prefix cache knows
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
        each row that a pending prompt score needs (token i is scored by row i − 1).
        """
        if self.has_pending_scores and not self.keeps_scores:
            return self.num_scored - 1
        return self.max_positions if self.is_score_only else self.num_tokens - 1

    @property
    def has_pending_scores(self) -> bool:
        return self.num_scored < self.num_prompt_tokens

    def get_token_ids(self, first: int, end: int) -> list[int]:
        """Return the tokens at positions first … end − 1."""
        num_prompt = self.num_prompt_tokens
        if first >= num_prompt:
            return self.output_token_ids[first - num_prompt : end - num_prompt]
        from_prompt = self.message.prompt_token_ids[first:end]
        return from_prompt + self.output_token_ids[max(0, first - num_prompt) : max(0, end - num_prompt)]

    def find_ending(self) -> Ending | None:
        """Return how the newest token ends the sequence, or None when it goes on.

        Stop strings are the front end's: only it knows the text.
        """
        params = self.message.sampling_params
        token_id = self.output_token_ids[-1]
        if len(self.output_token_ids) >= params.min_tokens:
            if token_id == self.message.eos_token_id and not params.ignore_eos:
                return Ending(FinishReason.STOP)
            if params.stop_token_ids and token_id in params.stop_token_ids:
                return Ending(FinishReason.STOP, token_id)
        # Not held back by min_tokens: max_tokens are there, or the model has no position for a further one.
        return Ending(FinishReason.LENGTH) if self.num_tokens > self.max_positions else None

    def append_run(self, token_ids: list[int]) -> tuple[int, Ending | None]:
        """Append tokens up to the first one that ends the sequence; return how many these are, and the ending."""
        for num_taken, token_id in enumerate(token_ids, 1):
            self.output_token_ids.append(token_id)
            ending = self.find_ending()
            if ending is not None:
                return num_taken, ending
        return len(token_ids), None

    def make_output(
        self, new_token_ids: list[int], rows: RowRange | None = None, full_rows: list[WholeRows] | None = None
    ) -> EngineCoreOutput:
        """Return what a step brought the sequence, and its end if it has come to one."""
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            rows=rows,
            full_rows=full_rows,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=self.num_preemptions,
            scheduled_ts=self.scheduled_ts,
        )

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
