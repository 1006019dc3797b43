"""A scripted runner for the scheduler's tests, and a front end that checks each answer.

No model runs here: the KV cache holds a *mark* a position, a hash of the whole history up to it. Each read checks that
the block table leads a request to the marks of its own history, so a wrong fork, copy, prefix hit or preemption shows.
The next token is a pure function of (seed, mark), so each request's answer can be told in advance.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, TransformerConfig, VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.logprobs.block import LogprobsBlock, WholeRows
from vllm.logprobs.rows import EMPTY_SLOT
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    RowRange,
    SampledTokens,
    SchedulerOutput,
)
from vllm.v1.request import Request, SharedBlocks

VOCAB_SIZE = 40
EOS = 0


def make_config(
    *, block_size: int = 4, max_model_len: int = 64, caching: bool = True, **scheduler_options: object
) -> VllmConfig:
    transformer = TransformerConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        max_position_embeddings=max_model_len,
    )
    model = ModelConfig(model="m", path="m", tokenizer="m", transformer=transformer, max_model_len=max_model_len)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32} | scheduler_options
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(**options),
    )


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    n: int = 1,
    seed: int = 0,
    priority: int = 0,
    arrival_time: float = 0.0,
    eos_token_id: int | None = EOS,
    cache_salt: str | None = None,
    **params: object,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**({"max_tokens": 5} | params)),
        seeds=[seed + i for i in range(n)],
        priority=priority,
        arrival_time=arrival_time,
        eos_token_id=eos_token_id,
        cache_salt=cache_salt,
    )


# ---------------------------------------------------------------- the script


def extend_marks(marks: list[int], token_ids: list[int]) -> None:
    """Append the mark of each position that `marks` lacks."""
    for token_id in token_ids[len(marks) :]:
        marks.append(hash((marks[-1] if marks else 1, token_id)))


def draw(seed: int, mark: int) -> int:
    return hash((seed, mark)) % VOCAB_SIZE


def get_row_value(mark: int) -> float:
    return float(mark % 997)


def tell_tokens(
    message: EngineCoreRequest, index: int, max_model_len: int
) -> tuple[list[int], FinishReason, int | None]:
    """Return what child `index` must answer, by the script alone."""
    params, tokens, marks = message.sampling_params, [], []
    while len(tokens) < params.max_tokens and len(message.prompt_token_ids) + len(tokens) < max_model_len:
        extend_marks(marks, message.prompt_token_ids + tokens)
        tokens.append(draw(message.seeds[index], marks[-1]))
        may_stop = len(tokens) >= params.min_tokens
        if may_stop and tokens[-1] == message.eos_token_id and not params.ignore_eos:
            return tokens, FinishReason.STOP, None
        if may_stop and tokens[-1] in params.stop_token_ids:
            return tokens, FinishReason.STOP, tokens[-1]
    return tokens, FinishReason.LENGTH, None


# ---------------------------------------------------------------- the runner


@dataclass
class RunnerRequest:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seeds: list[int]
    marks: list[int] = field(default_factory=list)


class ScriptedRunner:
    """Keeps the state that a model runner keeps, and refuses every step that a model runner could not run."""

    def __init__(self, config: VllmConfig, num_blocks: int) -> None:
        self.block_size = config.cache_config.block_size
        self.limits = config.scheduler_config
        self.kv: list[list[int | None]] = [[None] * self.block_size for _ in range(num_blocks)]
        # What blocks keep for prompt logprobs: the mark of each position whose row could be scored again, and the
        # (token, mark of the row) of each score.
        self.keeps_scores = config.cache_config.keeps_prompt_logprobs
        self.states: list[list[int | None]] = [[None] * self.block_size for _ in range(num_blocks)]
        self.scores: list[list[tuple[int, int] | None]] = [[None] * self.block_size for _ in range(num_blocks)]
        self.num_head_rows = self.num_known_rows = 0
        self.num_late_rows = 0  # of the head, for positions that ran in an earlier step or in another request
        self.batch: dict[str, RunnerRequest] = {}
        self.errors: dict[str, str] = {}  # to be reported for those that make rows in a step
        self.num_run_positions: Counter[str] = Counter()
        self.num_copies = 0
        self.may_leave_unknown = False  # after a step that raised
        self.run_lengths = [1]  # of what each draw of a step brings, in turn
        self.num_draws = 0

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._update_batch(plan)
        self._copy_blocks(plan)
        self._write_and_read(plan)
        return self._make_output(plan)

    def _update_batch(self, plan: SchedulerOutput) -> None:
        for request_id in plan.left_request_ids:
            known = self.batch.pop(request_id, None)
            assert known or self.may_leave_unknown, f"{request_id} left a batch that it was not in"
        for new in plan.new_requests:
            assert new.request_id not in self.batch, f"{new.request_id} entered twice"
            self.batch[new.request_id] = RunnerRequest(
                list(new.token_ids),
                new.num_prompt_tokens,
                new.num_computed_tokens,
                list(new.block_ids),
                new.sampling_params,
                new.seeds,
            )
        running = plan.running
        columns = zip(running.request_ids, running.new_block_ids, running.num_computed_tokens, strict=True)
        for request_id, new_block_ids, num_computed_tokens in columns:
            request = self.batch[request_id]
            assert request.num_computed_tokens == num_computed_tokens, f"{request_id} is not where the scheduler thinks"
            request.block_ids += new_block_ids
        entered = {new.request_id for new in plan.new_requests}
        assert entered | set(running.request_ids) == set(plan.num_scheduled_tokens)
        assert entered.isdisjoint(running.request_ids)
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values())
        assert plan.total_num_scheduled_tokens <= self.limits.max_num_batched_tokens, "the budget is exceeded"
        assert len(self.batch) <= self.limits.max_num_seqs, "more requests than seats"

    def _copy_blocks(self, plan: SchedulerOutput) -> None:
        """Copy all at once: gather, then scatter, as one indexed assignment on a device does."""
        sources, targets = [c.source for c in plan.block_copies], [c.target for c in plan.block_copies]
        assert len(set(targets)) == len(targets), "a block is the target of two copies"
        for memory in (self.kv, self.states, self.scores):
            gathered = [memory[source].copy() for source in sources]
            for target, content in zip(targets, gathered, strict=True):
                memory[target] = content
        self.num_copies += len(sources)

    def _write_and_read(self, plan: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            request = self.batch[request_id]
            first, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
            assert num_tokens >= 0 and end <= len(request.token_ids), f"{request_id} has no tokens up to {end}"
            extend_marks(request.marks, request.token_ids)
            for position in range(first, end):
                slot = (request.block_ids[position // self.block_size], position % self.block_size)
                assert slot not in written, f"slot {slot} is written by two requests"
                written.add(slot)
                self.kv[slot[0]][slot[1]] = request.marks[position]
                keeps = request.params.prompt_logprobs is not None and self.keeps_scores
                self.states[slot[0]][slot[1]] = request.marks[position] if keeps else None
                # the score of a token may be there before its position runs, but never stays from another life
            self.num_run_positions[request_id] += num_tokens
            request.num_computed_tokens = end
        for request_id in plan.num_scheduled_tokens:
            request = self.batch[request_id]
            for position, mark in enumerate(request.marks[: request.num_computed_tokens]):
                found = self.kv[request.block_ids[position // self.block_size]][position % self.block_size]
                assert found == mark, f"{request_id} reads at position {position} what is not its own history"

    def _score_prompt(self, plan: SchedulerOutput, request_id: str, request: RunnerRequest) -> None:
        """Read each score that the scheduler says is known; make the others as a head does, and keep them."""
        first, end = plan.prompt_ranges[request_id]
        known = {token for part in plan.known_scores.get(request_id, []) for token in range(*part)}
        assert known <= set(range(first, end)), f"{request_id}: {known} is not all asked for"
        assert request.params.prompt_logprobs <= 20 or not known, "a score is kept with 20 alternatives"
        ran = plan.num_scheduled_tokens[request_id]
        for token in range(first, end):
            index, place = divmod(token, self.block_size)
            score = (request.token_ids[token], request.marks[token - 1])
            if token in known:
                assert self.scores[request.block_ids[index]][place] == score, f"{request_id}: no true score of {token}"
                self.num_known_rows += 1
                continue
            self.num_head_rows += 1
            self.num_late_rows += token - 1 < request.num_computed_tokens - ran
            before_index, before_place = divmod(token - 1, self.block_size)
            if self.keeps_scores:
                state = self.states[request.block_ids[before_index]][before_place]
                assert state == request.marks[token - 1], f"{request_id}: no hidden state to score {token} from"
                if index < len(request.block_ids):
                    self.scores[request.block_ids[index]][place] = score
            else:
                assert token - 1 >= request.num_computed_tokens - ran, f"{request_id}: row {token - 1} did not run"

    def _make_output(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        rows: list[tuple[int, int, int]] = []  # chosen token, mark, number of alternatives
        sampled = SampledTokens()
        sample_rows, prompt_rows, full_sample_rows, full_prompt_rows, errors = {}, {}, {}, {}, {}

        def add_rows(chosen: list[int], marks: list[int], k: int, request_id: str, ranges: dict, blocks: dict) -> None:
            made = [(token_id, mark, k) for token_id, mark in zip(chosen, marks, strict=True)]
            if k < VOCAB_SIZE:
                ranges[request_id] = RowRange(len(rows), len(rows) + len(made))
                rows.extend(made)
            else:
                values = np.array([[get_row_value(mark)] * VOCAB_SIZE for _, mark, _ in made], np.float32)
                ranks = np.tile(np.arange(1, VOCAB_SIZE + 1, dtype=np.int32), (len(made), 1))
                blocks[request_id] = [WholeRows(np.array(chosen, np.int32), values, ranks)]

        for request_id in plan.num_scheduled_tokens:
            request = self.batch[request_id]
            is_sampled = request.num_computed_tokens == len(request.token_ids)
            prompt_range = plan.prompt_ranges.get(request_id)
            if request_id in self.errors and (is_sampled or prompt_range):
                errors[request_id] = self.errors[request_id]
                continue
            if prompt_range is not None:
                self._score_prompt(plan, request_id, request)
                first, end = prompt_range
                chosen, marks = request.token_ids[first:end], request.marks[first - 1 : end - 1]
                add_rows(chosen, marks, request.params.prompt_logprobs, request_id, prompt_rows, full_prompt_rows)
            if is_sampled:
                runs = [self._draw_run(request, seed) for seed in request.seeds]
                row_ends = np.cumsum([0, *(len(run) for run, _ in runs)]).tolist()
                if (k := request.params.num_logprobs) is not None:
                    chosen, marks = sum((run for run, _ in runs), []), sum((marks for _, marks in runs), [])
                    add_rows(chosen, marks, k, request_id, sample_rows, full_sample_rows)
                first = sample_rows[request_id].first if request_id in sample_rows else 0
                for index, (run, _) in enumerate(runs):
                    sampled.request_ids.append(request_id)
                    sampled.draws.append(index)
                    sampled.token_ids.append(run)
                    ends = first + row_ends[index], first + row_ends[index + 1]
                    sampled.rows.append(None if k is None else RowRange(*ends))
                if len(runs) == 1:
                    request.token_ids += runs[0][0]
        return ModelRunnerOutput(
            sampled=sampled,
            logprobs=make_rectangle(rows) if rows else None,
            prompt_rows=prompt_rows,
            full_sample_rows=full_sample_rows,
            full_prompt_rows=full_prompt_rows,
            errors=errors,
            num_nan_rows=len(errors),
        )

    def _draw_run(self, request: RunnerRequest, seed: int) -> tuple[list[int], list[int]]:
        """Return a draw's tokens, each after the one before, and the mark of each one's row."""
        length = self.run_lengths[self.num_draws % len(self.run_lengths)]
        self.num_draws += 1
        known, run, marks = list(request.token_ids), [], list(request.marks)
        for _ in range(length):
            extend_marks(marks, known + run)
            run.append(draw(seed, marks[-1]))
        return run, marks[len(known) - 1 :]


def make_rectangle(rows: list[tuple[int, int, int]]) -> LogprobsBlock:
    """Return rows of (chosen token, mark, number of alternatives) as a runner does: values beyond a row are rubbish."""
    width = 1 + max(k for _, _, k in rows)
    token_ids = np.full((len(rows), width), EMPTY_SLOT, np.int32)
    values = np.full((len(rows), width), np.nan, np.float32)
    for place, (chosen, mark, k) in enumerate(rows):
        token_ids[place, : 1 + k] = [chosen, *[token_id for token_id in range(k + 1) if token_id != chosen][:k]]
        values[place, : 1 + k] = get_row_value(mark)
    ranks = np.tile(np.arange(1, width + 1, dtype=np.int32), (len(rows), 1))
    return LogprobsBlock.of_rectangle(token_ids, values, ranks)


# ---------------------------------------------------------------- the front end


@dataclass
class Answer:
    """What one sequence got so far."""

    token_ids: list[int] = field(default_factory=list)
    num_rows: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class ScriptedEngine:
    """Scheduler and scripted runner, stepped together; every answer is checked against the script as it comes."""

    def __init__(self, config: VllmConfig, num_blocks: int) -> None:
        self.config = config
        self.scheduler = Scheduler(config, num_blocks)
        self.runner = ScriptedRunner(config, num_blocks)
        self.messages: dict[str, EngineCoreRequest] = {}
        self.answers: dict[str, Answer] = {}
        self.family_of: dict[str, str] = {}
        self.num_prompt_rows: Counter[str] = Counter()
        self.failed: dict[str, str] = {}
        self.last_plan: SchedulerOutput | None = None

    def add(self, message: EngineCoreRequest) -> None:
        self.scheduler.add_request(message)
        self.messages[message.request_id] = message
        for child_id in message.child_ids:
            self.answers[child_id] = Answer()
            self.family_of[child_id] = message.request_id

    def abort(self, *request_ids: str) -> None:
        self.scheduler.abort_requests(request_ids)
        for child_id, family_id in self.family_of.items():
            if (child_id in request_ids or family_id in request_ids) and self.answers[child_id].finish_reason is None:
                self.answers[child_id].finish_reason = FinishReason.ABORT

    def step(self) -> EngineCoreOutputs:
        plan = self.start_step()
        return self.end_step(plan, self.runner.execute_model(plan))

    def start_step(self) -> SchedulerOutput:
        plan = self.last_plan = self.scheduler.schedule()
        check_invariants(self.scheduler)
        return plan

    def end_step(self, plan: SchedulerOutput, made: ModelRunnerOutput) -> EngineCoreOutputs:
        outputs = self.scheduler.update_from_output(plan, made)
        check_invariants(self.scheduler)
        for scores in outputs.prompt_scores:
            self._take_prompt_scores(scores, outputs.logprobs)
        for output in outputs.list_outputs():
            self._take_output(output, outputs.logprobs)
        return outputs

    def run(self, max_steps: int = 3000) -> "ScriptedEngine":
        """Step to the end; an engine that stands still or runs for ever fails."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                self.check_all_ended()
                return self
            outputs = self.step()
            is_forward = self.last_plan.total_num_scheduled_tokens or outputs.list_outputs() or outputs.prompt_scores
            assert is_forward, "a step brought nothing forward"
        raise AssertionError(f"not done after {max_steps} steps")

    def check_all_ended(self) -> None:
        """Check that each sequence got all that the script says, and that nothing is held any more."""
        for child_id, answer in self.answers.items():
            assert answer.finish_reason is not None, f"{child_id} never ended"
            message = self.messages[self.family_of[child_id]]
            if answer.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
                told = tell_tokens(message, message.child_ids.index(child_id), self.config.model_config.max_model_len)
                assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == told, child_id
                wants_rows = message.sampling_params.prompt_logprobs is not None
                num_prompt = len(message.prompt_token_ids)
                num_rows = num_prompt - message.sampling_params.first_scored(num_prompt) if wants_rows else 0
                assert self.num_prompt_rows[message.request_id] == num_rows, f"{child_id} lacks prompt rows"
        scheduler = self.scheduler
        assert not scheduler.requests and not scheduler.children and not scheduler.running and not scheduler.waiting
        assert scheduler.kv.num_used_blocks == 0, "blocks leaked"
        assert set(self.runner.batch) == set(scheduler._left_ids) == scheduler._ids_in_runner, (
            "the runner keeps the dead"
        )

    def _take_prompt_scores(self, scores, block: LogprobsBlock | None) -> None:
        message = self.messages[scores.request_id]
        rows = read_rows(scores, block)
        marks: list[int] = []
        extend_marks(marks, message.prompt_token_ids)
        for i in range(len(rows)):
            first = message.sampling_params.first_scored(len(message.prompt_token_ids))
            place = first + self.num_prompt_rows[scores.request_id]
            check_row(
                rows, i, message.prompt_token_ids[place], marks[place - 1], message.sampling_params.prompt_logprobs
            )
            self.num_prompt_rows[scores.request_id] += 1

    def _take_output(self, output, block: LogprobsBlock | None) -> None:
        if output.finish_reason is FinishReason.ERROR:
            assert output.request_id in self.messages and output.request_id not in self.failed, "one answer a family"
            self.failed[output.request_id] = output.error
            for child_id, family_id in self.family_of.items():
                if family_id == output.request_id and self.answers[child_id].finish_reason is None:
                    self.answers[child_id].finish_reason = FinishReason.ERROR
            return
        answer = self.answers[output.request_id]
        assert answer.finish_reason is None, f"{output.request_id} spoke after its end"
        message = self.messages[self.family_of[output.request_id]]
        marks: list[int] = []
        extend_marks(marks, message.prompt_token_ids + answer.token_ids)
        answer.token_ids += output.new_token_ids
        k = message.sampling_params.num_logprobs
        if k is None or not output.new_token_ids:
            assert output.rows is None and output.full_rows is None
        else:
            rows = read_rows(output, block)
            assert len(rows) == len(output.new_token_ids)
            for i, token_id in enumerate(output.new_token_ids):
                check_row(rows, i, token_id, marks[-1], k)
                extend_marks(marks, message.prompt_token_ids + answer.token_ids[: answer.num_rows + i + 1])
            answer.num_rows += len(rows)
        answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
        # Told with the first token, and again when they change.
        answer.num_cached_tokens = max(answer.num_cached_tokens, output.num_cached_tokens)
        answer.num_preemptions = max(answer.num_preemptions, output.num_preemptions)


def read_rows(scores, block: LogprobsBlock | None) -> FlatLogprobs:
    """Return the rows of an output, or of a prompt."""
    if scores.rows is None:
        return FlatLogprobs.of_rows([row for piece in scores.full_rows for row in piece.split()])
    return FlatLogprobs.of_rows([*block.split()][slice(*scores.rows)])


def check_row(rows: FlatLogprobs, i: int, chosen: int, mark: int, k: int) -> None:
    """Check that a row is that of a token after its own history, and holds what was asked for and no more."""
    token_ids, values, _ = rows.row_values(i)
    assert token_ids[0] == chosen, "a row of another token"
    assert values[0] == get_row_value(mark), "a row of another history"
    assert len(token_ids) == min(1 + k, VOCAB_SIZE)


# ---------------------------------------------------------------- invariants


def check_invariants(scheduler: Scheduler) -> None:
    """Check that blocks have the owners that the tables name, stand in one place, and that prefixes are true."""
    kv, pool = scheduler.kv, scheduler.kv.pool
    requests = list(scheduler.requests.values())
    holders: dict[int, Request | SharedBlocks] = {id(request): request for request in requests}
    num_holders: Counter[int] = Counter()
    for request in requests:
        if request.shared_blocks is not None:
            assert not request.block_ids, f"{request.request_id} owns and shares"
            holders[id(request.shared_blocks)] = request.shared_blocks
            num_holders[id(request.shared_blocks)] += 1
    for key, num in num_holders.items():
        assert holders[key].num_holders == num
    owners = Counter(block_id for holder in holders.values() for block_id in holder.block_ids)
    assert [owners[block_id] for block_id in range(pool.num_blocks)] == pool.num_owners, "owners are miscounted"
    free = list(pool._free)
    assert sorted(free) == [b for b in range(pool.num_blocks) if pool.num_owners[b] == 0], "free and owned at once"
    assert {h: b for b, h in pool._hash_of_block.items()} == pool._block_of_hash

    running = {id(request) for request in scheduler.running}
    idle = {key for key, holder in holders.items() if holder.block_ids and key not in running}
    assert set(kv._idle) == idle, "idle holders are lost or invented"
    assert [r.precedence for r in scheduler.running] == sorted(r.precedence for r in scheduler.running)
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    waiting = {id(request) for request in scheduler.waiting._requests.values()}
    without_work = {id(request) for request in scheduler._without_work.values()}
    assert running | waiting | without_work == {id(request) for request in requests}, "a request is nowhere"
    assert scheduler.waiting.num_sequences == sum(len(r.seeds) for r in scheduler.waiting._requests.values())
    live = {family: set(children) for family, children in scheduler.children.items()}
    for family, children in live.items():
        assert children and children == {r.request_id for r in requests if r.family_id == family}
