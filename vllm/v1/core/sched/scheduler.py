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

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.kv_cache_manager import Backlog, Hits, KVCacheManager
from vllm.v1.core.sched.counters import Counters
from vllm.v1.core.sched.door import check_can_run, count_positions, count_unowed_scores
from vllm.v1.core.sched.output_rows import make_output, take_prompt_scores, take_sample_rows
from vllm.v1.core.sched.prefixes_in_flight import PrefixesInFlight
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.steady_batch import SteadyBatch
from vllm.v1.core.sched.step_plan import StepPlan
from vllm.v1.core.sched.stop_check import find_ending
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
        self.counters = Counters()
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
        self._steady: SteadyBatch | None = None  # a step's batch that next steps may find unchanged
        self._without_work: dict[str, Request] = {}  # no position to compute: answered by the next update

    # ------------------------------------------------------------ coming and going

    def add_request(self, message: EngineCoreRequest) -> None:
        """Let a request, or a family as a whole, in or refuse it.

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
            num_scored=count_unowed_scores(message),
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
        self._steady = None
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
        plan = StepPlan(budget, row_budget=budget if self.config.enable_chunked_prefill else sys.maxsize)
        self._schedule_running(plan)
        if self.waiting:
            self._admit_waiting(plan)
        self._ids_in_runner.update(new.request_id for new in plan.new_requests)
        left_ids, self._left_ids = self._left_ids, []
        return plan.make_output(left_ids)

    def _schedule_running(self, plan: StepPlan) -> None:
        place = 0
        while place < len(self.running) and plan.budget > 0:
            request = self.running[place]
            # One position is kept for each that stands behind: a long recomputation must not stop the others' decoding.
            budget = max(1, plan.budget - (len(self.running) - place - 1))
            backlog = self.kv.find_backlog(request, plan.row_budget)
            num_tokens = self._count_tokens(request, request.num_missing_tokens, budget) if backlog.is_whole else 0
            if num_tokens > 0 or backlog.end > backlog.first:
                new_block_ids = self._grow(request, num_tokens, plan)
                if new_block_ids is not None:
                    plan.add_running(request, num_tokens, new_block_ids, backlog)
            place += 1

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
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
        request.has_news = True
        self.counters.num_preemptions += 1

    def _admit_waiting(self, plan: StepPlan) -> None:
        if plan.budget <= 0 or len(self.running) >= self.config.max_num_seqs:
            return
        self.kv.catch_up(self.running)
        # A block is left for each that may grow: who enters should get through some steps before anyone must go.
        num_spare = sum(map(self.kv.may_grow, self.running))
        in_flight = PrefixesInFlight(self.kv, self.running)
        deferred: list[Request] = []
        while self.waiting and plan.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.get_first()
            if len(deferred) < self.config.max_num_seqs and in_flight.is_worth_waiting_for(request):
                deferred.append(self.waiting.pop())
                continue
            admitted = self._try_admit(request, plan, num_spare)
            if admitted is None:
                break
            self.waiting.pop()
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_get_precedence)
            plan.add_new(request, *admitted)
            in_flight.add(request)
            num_spare += self.kv.may_grow(request)
        for request in deferred:
            self.waiting.push(request)

    def _try_admit(
        self, request: Request, plan: StepPlan, num_spare: int
    ) -> tuple[int, list[BlockCopy], Backlog] | None:
        """Return how many positions of a waiting request run now, after which copies, and its backlog.

        None: it waits on.
        """
        while True:
            if self.kv.has_lost_blocks(request):
                self.kv.accept_loss(request)
                self._count_preemption(request)
            hits = self.kv.get_computed_blocks(request)
            admitted = self._admit(request, hits, plan, num_spare)
            if admitted is None and hits.source is not None:  # what is copied takes a block more for the moment
                hits = Hits(hits.block_ids)
                admitted = self._admit(request, hits, plan, num_spare)
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
            self.counters.num_prefix_hits += num_hit_tokens
            self.counters.num_prefix_queries += request.num_prompt_tokens if self.kv.enable_caching else 0
        backlog = self.kv.find_backlog(request, plan.row_budget)
        return num_tokens if backlog.is_whole else 0, copies, backlog

    def _admit(
        self, request: Request, hits: Hits, plan: StepPlan, num_spare: int
    ) -> tuple[int, list[BlockCopy]] | None:
        num_missing = request.num_missing_tokens - len(hits.block_ids) * self.kv.block_size - hits.num_partial
        num_tokens = self._count_tokens(request, num_missing, plan.budget)
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

    def update_from_output(self, plan: SchedulerOutput, made: ModelRunnerOutput) -> EngineCoreOutputs:
        """Take in what a step made: tokens, rows and errors. What belongs to requests aborted meanwhile is dropped."""
        self._ids_in_runner.difference_update(plan.left_request_ids)
        self._ids_in_runner.update(new.request_id for new in plan.new_requests)
        self.counters.num_computed_positions += plan.total_num_scheduled_tokens
        self.counters.num_nan_rows += made.num_nan_rows
        outputs = self._fail_requests(made.errors)
        continued, others = self._continue_running(plan, made, outputs)
        prompt_scores = []
        for request_id in others:
            request = self.requests.get(request_id)
            if request is None or request.num_scheduled_tokens is None:
                continue
            num_tokens, request.num_scheduled_tokens = request.num_scheduled_tokens, None
            request.num_computed_tokens += num_tokens
            self.kv.cache_full_blocks(request)
            if request_id in plan.prompt_ranges:
                prompt_scores.append(self._take_prompt_scores(request, plan, made))
            if request.num_missing_tokens > 0 or request.owes_scores:
                continue
            if request.is_score_only:
                self._finish(request, FinishReason.LENGTH)
                outputs.append(make_output(request, []))
            else:
                outputs += self._take_tokens(request, made)
        for request in list(self._without_work.values()):
            self._finish(request, FinishReason.LENGTH)
            outputs.append(make_output(request, []))
        return EngineCoreOutputs(
            outputs=outputs,
            prompt_scores=prompt_scores,
            decode_batch=continued,
            logprobs=None if made.logprobs is None else FlatLogprobs.from_rectangle(*made.logprobs),
            stats=self.get_stats(),
            timestamp=time.monotonic(),
        )

    def _continue_running(
        self, plan: SchedulerOutput, made: ModelRunnerOutput, outputs: list[EngineCoreOutput]
    ) -> tuple[DecodeBatchTokens | None, list[str]]:
        """Take in the tokens of the sequences that have nothing else to tell: nearly all, so one short loop for them.

        Those of them that end go to `outputs`. Returned with the rest: all others, for the loop that knows every case.
        """
        batch, others = self._find_steady(plan, made)
        if not batch.requests:
            return None, others
        tokens_of, rows_of = made.token_ids, made.sample_rows
        token_ids = [tokens_of[request_id][0] for request_id in batch.request_ids]
        rows = [rows_of[request_id][0] for request_id in batch.request_ids[: batch.num_scored]]
        may_end = batch.take(token_ids)
        self.counters.num_scored_sample_rows += batch.num_scored
        continued = DecodeBatchTokens(
            request_ids=batch.request_ids, token_ids=token_ids, rows=rows, batch_id=batch.batch_id
        )
        if may_end:
            continued = self._end_some(batch.requests, continued, may_end, outputs)
        return continued if continued.request_ids else None, others

    def _find_steady(self, plan: SchedulerOutput, made: ModelRunnerOutput) -> tuple[SteadyBatch, list[str]]:
        """Return the sequences that got one token and have nothing else to tell, and all others of the step."""
        planned_ids = list(plan.num_scheduled_tokens)
        if self._steady is not None and self._steady.planned_ids == planned_ids:
            assert plan.total_num_scheduled_tokens == len(planned_ids), "who just goes on runs one position a step"
            return self._steady, []
        scored: list[Request] = []
        plain: list[Request] = []
        others: list[str] = []
        for request_id in planned_ids:
            request = self.requests.get(request_id)
            if request is None or request.has_news or request.num_scheduled_tokens != 1:
                others.append(request_id)
            elif not request.wants_rows:
                plain.append(request)
            elif request_id in made.sample_rows:
                scored.append(request)
            else:
                others.append(request_id)
        batch = SteadyBatch(planned_ids, scored, plain)
        self._steady = None
        if not others:
            self._num_decode_batches += 1
            batch.batch_id = self._num_decode_batches
            self._steady = batch
        return batch, others

    def _end_some(
        self, requests: list[Request], continued: DecodeBatchTokens, places: list[int], outputs: list[EngineCoreOutput]
    ) -> DecodeBatchTokens:
        """End those at `places` that their newest token ends, with an output each; return the others."""
        ended: set[int] = set()
        for place in places:
            request = requests[place]
            ending = find_ending(request, self.max_model_len)
            if ending is None:
                continue
            self._finish(request, *ending)
            rows = RowRange(continued.rows[place], continued.rows[place] + 1) if place < len(continued.rows) else None
            outputs.append(make_output(request, [continued.token_ids[place]], rows))
            ended.add(place)
        return continued.without(ended) if ended else continued

    def _take_prompt_scores(self, request: Request, plan: SchedulerOutput, made: ModelRunnerOutput) -> PromptScores:
        first, end = plan.prompt_ranges[request.request_id]
        num_known = sum(known.end - known.first for known in plan.known_scores.get(request.request_id, ()))
        self.counters.num_scored_prompt_rows += end - first - num_known
        self.counters.num_cached_prompt_rows += num_known
        self.kv.note_scores(request, first, end)
        request.num_scored = end
        return take_prompt_scores(made, request.request_id, end - first)

    def _take_tokens(self, request: Request, made: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Give a request its new token, or fork a family: each child ends, or goes on, by itself."""
        token_ids = made.token_ids[request.request_id]
        rows = None
        if request.sampling_params.num_logprobs is not None:
            rows = take_sample_rows(made, request.request_id, len(token_ids))
            self.counters.num_scored_sample_rows += len(rows)
        sequences = [request] if len(request.seeds) == 1 else self._fork(request)
        outputs = []
        for index, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            sequence.output_token_ids.append(token_id)
            ending = find_ending(sequence, self.max_model_len)
            if ending is not None:
                self._finish(sequence, ending.finish_reason, ending.stop_reason)
            elif sequence.status is RequestStatus.WAITING:
                self.waiting.push(sequence)
            row_range, full_rows = (None, None) if rows is None else rows[index]
            outputs.append(make_output(sequence, [token_id], row_range, full_rows))
            sequence.has_news = False
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
        return self.counters.make_stats(
            num_running=len(self.running),
            num_waiting=self._num_waiting_sequences(),
            num_used_blocks=self.kv.num_used_blocks,
            num_blocks=self.num_blocks,
        )
