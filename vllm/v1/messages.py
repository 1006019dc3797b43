"""The messages between layers: everything that crosses a boundary of the engine stands in this file.

    front end ──EngineCoreRequest──▶ EngineCore ──SchedulerOutput──▶ model runner
    front end ◀─EngineCoreOutputs── EngineCore ◀─ModelRunnerOutput── model runner

A message is complete when made; a receiver never edits it. No torch here: the core and the front end
never load it. Arrays are numpy; shapes stand in the margin (dimensions: docs/glossary.md).
"""

import enum
from collections.abc import Container, Iterator
from typing import NamedTuple

import msgspec

from vllm.logprobs.block import LogprobsBlock, WholeRows
from vllm.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a sequence ended; `str()` gives the name that users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


def make_child_id(request_id: str, index: int, num_children: int) -> str:
    """Return the id of child `index` of a family; a family of one keeps its own id."""
    return request_id if num_children == 1 else f"{index}_{request_id}"


# ---------------------------------------------------------------- front end → core


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and the n children that will continue it: a family travels as one message.

    `sampling_params` is resolved by the input processor: `max_tokens` is a number, `logprobs` and
    `prompt_logprobs` are None or from 0 to the vocabulary's size (−1 is gone), `logprobs_mode` is set,
    `stop_token_ids` holds the generation config's further end tokens too. Nobody edits it afterwards.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seeds: list[int]  # one 64-bit seed a child, always set; len(seeds) is n
    eos_token_id: int | None = None  # ends a sequence unless ignore_eos
    min_tokens_stop_ids: list[int] = []  # masked until min_tokens is reached
    bad_words_token_ids: list[list[int]] = []
    arrival_time: float = 0.0  # time.time()
    priority: int = 0  # lower runs first (priority policy)
    cache_salt: str | None = None

    @property
    def child_ids(self) -> list[str]:
        n = len(self.seeds)
        return [make_child_id(self.request_id, i, n) for i in range(n)]


class EngineCoreReady(msgspec.Struct, frozen=True, kw_only=True):
    """What the core settles at start-up and the front end must know."""

    num_gpu_blocks: int  # KV blocks, whatever the device
    max_model_len: int
    dtype: str
    device: str
    num_threads: int
    weights_bytes: int = 0


# ---------------------------------------------------------------- core → model runner


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters the runner's batch: new, a child after its fork, or back from preemption."""

    request_id: str
    token_ids: list[int]  # prompt, then what was generated so far
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]  # the whole table, blocks for this step included
    sampling_params: SamplingParams
    seeds: list[int]  # draws from the next sampled row: several for a family, else one
    min_tokens_stop_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []


class RunningRequests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that stay in the runner's batch and run in this step (columns of one table)."""

    request_ids: list[str]
    new_block_ids: list[list[int]]  # appended to each one's table
    num_computed_tokens: list[int]


class BlockCopy(NamedTuple):
    """Copy the K and V of block `source` into block `target`, in every layer, before this step's writes."""

    source: int
    target: int


class PromptRange(NamedTuple):
    """Score the prompt tokens at positions first … end − 1 (token i by the row of position i − 1)."""

    first: int
    end: int


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One step's work.

    A request is sampled from when num_computed_tokens + num_scheduled_tokens equals the number of its tokens. One with
    0 scheduled tokens runs no position: its prompt scores come from what its blocks keep.
    `left_request_ids` leave the batch before anything else happens: finished, aborted, preempted or forked.
    `decode_batch_id` is set when all requests of the batch run one position each, are sampled from, and have nothing
    else to report than a token and its logprobs. One that equals the last step's says that they are the same requests
    in the same order, each one position further.
    """

    new_requests: list[NewRequest]
    running: RunningRequests
    num_scheduled_tokens: dict[str, int]  # every request that runs in this step
    total_num_scheduled_tokens: int
    prompt_ranges: dict[str, PromptRange]  # the prompt tokens to score in this step
    known_scores: dict[str, list[PromptRange]] = {}  # those among them whose scores their blocks keep, in order
    left_request_ids: list[str]
    block_copies: list[BlockCopy]
    decode_batch_id: int | None = None


# ---------------------------------------------------------------- model runner → core


class RowRange(NamedTuple):
    """Rows first … end − 1 of a step's block of logprobs."""

    first: int
    end: int


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What a step sampled, a row a draw (columns of one table); a request's draws are neighbours.

    `token_ids[i]` is a run of at least one token, each of which follows the one before. `rows[i]` has a row of logprobs
    a token: of the step's block, or of the request's own in `full_sample_rows`. In steps of one decode batch
    `request_ids`, `draws` and `rows` are always the same.
    """

    request_ids: list[str] = []
    draws: list[int] = []  # which of the request's seeds, in rising order
    token_ids: list[list[int]] = []
    rows: list[RowRange | None] = []  # None: asked for no logprobs


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step made. A request that failed (NaN or +inf logits) is in `errors` and nowhere else.

    Rows of whole-vocabulary requests are not in `logprobs`: they leave in pieces of their own.
    """

    sampled: SampledTokens = SampledTokens()
    logprobs: LogprobsBlock | None = None
    prompt_rows: dict[str, RowRange] = {}  # request id → a row a scored prompt token
    full_sample_rows: dict[str, list[WholeRows]] = {}
    full_prompt_rows: dict[str, list[WholeRows]] = {}
    errors: dict[str, str] = {}  # request id → what was wrong with its logits
    num_nan_rows: int = 0


# ---------------------------------------------------------------- core → front end


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step brought one sequence (a child, or a family of one)."""

    request_id: str
    new_token_ids: list[int]
    rows: RowRange | None = None  # its rows in EngineCoreOutputs.logprobs, one a new token
    full_rows: list[WholeRows] | None = None  # in their place for the whole vocabulary
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it
    error: str | None = None  # with FinishReason.ERROR
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    num_preemptions: int = 0
    scheduled_ts: float = 0.0  # time.monotonic() when its request first ran; 0.0: not reported here


class DecodeBatchTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One token each for sequences that have nothing else to report: most, in most steps (columns of one table).

    Sequence i has row `rows[i]` of EngineCoreOutputs.logprobs; those behind the end of `rows` asked for none.
    A batch_id that equals the last step's says: the same sequences in the same order, with the same rows.
    """

    request_ids: list[str]
    token_ids: list[int]
    rows: list[int]
    batch_id: int | None = None  # None: the next step has other sequences, or other rows

    def select(self, first: int, end: int) -> "DecodeBatchTokens":
        """Return sequences first … end − 1."""
        return DecodeBatchTokens(
            request_ids=self.request_ids[first:end], token_ids=self.token_ids[first:end], rows=self.rows[first:end]
        )

    def without(self, places: Container[int]) -> "DecodeBatchTokens":
        """Return all sequences but those at these places."""
        kept = [place for place in range(len(self.request_ids)) if place not in places]
        return DecodeBatchTokens(
            request_ids=[self.request_ids[place] for place in kept],
            token_ids=[self.token_ids[place] for place in kept],
            rows=[self.rows[place] for place in kept if place < len(self.rows)],
        )

    def iter_outputs(self) -> Iterator[EngineCoreOutput]:
        """Yield the same as outputs; what those report once (cached tokens, preemptions, times) is not in them."""
        for i, (request_id, token_id) in enumerate(zip(self.request_ids, self.token_ids, strict=True)):
            rows = RowRange(self.rows[i], self.rows[i] + 1) if i < len(self.rows) else None
            yield EngineCoreOutput(request_id=request_id, new_token_ids=[token_id], rows=rows)


class PromptScores(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt rows of one request (a family's belong to the parent), next in order after those sent before."""

    request_id: str
    rows: RowRange | None = None
    full_rows: list[WholeRows] | None = None


class SchedulerStats(msgspec.Struct, kw_only=True):
    """Gauges after a step, and counters since start-up (the scheduler counts in one of its own, and sends copies).

    Positions and rows count when their step has run.
    """

    num_running: int = 0
    num_waiting: int = 0  # sequences: a family that waits counts its n children
    num_used_blocks: int = 0
    num_blocks: int = 0
    num_computed_positions: int = 0  # positions that ran through the model
    num_preemptions: int = 0
    num_prefix_queries: int = 0  # tokens
    num_prefix_hits: int = 0  # tokens
    num_nan_rows: int = 0
    num_scored_sample_rows: int = 0
    num_scored_prompt_rows: int = 0  # that passed the LM head
    num_cached_prompt_rows: int = 0  # whose scores came from the prefix cache


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step has for the front end. `logprobs` is one block a step: copy your rows out."""

    outputs: list[EngineCoreOutput]
    prompt_scores: list[PromptScores]
    decode_batch: DecodeBatchTokens | None = None  # the sequences that are not in `outputs`
    logprobs: LogprobsBlock | None = None
    stats: SchedulerStats | None = None
    timestamp: float = 0.0  # time.monotonic() at the step's end

    def list_outputs(self) -> list[EngineCoreOutput]:
        """Return what the step brought each sequence, those of the decode batch included."""
        return self.outputs + ([] if self.decode_batch is None else list(self.decode_batch.iter_outputs()))
