"""A request and its children on the front end's side: what each has so far, and the outputs made of it.

Every request is a `ParentRequest`; a plain one has a single child. A greedy request with n > 1 has a single child as
well, which is answered n times: n greedy continuations are the same one.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from vllm.logprobs import FlatLogprobs, PromptLogprobs
from vllm.logprobs_buffer import LogprobsBuffer
from vllm.logprobs_packed import PackedBlock, PackedRows, PackedStep, regroup
from vllm.logprobs_rows import TokenTexts
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.detokenizer import Detokenizer, make_detokenizer
from vllm.v1.engine.input_processor import ProcessedRequest
from vllm.v1.engine.logprobs import SequenceTexts, make_token_texts
from vllm.v1.messages import DecodeBatchTokens, EngineCoreOutput, FinishReason, PromptScores
from vllm.v1.metrics.stats import RequestStateStats

_MOST_KEPT_STEPS = 256  # of a quiet batch: what they come to is done in one step


class OutputSink(Protocol):
    """Where a request's outputs go when they are not handed to whoever steps the engine."""

    def put(self, item: RequestOutput | BaseException) -> None: ...


class StepScores:
    """The logprobs of one step: its block, and the same packed once for all children."""

    __slots__ = ("_packed", "block")

    def __init__(self, block: FlatLogprobs | None) -> None:
        self.block = block
        self._packed: PackedStep | None = None

    @property
    def packed(self) -> PackedStep:
        if self._packed is None:
            assert self.block is not None, "a step's rows came without their block"
            self._packed = PackedStep(self.block._pack())
        return self._packed


class ChildState:
    """One sequence: its tokens, text and scores so far, and how much of them has been handed out."""

    __slots__ = (
        "child_id",
        "cumulative_logprob",
        "detokenizer",
        "finish_reason",
        "index",
        "is_quiet",
        "is_streamed",
        "logprobs",
        "num_shown",
        "parent",
        "pieces",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        parent: "ParentRequest",
        child_id: str,
        index: int,
        detokenizer: Detokenizer,
        logprobs: LogprobsBuffer | PackedRows | None,
        token_ids: list[int],
    ) -> None:
        self.parent = parent
        self.child_id = child_id
        self.index = index
        self.detokenizer = detokenizer
        self.logprobs = logprobs
        self.pieces = logprobs.pieces if isinstance(logprobs, PackedRows) else None  # where its next row goes
        self.token_ids = token_ids
        self.cumulative_logprob = None if logprobs is None else 0.0
        self.num_shown = 0  # tokens handed out
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        # Each token is an output of its own, and can't end it.
        self.is_streamed = parent.streams_each_token and not detokenizer.stop
        # Nobody sees anything of it before its end, and its text can't end it: the text is made then, at one go.
        self.is_quiet = parent.kind is RequestOutputKind.FINAL_ONLY and not detokenizer.stop

    def update(self, output: EngineCoreOutput, scores: StepScores) -> bool:
        """Take what one step brought; return whether a stop string ended a sequence that the core would go on with."""
        new_token_ids = output.new_token_ids
        finish_reason = output.finish_reason
        num_new = len(new_token_ids)
        stop = None
        if not self.is_quiet:
            stop = self.detokenizer.update(new_token_ids, stop_terminated=finish_reason is FinishReason.STOP)
        if stop is not None:
            num_new = self.detokenizer.num_tokens - len(self.token_ids)
            new_token_ids = new_token_ids[:num_new]
        self.token_ids += new_token_ids
        if self.logprobs is not None and num_new > 0:
            if output.full_rows is not None:
                self._take_block(output.full_rows, num_new)
            else:
                assert output.rows is not None, f"{self.child_id}: tokens came without their logprobs"
                for row in range(output.rows.first, output.rows.first + num_new):
                    self._take_row(scores, row)
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
            return finish_reason is None
        self.finish_reason, self.stop_reason = finish_reason, output.stop_reason
        return False

    def take_token(self, token_id: int, scores: StepScores, row: int | None) -> bool:
        """Take one token of a sequence that goes on, as `update` does."""
        self.token_ids.append(token_id)
        if row is not None:
            self._take_row(scores, row)
        stop = self.detokenizer.update((token_id,))
        if stop is None:
            return False
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return True

    def make_next_delta(self, token_id: int, row: bytes | None, value: float) -> CompletionOutput:
        """Take one token of an `is_streamed` sequence that goes on, and return it as its next delta."""
        self.token_ids.append(token_id)
        self.num_shown += 1
        text = self.detokenizer.take_token(token_id)
        logprobs = self.logprobs
        if row is None or not isinstance(logprobs, PackedRows):
            return CompletionOutput(self.index, text, [token_id], None, None)
        assert self.cumulative_logprob is not None
        self.cumulative_logprob += value
        first_row = logprobs.num_taken
        logprobs.num_taken = first_row + 1
        taken = FlatLogprobs._of_packed(row, logprobs.texts, first_row)
        return CompletionOutput(self.index, text, [token_id], self.cumulative_logprob, taken)

    def _take_row(self, scores: StepScores, row: int) -> None:
        logprobs = self.logprobs
        if isinstance(logprobs, PackedRows):
            logprobs.append(scores.packed, row)
        else:
            assert logprobs is not None and scores.block is not None, f"{self.child_id}: nobody asked for logprobs"
            logprobs.append_rows(scores.block, row, row + 1)
        assert self.cumulative_logprob is not None
        self.cumulative_logprob += scores.packed.chosen_values[row]

    def _take_block(self, block: FlatLogprobs, num_rows: int) -> None:
        """Take rows that came in a block of their own: such a request's rows all do."""
        if isinstance(self.logprobs, PackedRows):
            assert not self.logprobs.pieces, f"{self.child_id}: rows of two forms"
            self.logprobs, self.pieces = LogprobsBuffer(texts=self.logprobs.texts), None
        assert self.logprobs is not None and self.cumulative_logprob is not None
        self.logprobs.append_rows(block, 0, num_rows)
        self.cumulative_logprob += sum(block.chosen_values()[:num_rows].tolist())

    def make_completion(self, kind: RequestOutputKind, index: int) -> CompletionOutput:
        """Return what there is to tell, as `kind` wants it; nothing in it changes afterwards."""
        finish_reason = self.finish_reason
        is_delta = kind is RequestOutputKind.DELTA
        if self.is_quiet:
            unread = self.token_ids[self.detokenizer.num_tokens :]
            self.detokenizer.update(unread, stop_terminated=finish_reason is FinishReason.STOP)
        text = self.detokenizer.take_new_text(finish_reason is not None, is_delta)
        logprobs = self.logprobs
        if finish_reason is FinishReason.LENGTH and logprobs is not None and isinstance(logprobs.texts, SequenceTexts):
            logprobs.texts.end()
        taken = None
        if isinstance(logprobs, PackedRows):
            packed, first_row = logprobs.take()
            self.pieces = logprobs.pieces
            taken = FlatLogprobs._of_packed(packed, logprobs.texts, first_row)
        elif logprobs is not None:
            taken = logprobs.take() if is_delta else logprobs.snapshot()
        token_ids = self.token_ids[self.num_shown if is_delta else 0 :]
        self.num_shown = len(self.token_ids)
        return CompletionOutput(
            index,
            text,
            token_ids,
            self.cumulative_logprob,
            taken,
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=self.stop_reason,
        )


class QuietBatch:
    """Quiet sequences that go on together step after step.

    Nobody looks at them before one ends or is aborted. Until then their steps are only kept; `settle` then gives each
    sequence what is its own of all of them at one go.
    """

    __slots__ = ("_blocks", "_children", "_request_ids", "_rows", "_token_ids")

    def __init__(self, request_ids: list[str], children: list[ChildState], rows: list[int]) -> None:
        self._children = children
        self._request_ids = request_ids
        self._rows = rows  # of the first ones
        self._token_ids: list[list[int]] = []
        self._blocks: list[PackedBlock] = []

    def take(self, continued: DecodeBatchTokens, scores: StepScores) -> bool:
        """Keep a step of just these sequences; return False, having done nothing, if it is another's."""
        if self._rows != continued.rows or self._request_ids != continued.request_ids:
            return False
        if self._rows:
            assert scores.block is not None, "a step's rows came without their block"
            block = scores.block._pack()
            has_others_rows = len(block.num_entries) != len(self._rows)  # a prompt's; kept, they would be held for long
            if has_others_rows or block.width == 0 or (self._blocks and block.width != self._blocks[0].width):
                return False
            self._blocks.append(block)
        self._token_ids.append(continued.token_ids)
        if len(self._token_ids) == _MOST_KEPT_STEPS:
            self.settle()
        return True

    def count_tokens(self, timestamp: float) -> None:
        """Count a step's tokens in the requests' statistics."""
        for child in self._children:
            child.parent.count_tokens(1, timestamp)

    def settle(self) -> None:
        """Give each sequence its tokens and rows."""
        for child, token_ids in zip(self._children, zip(*self._token_ids, strict=True), strict=False):
            child.token_ids += token_ids
        if self._blocks:
            scored = self._children[: len(self._rows)]
            runs, sums = regroup(self._blocks, self._rows, [child.cumulative_logprob or 0.0 for child in scored])
            for child, run, total in zip(scored, runs, sums, strict=True):
                assert child.pieces is not None, f"{child.child_id}: nobody asked for logprobs"
                child.pieces.append(run)
                child.cumulative_logprob = total
        self._token_ids, self._blocks = [], []


class ParentRequest:
    """A request as its caller sees it, whatever number of sequences answer it."""

    __slots__ = (
        "_has_answered",
        "_prompt_logprobs",
        "_prompt_rows",
        "children",
        "collector",
        "error",
        "internal_id",
        "kind",
        "num_cached_tokens",
        "num_copies",
        "num_unfinished",
        "prompt",
        "prompt_token_ids",
        "request_id",
        "stats",
        "stream_interval",
        "streams_each_token",
    )

    def __init__(
        self,
        processed: ProcessedRequest,
        tokenizer: Tokenizer | None,
        *,
        stream_interval: int = 1,
        collector: OutputSink | None = None,
        log_stats: bool = False,
    ) -> None:
        core_request = processed.core_request
        params = core_request.sampling_params
        self.request_id = processed.request_id
        self.internal_id = core_request.request_id
        self.prompt = processed.prompt_text
        self.prompt_token_ids = list(core_request.prompt_token_ids)  # the reader's own: the core reads the other
        self.kind = params.output_kind
        self.stream_interval = params.stream_interval or stream_interval
        self.num_copies = processed.num_copies
        self.collector = collector
        self.num_cached_tokens: int | None = None  # unknown before the first output
        self.error: str | None = None
        self.stats = RequestStateStats(arrival_time=core_request.arrival_time) if log_stats else None
        self._has_answered = False
        self._prompt_logprobs: FlatLogprobs | None = None
        self._prompt_rows: LogprobsBuffer | None = None
        prompt = core_request.prompt_token_ids
        if params.prompt_logprobs is not None:
            num_none = params.first_scored(len(prompt))
            texts = make_token_texts(tokenizer, prompt, params, is_whole=params.max_tokens == 0)
            self._prompt_rows = LogprobsBuffer(num_none=num_none, texts=texts)
        self.streams_each_token = (
            self.kind is RequestOutputKind.DELTA
            and self.stream_interval == self.num_copies == len(core_request.seeds) == 1
        )
        self.children = []
        for index, child_id in enumerate(core_request.child_ids):
            detokenizer = make_detokenizer(tokenizer, prompt, params)
            token_ids: list[int] = []
            logprobs: LogprobsBuffer | PackedRows | None = None
            if params.num_logprobs is not None:
                logprobs = self._make_buffer(make_token_texts(tokenizer, token_ids, params, context=prompt))
            self.children.append(ChildState(self, child_id, index, detokenizer, logprobs, token_ids))
        self.num_unfinished = len(self.children)

    def _make_buffer(self, texts: TokenTexts | None) -> LogprobsBuffer | PackedRows:
        if self.kind is RequestOutputKind.CUMULATIVE:
            return LogprobsBuffer(texts=texts)  # of which all snapshots share one memory
        return PackedRows(texts)

    def add_prompt_scores(self, prompt_scores: PromptScores, scores: StepScores) -> None:
        """Take the next rows of the prompt."""
        assert self._prompt_rows is not None, f"{self.internal_id}: prompt logprobs came that nobody asked for"
        if prompt_scores.full_rows is not None:
            self._prompt_rows.append_rows(prompt_scores.full_rows)
        elif prompt_scores.rows is not None:
            assert scores.block is not None, f"{self.internal_id}: prompt logprobs came without their block"
            self._prompt_rows.append_rows(scores.block, prompt_scores.rows.first, prompt_scores.rows.end)

    def note_step(self, child: ChildState, output: EngineCoreOutput, timestamp: float) -> None:
        """Take what belongs to the parent from a child's step."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if child.finish_reason is not None:
            self.num_unfinished -= 1
        if self.stats is not None:
            self.stats.num_preemptions = max(self.stats.num_preemptions, output.num_preemptions)
            self.count_tokens(len(output.new_token_ids), timestamp)

    def end_unfinished(self, reason: FinishReason) -> list[ChildState]:
        """End the children that still run and return them."""
        ended = [child for child in self.children if child.finish_reason is None]
        for child in ended:
            child.finish_reason = reason
        self.num_unfinished = 0
        return ended

    def has_to_tell(self, child: ChildState) -> bool:
        """Say whether the step that `child` just made is worth an output."""
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return self.num_unfinished == 0
        if self.stream_interval == 1 or child.num_shown == 0 or child.finish_reason is not None:
            return True
        return len(child.token_ids) - child.num_shown >= self.stream_interval

    def make_output(self, advanced: Sequence[ChildState]) -> RequestOutput:
        """Return an output with the children that advanced; FINAL_ONLY has them all, ordered by index."""
        if self.kind is RequestOutputKind.FINAL_ONLY:
            advanced = self.children
        completions = []
        for child in advanced:
            first = child.make_completion(self.kind, child.index)
            completions.append(first)
            if self.num_copies > 1:
                completions += [_copy_completion(first, index) for index in range(1, self.num_copies)]
        if len(completions) > 1:
            completions.sort(key=_get_index)
        return self._make_output(completions)

    def make_next_delta(self, child: ChildState, token_id: int, row: bytes | None, value: float) -> RequestOutput:
        """Return the output of one token of an `is_streamed` child."""
        return self._make_output([child.make_next_delta(token_id, row, value)])

    def _make_output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            None if self._prompt_rows is None else self._take_prompt_logprobs(),
            completions,
            self.num_unfinished == 0,
            None if self.stats is None else self.stats.copy(),
            num_cached_tokens=self.num_cached_tokens,
        )

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        if self._prompt_rows is None:
            return None
        if self._has_answered and self.kind is RequestOutputKind.DELTA:
            return []
        if len(self._prompt_rows) < len(self.prompt_token_ids):
            # Only what ended early may lack rows; half a list would look like a whole one.
            reasons = {child.finish_reason for child in self.children}
            assert reasons & {FinishReason.ABORT, FinishReason.ERROR}, (
                f"{self.internal_id}: prompt logprobs are missing"
            )
            return None
        self._has_answered = True
        if self._prompt_logprobs is None:
            self._prompt_logprobs = self._prompt_rows.snapshot()
        return self._prompt_logprobs

    def count_tokens(self, num_new: int, timestamp: float) -> None:
        """Count a child's new tokens in the request's statistics."""
        stats = self.stats
        if stats is None or num_new == 0:
            return
        if stats.num_generation_tokens == 0:
            stats.first_token_ts = timestamp
            stats.first_token_latency = time.time() - stats.arrival_time
        stats.last_token_ts = timestamp
        stats.num_generation_tokens += num_new * self.num_copies


def _get_index(completion: CompletionOutput) -> int:
    return completion.index


def _copy_completion(first: CompletionOutput, index: int) -> CompletionOutput:
    """Return the same answer for another index; the frozen logprobs are shared."""
    return CompletionOutput(
        index=index,
        text=first.text,
        token_ids=list(first.token_ids),
        cumulative_logprob=first.cumulative_logprob,
        logprobs=first.logprobs,
        finish_reason=first.finish_reason,
        stop_reason=first.stop_reason,
    )
