"""Who runs in a step, and what becomes of it.

    add_request ─▶ waiting ──admit──▶ running ──finish──▶ gone
                      ▲                │  │
                      ├───preempt──────┘  │ first token of a family
                      └───n children──────┘ (fork)

A step has one budget of positions. Those that run go on first, in order of precedence (fcfs: arrival; priority: lowest
value, then arrival), then whoever waits enters as seats, budget and blocks allow. A request enters only when blocks for
all that it has to compute are free, so prefill never lacks memory in the middle; when a sequence that grows lacks a
block, waiting holders give up theirs, then the latest running request is preempted.
"""

import sys
import time
from bisect import bisect_left, insort
from collections.abc import Iterable

import msgspec

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logprobs.block import count_rows, take_rows
from vllm.v1.core.kv_cache_manager import Hits, KVCacheManager
from vllm.v1.core.pending_prompt_logprobs import PendingPromptLogprobs, find_pending, note_scored
from vllm.v1.core.sched.admission import check_can_run, count_positions, count_unscored
from vllm.v1.core.sched.decode_batch import DecodeBatch
from vllm.v1.core.sched.prefixes_in_flight import PrefixesInFlight
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.step_builder import StepBuilder
from vllm.v1.messages import (
    BlockCopy,
    DecodeBatchTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    PromptScores,
    RowRange,
    SchedulerOutput,
    SchedulerStats,
)
from vllm.v1.request import Precedence, Request, RequestStatus


def _get_precedence(request: Request) -> Precedence:
    return request.precedence


class Scheduler:
    """Continuous batching over a pool of KV blocks; one thread calls `schedule` and `update_from_output` in turn."""

    def __init__(self, vllm_config: VllmConfig, num_gpu_blocks: int) -> None:
        self.config = vllm_config.scheduler_config
        self.cache_config = vllm_config.cache_config
        self.max_model_len = vllm_config.model_config.max_model_len
        self.num_blocks = num_gpu_blocks
        self._stats = SchedulerStats(num_blocks=num_gpu_blocks)
        self._num_added = 0
        self._num_decode_batches = 0
        self._ids_in_runner: set[str] = set()  # until a step that names them as left has run
        self._left_ids: list[str] = []  # of the next step
        self._start_empty()

    def _start_empty(self) -> None:
        self.kv = KVCacheManager(self.num_blocks, self.cache_config.block_size, self.cache_config.enable_prefix_caching)
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.children: dict[str, dict[str, None]] = {}  # a forked family's live children, for abort and errors
        self.waiting = RequestQueue()
        self.running: list[Request] = []  # in order of precedence
        self._decode_batch: DecodeBatch | None = None  # of the last step, unless somebody left or came since
        self._without_work: dict[str, Request] = {}  # no position to compute: answered by the next update

    # ------------------------------------------------------------ coming and going

    def add_request(self, message: EngineCoreRequest) -> None:
        """Admit a request, or a family as a whole, or refuse it.

        Raises:
            VLLMValidationError: it could never run to its end, or its id is in use.
        """
        request_id = message.request_id
        if request_id in self.requests or request_id in self.children:
            raise VLLMValidationError("request_id is in use", parameter="request_id", value=request_id)
        check_can_run(message, self.max_model_len, self.num_blocks, self.kv.block_size, self.config)
        self._num_added += 1
        by_priority = self.config.policy == "priority"
        num_top = message.sampling_params.prompt_logprobs
        keeps_scores = num_top is not None and self.cache_config.keeps_prompt_logprobs
        request = Request(
            message=message,
            request_id=request_id,
            seeds=message.seeds,
            precedence=(message.priority, message.arrival_time, self._num_added) if by_priority else (self._num_added,),
            num_prompt_tokens=len(message.prompt_token_ids),
            max_positions=count_positions(message, self.max_model_len),
            num_scored=count_unscored(message),
            keeps_scores=keeps_scores,
            can_read_scores=keeps_scores and (num_top or 0) <= self.cache_config.num_kept_logprobs,
        )
        self.requests[request_id] = request
        if request.num_missing_tokens == 0:
            self._without_work[request_id] = request
        else:
            self.waiting.push(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, children, or whole families by their id; unknown ids are ignored."""
        for request_id in request_ids:
            for sequence_id in list(self.children.get(request_id, (request_id,))):
                if sequence_id in self.requests:
                    self._finish(self.requests[sequence_id], FinishReason.ABORT)

    def _finish(self, request: Request, finish_reason: FinishReason, stop_reason: int | None = None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._leave_batch(request)
        self.waiting.discard(request)
        self._without_work.pop(request.request_id, None)
        self.kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        del self.requests[request.request_id]
        siblings = self.children.get(request.family_id)
        if siblings is not None:
            del siblings[request.request_id]
            if not siblings:
                del self.children[request.family_id]

    def _leave_batch(self, request: Request) -> None:
        self._left_ids.append(request.request_id)
        self._decode_batch = None
        del self.running[bisect_left(self.running, request.precedence, key=_get_precedence)]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def num_unfinished_requests(self) -> int:
        """Count sequences: a family that is not forked yet counts its children."""
        return self._num_waiting_sequences() + sum(len(request.seeds) for request in self.running)

    def _num_waiting_sequences(self) -> int:
        return self.waiting.num_sequences + len(self._without_work)

    # ------------------------------------------------------------ filling a step

    def schedule(self) -> SchedulerOutput:
        """Decide one step; `update_from_output` must follow with what came of it."""
        # Rows of the LM head for positions that ran before count apart: a row costs a fraction of a position.
        budget = self.config.max_num_batched_tokens
        builder = StepBuilder(budget, row_budget=budget if self.config.enable_chunked_prefill else sys.maxsize)
        if not self._continue_decode_batch(builder):
            self._decode_batch = None
            self._schedule_running(builder)
        if self.waiting:
            self._admit_waiting(builder)
        if self._decode_batch is None:
            self._decode_batch = self._find_decode_batch(builder)
        self._ids_in_runner.update(new.request_id for new in builder.new_requests)
        left_ids, self._left_ids = self._left_ids, []
        return builder.make_output(left_ids, None if self._decode_batch is None else self._decode_batch.batch_id)

    def _continue_decode_batch(self, builder: StepBuilder) -> bool:
        """Schedule the last step's decode batch again; False: it is not all that runs, or memory is short."""
        batch = self._decode_batch
        if batch is None or batch.batch_id is None:
            return False
        new_block_ids = self.kv.try_grow_all(self.running)
        if new_block_ids is None:
            return False
        builder.add_decode_batch(batch, self.running, new_block_ids)
        return True

    def _find_decode_batch(self, builder: StepBuilder) -> DecodeBatch | None:
        """Return those of the step that run one position, are sampled from and report a token and its logprobs only."""
        requests = [
            request
            for request in self.running
            if request.num_scheduled_tokens == 1 == request.num_missing_tokens and not request.has_metadata
        ]
        if not requests:
            return None
        batch_id = None
        if len(requests) == len(self.running) and not builder.new_requests:
            batch_id = self._num_decode_batches = self._num_decode_batches + 1
        requests = [request for request in requests if not request.has_own_rows]
        return DecodeBatch(batch_id, requests, builder.num_scheduled_tokens)

    def _schedule_running(self, builder: StepBuilder) -> None:
        place = 0
        while place < len(self.running) and builder.budget > 0:
            request = self.running[place]
            # One position is kept for each that stands behind: a long recomputation must not stop the others' decoding.
            budget = max(1, builder.budget - (len(self.running) - place - 1))
            pending = self._find_pending(request, builder.row_budget)
            num_tokens = self._count_tokens(request, request.num_missing_tokens, budget) if pending.is_whole else 0
            if num_tokens > 0 or pending.end > pending.first:
                new_block_ids = self._grow(request, num_tokens)
                if new_block_ids is not None:
                    builder.add_running(request, num_tokens, new_block_ids, pending)
            place += 1

    def _find_pending(self, request: Request, max_rows: int) -> PendingPromptLogprobs:
        return find_pending(request, self.kv.pool.prompt_logprobs, self.kv.block_size, max_rows)

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Find blocks for a running request; None: it keeps its seat and waits for a step with more memory.

        The last in order goes first. It always frees something: the block that a running request writes is its alone.
        Once full it can be shared, but only by who enters, and in each step the running requests get their next blocks
        before. So the first in order gets what it needs, and every step brings the engine forward.
        """
        while (new_block_ids := self.kv.allocate_slots(request, num_tokens)) is None:
            if self.kv.reclaim_idle(self.kv.num_free_blocks + 1):
                continue
            if self.running[-1] is request:
                return None
            self._preempt(self.running[-1])
        return new_block_ids

    def _preempt(self, request: Request) -> None:
        assert request.num_scheduled_tokens is None, f"{request.request_id} is preempted while its step runs"
        self._leave_batch(request)
        self.kv.release_own_blocks(request)
        self._count_preemption(request)
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    def _count_preemption(self, request: Request) -> None:
        request.num_preemptions += 1
        request.has_metadata = True
        self._stats.num_preemptions += 1

    def _admit_waiting(self, builder: StepBuilder) -> None:
        if builder.budget <= 0 or len(self.running) >= self.config.max_num_seqs:
            return
        self.kv.catch_up(self.running)
        # A block is left for each that may grow: who enters should get through some steps before anyone must go.
        num_spare = sum(map(self.kv.may_grow, self.running))
        in_flight = PrefixesInFlight(self.kv, self.running)
        deferred: list[Request] = []
        while self.waiting and builder.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.get_first()
            if len(deferred) < self.config.max_num_seqs and in_flight.is_worth_waiting_for(request):
                deferred.append(self.waiting.pop())
                continue
            admitted = self._try_admit(request, builder, num_spare)
            if admitted is None:
                break
            self.waiting.pop()
            request.status = RequestStatus.RUNNING
            self._decode_batch = None
            insort(self.running, request, key=_get_precedence)
            builder.add_new(request, *admitted)
            in_flight.add(request)
            num_spare += self.kv.may_grow(request)
        for request in deferred:
            self.waiting.push(request)

    def _try_admit(
        self, request: Request, builder: StepBuilder, num_spare: int
    ) -> tuple[int, list[BlockCopy], PendingPromptLogprobs] | None:
        """Return how many positions of a waiting request run now, after which copies, and what is pending of it.

        None: it waits on.
        """
        while True:
            if self.kv.has_lost_blocks(request):
                self.kv.accept_loss(request)
                self._count_preemption(request)
            hits = self.kv.get_computed_blocks(request)
            admitted = self._admit(request, hits, builder, num_spare)
            if admitted is None and hits.source is not None:  # what is copied takes a block more for the moment
                hits = Hits(hits.block_ids)
                admitted = self._admit(request, hits, builder, num_spare)
            if admitted is not None:
                break
            # With nobody running, who waits behind must make room.
            num_missing_blocks = request.num_missing_tokens // self.kv.block_size - len(hits.block_ids)
            num_wanted = max(self.kv.num_free_blocks + 1, num_missing_blocks)
            if self.running or not self.kv.reclaim_idle(num_wanted):
                assert self.running, f"{request.request_id} was let in but does not fit into the KV cache"
                return None
        num_tokens, copies = admitted
        num_hit_tokens = len(hits.block_ids) * self.kv.block_size + hits.num_partial
        if request.num_cached_tokens is None:
            request.num_cached_tokens, request.scheduled_ts = num_hit_tokens, time.monotonic()
            self._stats.num_prefix_hits += num_hit_tokens
            self._stats.num_prefix_queries += request.num_prompt_tokens if self.kv.enable_caching else 0
        pending = self._find_pending(request, builder.row_budget)
        return num_tokens if pending.is_whole else 0, copies, pending

    def _admit(
        self, request: Request, hits: Hits, builder: StepBuilder, num_spare: int
    ) -> tuple[int, list[BlockCopy]] | None:
        num_missing = request.num_missing_tokens - len(hits.block_ids) * self.kv.block_size - hits.num_partial
        num_tokens = self._count_tokens(request, num_missing, builder.budget)
        if num_tokens == 0 and num_missing > 0:
            return None
        copies = self.kv.admit(request, num_missing, hits, num_spare)
        return None if copies is None else (num_tokens, copies)

    def _count_tokens(self, request: Request, num_missing: int, budget: int) -> int:
        """Return how many of the missing positions run in this step; 0: none before a step with more room."""
        if self.config.enable_chunked_prefill or request.output_token_ids:
            threshold = self.config.long_prefill_token_threshold or num_missing
            return min(num_missing, threshold, budget)
        return num_missing if num_missing <= budget else 0

    # ------------------------------------------------------------ after a step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take in what a step made: tokens, rows and errors. What belongs to requests aborted meanwhile is dropped."""
        self._ids_in_runner.difference_update(scheduler_output.left_request_ids)
        self._ids_in_runner.update(new.request_id for new in scheduler_output.new_requests)
        self._stats.num_computed_positions += scheduler_output.total_num_scheduled_tokens
        self._stats.num_nan_rows += runner_output.num_nan_rows
        outputs = self._fail_requests(runner_output.errors)
        decode_batch = self._take_decode_batch(runner_output, outputs)
        prompt_scores = []
        num_decoded = 0 if decode_batch is None else len(decode_batch.request_ids)
        if num_decoded < len(scheduler_output.num_scheduled_tokens):
            prompt_scores = self._take_others(scheduler_output, runner_output, outputs)
        for request in list(self._without_work.values()):
            self._finish(request, FinishReason.LENGTH)
            outputs.append(request.make_output([]))
        return EngineCoreOutputs(
            outputs=outputs,
            prompt_scores=prompt_scores,
            decode_batch=decode_batch,
            logprobs=runner_output.logprobs,
            stats=self.get_stats(),
            timestamp=time.monotonic(),
        )

    def _take_decode_batch(
        self, runner_output: ModelRunnerOutput, outputs: list[EngineCoreOutput]
    ) -> DecodeBatchTokens | None:
        """Take in the tokens of the step's decode batch: nearly all, so one short loop for them.

        Those of them that end go to `outputs`.
        """
        batch, sampled = self._decode_batch, runner_output.sampled
        if batch is None or max(map(len, sampled.token_ids)) > 1:
            self._decode_batch = None  # somebody left since it was scheduled, or has more than a position to run next
            return None
        tokens = batch.take(sampled)
        self._stats.num_scored_sample_rows += len(tokens.rows)
        ended: set[int] = set()
        for place in batch.find_candidates(tokens.token_ids):
            request = batch.requests[place]
            ending = request.find_ending()
            if ending is not None:
                self._finish(request, *ending)
                rows = RowRange(tokens.rows[place], tokens.rows[place] + 1) if place < len(tokens.rows) else None
                outputs.append(request.make_output([tokens.token_ids[place]], rows))
                ended.add(place)
        if ended:
            tokens = tokens.without(ended)
        return tokens if tokens.request_ids else None

    def _take_others(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput, outputs: list[EngineCoreOutput]
    ) -> list[PromptScores]:
        """Take in what the step made of the requests outside its decode batch."""
        prompt_scores = []
        sampled_ids = runner_output.sampled.request_ids
        last_row_of = dict(zip(sampled_ids, range(len(sampled_ids)), strict=True))
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.num_scheduled_tokens is None:
                continue
            num_tokens, request.num_scheduled_tokens = request.num_scheduled_tokens, None
            request.num_computed_tokens += num_tokens
            self.kv.cache_full_blocks(request)
            if request_id in scheduler_output.prompt_ranges:
                prompt_scores.append(self._take_prompt_scores(request, scheduler_output, runner_output))
            if request.num_missing_tokens > 0 or request.has_pending_scores:
                continue
            if request.is_score_only:
                self._finish(request, FinishReason.LENGTH)
                outputs.append(request.make_output([]))
            else:
                end = last_row_of[request_id] + 1
                outputs += self._take_tokens(request, runner_output, end - len(request.seeds))
        return prompt_scores

    def _take_prompt_scores(
        self, request: Request, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> PromptScores:
        request_id = request.request_id
        first, end = scheduler_output.prompt_ranges[request_id]
        num_known = sum(known.end - known.first for known in scheduler_output.known_scores.get(request_id, ()))
        self._stats.num_scored_prompt_rows += end - first - num_known
        self._stats.num_cached_prompt_rows += num_known
        note_scored(request, self.kv.pool.prompt_logprobs, self.kv.block_size, first, end)
        full_rows = runner_output.full_prompt_rows.get(request_id)
        rows = runner_output.prompt_rows[request_id] if full_rows is None else None
        num_rows = count_rows(full_rows or ()) if rows is None else rows.end - rows.first
        assert num_rows == end - first, f"{request_id}: {num_rows} rows for {end - first} prompt tokens"
        return PromptScores(request_id=request_id, rows=rows, full_rows=full_rows)

    def _take_tokens(self, request: Request, runner_output: ModelRunnerOutput, first: int) -> list[EngineCoreOutput]:
        """Give a request its new tokens, or fork a family: each child ends, or goes on, by itself.

        `first` is its first row of the sampled tokens. Of a run's tokens that stay, the model has yet to run the
        positions: the next step finds as many missing.
        """
        sampled, own_rows = runner_output.sampled, runner_output.full_sample_rows.get(request.request_id)
        sequences = [request] if len(request.seeds) == 1 else self._fork(request)
        outputs = []
        for draw, sequence in enumerate(sequences):
            row = first + draw
            assert (sampled.request_ids[row], sampled.draws[row]) == (request.request_id, draw), "a draw has no row"
            run, rows, full_rows = sampled.token_ids[row], sampled.rows[row], None
            num_taken, ending = sequence.append_run(run)
            if ending is not None:
                self._finish(sequence, *ending)
            elif sequence.status is RequestStatus.WAITING:
                self.waiting.push(sequence)
            if rows is not None:
                self._stats.num_scored_sample_rows += rows.end - rows.first
                rows = RowRange(rows.first, rows.first + num_taken)
                if own_rows is not None:
                    full_rows = take_rows(own_rows, *rows)
                    rows = None
            sequence.has_metadata, sequence.has_own_rows = False, full_rows is not None
            outputs.append(sequence.make_output(run[:num_taken], rows, full_rows))
        return outputs

    def _fork(self, family: Request) -> list[Request]:
        """Turn a family whose prompt is computed into its children, which own its blocks together."""
        self._leave_batch(family)
        family.status = RequestStatus.FINISHED
        del self.requests[family.request_id]
        num_children = len(family.seeds)
        shared_blocks = self.kv.fork(family, num_children)
        children = [family.make_child(index, shared_blocks) for index in range(num_children)]
        self.children[family.request_id] = dict.fromkeys(child.request_id for child in children)
        for child in children:
            assert child.request_id not in self.requests, f"{child.request_id} is in use"
            self.requests[child.request_id] = child
        return children

    def _fail_requests(self, errors: dict[str, str]) -> list[EngineCoreOutput]:
        """End what the runner could not sample or score from; a family fails as a whole, with one answer."""
        outputs = []
        for request_id, error in errors.items():
            request = self.requests.get(request_id)
            if request is None or request.num_scheduled_tokens is None:
                continue
            self.abort_requests([request.family_id])
            outputs.append(
                EngineCoreOutput(
                    request_id=request.family_id,
                    new_token_ids=[],
                    finish_reason=FinishReason.ERROR,
                    error=error,
                    num_cached_tokens=request.num_cached_tokens or 0,
                    num_preemptions=request.num_preemptions,
                    scheduled_ts=request.scheduled_ts,
                )
            )
        return outputs

    # ------------------------------------------------------------ out of the ordinary

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; always possible, since what runs on keeps its blocks out of the new cache."""
        self.kv.reset_prefix_cache()
        return True

    def preempt_everything(self) -> None:
        """Take every block from every request, as when the KV cache itself goes; all can be computed again."""
        for request in list(self.running):
            self._preempt(request)
        self.kv.reclaim_idle(self.num_blocks)
        self.kv.reset_prefix_cache()

    def abort_running(self) -> None:
        """End the families of all that run: what a step that raised has done to them is unknown."""
        self.abort_requests([request.family_id for request in self.running])
        self._left_ids = list(self._ids_in_runner)

    def forget_everything(self) -> None:
        """End all requests and start with an empty cache, from whatever state an interruption left behind."""
        self._start_empty()
        self._left_ids = list(self._ids_in_runner)

    def get_stats(self) -> SchedulerStats:
        return msgspec.structs.replace(
            self._stats,
            num_running=len(self.running),
            num_waiting=self._num_waiting_sequences(),
            num_used_blocks=self.kv.num_used_blocks,
        )
