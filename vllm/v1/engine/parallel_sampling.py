"""A request on the front end's side: its children, its prompt's scores, and the outputs made of them.

Every request is a `ParentRequest`; a plain one has a single child. A greedy request with n > 1 has a single child as
well, which is answered n times: n greedy continuations are the same one.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from vllm.logprobs import FlatLogprobs, PromptLogprobs
from vllm.logprobs.block import BlockReader
from vllm.logprobs.rows import NO_SCORES, Row
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.child_state import ChildState, read_rows
from vllm.v1.engine.detokenizer import make_detokenizer
from vllm.v1.engine.input_processor import ProcessedRequest
from vllm.v1.engine.logprobs import SequenceTexts, make_token_texts
from vllm.v1.messages import EngineCoreOutput, FinishReason, PromptScores
from vllm.v1.metrics.stats import RequestStateStats


class OutputSink(Protocol):
    """Where a request's outputs go when they are not handed to whoever steps the engine."""

    def put(self, item: RequestOutput | BaseException) -> None: ...


class ParentRequest:
    """A request as its caller sees it, whatever number of sequences answer it."""

    __slots__ = (
        "_has_answered",
        "_prompt_logprobs",
        "_prompt_rows",
        "_prompt_texts",
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
        self._prompt_rows: list[Row] | None = None
        self._prompt_texts: SequenceTexts | None = None
        prompt = core_request.prompt_token_ids
        if params.prompt_logprobs is not None:
            self._prompt_rows = [NO_SCORES] * params.first_scored(len(prompt))
            is_whole = params.max_tokens == 0
            self._prompt_texts = make_token_texts(tokenizer, prompt, params, is_whole=is_whole)
        is_scored = params.num_logprobs is not None
        is_streamed = (
            self.kind is RequestOutputKind.DELTA
            and self.stream_interval == self.num_copies == len(core_request.seeds) == 1
        )
        self.children: list[ChildState] = []
        for index, child_id in enumerate(core_request.child_ids):
            token_ids: list[int] = []
            child = ChildState(
                child_id,
                index,
                make_detokenizer(tokenizer, prompt, params),
                is_scored=is_scored,
                texts=make_token_texts(tokenizer, token_ids, params, context=prompt) if is_scored else None,
                token_ids=token_ids,
                is_unseen=self.kind is RequestOutputKind.FINAL_ONLY,
                is_streamed=is_streamed,
            )
            self.children.append(child)
        self.num_unfinished = len(self.children)

    def add_prompt_scores(self, scores: PromptScores, reader: BlockReader | None) -> None:
        """Take the next rows of the prompt."""
        assert self._prompt_rows is not None, f"{self.internal_id}: prompt logprobs came that nobody asked for"
        self._prompt_rows += read_rows(scores, reader)

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

    def has_output(self, child: ChildState) -> bool:
        """Return whether the step that `child` just made is worth an output."""
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
            self._prompt_logprobs = FlatLogprobs.of_rows(self._prompt_rows, self._prompt_texts)
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
