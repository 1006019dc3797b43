"""One step's `SchedulerOutput` while it is being put together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.core.pending_prompt_logprobs import PendingPromptLogprobs
from vllm.v1.core.sched.decode_batch import DecodeBatch
from vllm.v1.messages import BlockCopy, NewRequest, PromptRange, RunningRequests, SchedulerOutput
from vllm.v1.request import Request


@dataclass(slots=True)
class StepBuilder:
    """Who runs in this step, and how many positions the budget still holds."""

    budget: int  # positions
    row_budget: int  # rows of the LM head for prompt scores whose positions ran before
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_requests: list[NewRequest] = field(default_factory=list)
    running: RunningRequests = field(
        default_factory=lambda: RunningRequests(request_ids=[], new_block_ids=[], num_computed_tokens=[])
    )
    prompt_ranges: dict[str, PromptRange] = field(default_factory=dict)
    known_scores: dict[str, list[PromptRange]] = field(default_factory=dict)
    block_copies: list[BlockCopy] = field(default_factory=list)

    def add_new(
        self, request: Request, num_tokens: int, copies: list[BlockCopy], pending: PendingPromptLogprobs
    ) -> None:
        """Let a request enter the runner's batch and run."""
        message = request.message
        self.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=message.prompt_token_ids + request.output_token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=request.block_ids.copy(),
                sampling_params=request.sampling_params,
                seeds=request.seeds,
                min_tokens_stop_ids=message.min_tokens_stop_ids,
                bad_words_token_ids=message.bad_words_token_ids,
            )
        )
        self.block_copies += copies
        self._add(request, num_tokens, pending)

    def add_running(
        self, request: Request, num_tokens: int, new_block_ids: list[int], pending: PendingPromptLogprobs
    ) -> None:
        """Let a request of the runner's batch run."""
        self.running.request_ids.append(request.request_id)
        self.running.new_block_ids.append(new_block_ids)
        self.running.num_computed_tokens.append(request.num_computed_tokens)
        self._add(request, num_tokens, pending)

    def add_decode_batch(self, batch: DecodeBatch, requests: list[Request], new_block_ids: list[list[int]]) -> None:
        """Let all that run go on by one position each, as in the last step."""
        self.budget -= len(requests)
        self.num_scheduled_tokens = batch.num_scheduled_tokens.copy()
        self.running = RunningRequests(
            request_ids=list(batch.num_scheduled_tokens),
            new_block_ids=new_block_ids,
            num_computed_tokens=[request.num_computed_tokens for request in requests],
        )
        for request in requests:
            request.num_scheduled_tokens = 1

    def make_output(self, left_request_ids: Iterable[str], decode_batch_id: int | None) -> SchedulerOutput:
        return SchedulerOutput(
            new_requests=self.new_requests,
            running=self.running,
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            prompt_ranges=self.prompt_ranges,
            known_scores=self.known_scores,
            left_request_ids=list(left_request_ids),
            block_copies=self.block_copies,
            decode_batch_id=decode_batch_id,
        )

    def _add(self, request: Request, num_tokens: int, pending: PendingPromptLogprobs) -> None:
        self.budget -= num_tokens
        self.row_budget -= pending.num_rows
        self.num_scheduled_tokens[request.request_id] = num_tokens
        request.num_scheduled_tokens = num_tokens
        # The row of position i − 1 scores token i; rows that were sent before a preemption are not asked for again.
        first, end = request.num_scored, pending.end
        if num_tokens > 0:
            end = min(request.num_computed_tokens + num_tokens + 1, request.num_prompt_tokens)
        if first < end:
            self.prompt_ranges[request.request_id] = PromptRange(first, end)
            if pending.known:
                self.known_scores[request.request_id] = pending.known
