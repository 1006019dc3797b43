"""From what the core sends after each step to the outputs that callers see."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.input_processor import ProcessedRequest
from vllm.v1.engine.parallel_sampling import ChildState, OutputSink, ParentRequest, QuietBatch, StepScores
from vllm.v1.messages import DecodeBatchTokens, EngineCoreOutput, EngineCoreOutputs, FinishReason

logger = init_logger(__name__)


class ProcessedOutputs(NamedTuple):
    """What one step comes to."""

    request_outputs: list[RequestOutput]  # of the requests without a collector
    ids_to_abort: list[str]  # children that a stop string ended: the core does not know


class OutputProcessor:
    """Keeps every live request's state and turns the core's steps into `RequestOutput`s."""

    def __init__(self, tokenizer: Tokenizer | None, *, stream_interval: int = 1, log_stats: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._log_stats = log_stats
        self._children: dict[str, ChildState] = {}
        self._parents: dict[str, ParentRequest] = {}  # internal id →
        self._quiet: QuietBatch | None = None  # those of the last step, if there were no others in it
        self._by_caller: dict[str, list[ParentRequest]] = {}  # the caller's id →; an id may be live more than once

    def add_request(self, processed: ProcessedRequest, collector: OutputSink | None = None) -> None:
        """Take a request that is about to go to the core; its outputs go to `collector` if there is one."""
        parent = ParentRequest(
            processed,
            self._tokenizer,
            stream_interval=self._stream_interval,
            collector=collector,
            log_stats=self._log_stats,
        )
        self._parents[parent.internal_id] = parent
        self._by_caller.setdefault(parent.request_id, []).append(parent)
        for child in parent.children:
            self._children[child.child_id] = child

    def has_unfinished_requests(self) -> bool:
        return bool(self._parents)

    @property
    def num_unfinished_requests(self) -> int:
        """Requests as callers count them: a family is one."""
        return len(self._parents)

    def get_live_ids(self) -> list[str]:
        """Return the engine's own ids of all unfinished requests."""
        return list(self._parents)

    def process_outputs(self, core_outputs: EngineCoreOutputs) -> ProcessedOutputs:
        """Take one step's outputs; those of requests that are gone meanwhile are passed over."""
        scores = StepScores(core_outputs.logprobs)
        for prompt_scores in core_outputs.prompt_scores:
            if (parent := self._parents.get(prompt_scores.request_id)) is not None:
                parent.add_prompt_scores(prompt_scores, scores)
        ids_to_abort: list[str] = []
        advanced: dict[str, list[ChildState]] = {}  # in the order in which requests came up
        if core_outputs.outputs:
            self._settle_quiet()
        for output in core_outputs.outputs:
            if output.finish_reason is FinishReason.ERROR:
                self._fail(output, advanced, ids_to_abort)
                continue
            child = self._children.get(output.request_id)
            if child is None:
                continue
            parent = child.parent
            if child.update(output, scores):
                ids_to_abort.append(child.child_id)
            parent.note_step(child, output, core_outputs.timestamp)
            if child.finish_reason is not None:
                del self._children[child.child_id]
            if parent.has_to_tell(child):
                advanced.setdefault(parent.internal_id, []).append(child)
        request_outputs: list[RequestOutput] = []
        if core_outputs.decode_batch is not None:
            told = ProcessedOutputs(request_outputs, ids_to_abort)
            self._take_continued(core_outputs.decode_batch, scores, core_outputs.timestamp, advanced, told)
        self._deliver(advanced, request_outputs)
        return ProcessedOutputs(request_outputs, ids_to_abort)

    def _take_continued(
        self,
        continued: DecodeBatchTokens,
        scores: StepScores,
        timestamp: float,
        advanced: dict[str, list[ChildState]],
        told: ProcessedOutputs,
    ) -> None:
        """Take the tokens of the sequences that just go on; this is what a token costs in most steps."""
        if self._quiet is not None:
            if self._quiet.take(continued, scores):
                if self._log_stats:
                    self._quiet.count_tokens(timestamp)
                return
            self._settle_quiet()
        request_ids, rows = continued.request_ids, continued.rows
        pieces, values = scores.packed.cut(rows) if rows else ([], [])
        get_child, log_stats = self._children.get, self._log_stats
        quiet: list[ChildState] = []
        for request_id, token_id, row, piece, value in zip_longest(
            request_ids, continued.token_ids, rows, pieces, values
        ):
            child = get_child(request_id)
            if child is None:
                continue
            if log_stats:
                child.parent.count_tokens(1, timestamp)
            taken = child.pieces
            if child.is_quiet and (row is None or taken is not None):
                quiet.append(child)
                child.token_ids.append(token_id)
                if taken is not None and row is not None:
                    taken.append(piece)
                    child.cumulative_logprob += value  # type: ignore[operator]  # a number, where rows are
                continue
            if child.is_streamed and (row is None or taken is not None):
                output = child.parent.make_next_delta(child, token_id, piece, value)
                if child.parent.collector is None:
                    told.request_outputs.append(output)
                else:
                    child.parent.collector.put(output)
                continue
            if child.take_token(token_id, scores, row):
                told.ids_to_abort.append(request_id)
                del self._children[request_id]
                child.parent.num_unfinished -= 1
            if child.parent.has_to_tell(child):
                advanced.setdefault(child.parent.internal_id, []).append(child)
        if len(quiet) == len(request_ids):
            self._quiet = QuietBatch(request_ids, quiet, rows)

    def _settle_quiet(self) -> None:
        """Bring the sequences that go on unseen up to date: before anything else is done with any of them."""
        if self._quiet is not None:
            self._quiet.settle()
            self._quiet = None

    def abort_requests(self, ids: Iterable[str]) -> list[str]:
        """Forget the requests with these ids, the caller's or internal ones; return the ids to abort in the core.

        A request with a collector gets a last output there: its unfinished children end with reason "abort".
        Unknown ids are passed over.
        """
        self._settle_quiet()
        core_ids: list[str] = []
        for request_id in ids:
            parents = list(self._by_caller.get(request_id, ()))
            if (by_internal_id := self._parents.get(request_id)) is not None:
                parents.append(by_internal_id)
            for parent in parents:
                ended = parent.end_unfinished(FinishReason.ABORT)
                self._forget(parent)
                core_ids.append(parent.internal_id)
                if parent.collector is not None:
                    parent.collector.put(parent.make_output(ended))
        return core_ids

    def _fail(self, output: EngineCoreOutput, advanced: dict[str, list[ChildState]], ids_to_abort: list[str]) -> None:
        """End the whole request whose logits were no numbers: in a family the parent fails."""
        child = self._children.get(output.request_id)
        parent = self._parents.get(output.request_id) if child is None else child.parent
        if parent is None:
            return
        parent.error = output.error or "the engine gave no reason"
        logger.warning("request %s failed: %s", parent.request_id, parent.error)
        if child is not None and len(parent.children) > 1:
            ids_to_abort.append(parent.internal_id)
        ended = parent.end_unfinished(FinishReason.ERROR)
        told = advanced.setdefault(parent.internal_id, [])
        told += [child for child in ended if child not in told]

    def _deliver(self, advanced: dict[str, list[ChildState]], request_outputs: list[RequestOutput]) -> None:
        """Make the outputs of the requests that advanced; those without a collector are added to the list."""
        for internal_id, children in advanced.items():
            parent = self._parents[internal_id]
            request_output = parent.make_output(children)
            if parent.num_unfinished == 0:
                self._forget(parent)
            if parent.collector is None:
                request_outputs.append(request_output)
            elif parent.error is not None:
                parent.collector.put(EngineGenerateError(parent.error))
            else:
                parent.collector.put(request_output)

    def _forget(self, parent: ParentRequest) -> None:
        del self._parents[parent.internal_id]
        for child in parent.children:
            self._children.pop(child.child_id, None)
        live = self._by_caller[parent.request_id]
        live.remove(parent)
        if not live:
            del self._by_caller[parent.request_id]
