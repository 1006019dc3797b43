"""From what the core sends after each step to the outputs that callers see."""

from collections.abc import Iterable
from typing import NamedTuple

from vllm.logger import init_logger
from vllm.logprobs.block import BlockReader
from vllm.outputs import RequestOutput
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.child_state import ChildState
from vllm.v1.engine.decode_batch import DecodeBatch, Member
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.input_processor import ProcessedRequest
from vllm.v1.engine.parallel_sampling import OutputSink, ParentRequest
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
        self._members: dict[str, Member] = {}  # child id →
        self._parents: dict[str, ParentRequest] = {}  # internal id →
        self._batch: DecodeBatch | None = None  # of the last step
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
            self._members[child.child_id] = (parent, child)

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
        reader = None if core_outputs.logprobs is None else BlockReader(core_outputs.logprobs)
        for prompt_scores in core_outputs.prompt_scores:
            if (prompt_parent := self._parents.get(prompt_scores.request_id)) is not None:
                prompt_parent.add_prompt_scores(prompt_scores, reader)
        processed = ProcessedOutputs([], [])
        advanced: dict[str, list[ChildState]] = {}  # in the order in which requests came up
        if core_outputs.outputs and self._batch is not None:
            self._batch.hand_over()
        for output in core_outputs.outputs:
            if output.finish_reason is FinishReason.ERROR:
                self._fail(output, advanced, processed.ids_to_abort)
                continue
            member = self._members.get(output.request_id)
            if member is None:
                continue
            parent, child = member
            if child.update(output, reader):
                processed.ids_to_abort.append(child.child_id)
            parent.note_step(child, output, core_outputs.timestamp)
            if child.finish_reason is not None:
                del self._members[child.child_id]
            if parent.has_output(child):
                advanced.setdefault(parent.internal_id, []).append(child)
        if core_outputs.decode_batch is not None:
            self._take_decode_batch(core_outputs.decode_batch, reader, core_outputs.timestamp, advanced, processed)
        self._deliver(advanced, processed.request_outputs)
        return processed

    def _take_decode_batch(
        self,
        tokens: DecodeBatchTokens,
        reader: BlockReader | None,
        timestamp: float,
        advanced: dict[str, list[ChildState]],
        processed: ProcessedOutputs,
    ) -> None:
        """Take one token each; this is what a token costs in most steps."""
        batch, log_stats = self._batch, self._log_stats
        if batch is None or not batch.is_of(tokens):
            self._end_batch()
            self._batch = batch = DecodeBatch(tokens, self._members)
        batch.keep(tokens, reader, timestamp)
        for (parent, child), token_id, row, value in batch.streamed.iterate(tokens, reader):
            if log_stats:
                parent.count_tokens(1, timestamp)
            output = parent.make_next_delta(child, token_id, row, value)
            if parent.collector is None:
                processed.request_outputs.append(output)
            else:
                parent.collector.put(output)
        for (parent, child), token_id, row, value in batch.others.iterate(tokens, reader):
            if log_stats:
                parent.count_tokens(1, timestamp)
            if child.advance([token_id], () if row is None else (row,), (value,)):
                processed.ids_to_abort.append(child.child_id)
                del self._members[child.child_id]
                parent.num_unfinished -= 1
                self._end_batch()
            if parent.has_output(child):
                advanced.setdefault(parent.internal_id, []).append(child)

    def _end_batch(self) -> None:
        """Bring the members of the last batch up to date; the next one looks for its members anew."""
        if self._batch is not None:
            self._batch.hand_over()
            self._batch = None

    def abort_requests(self, ids: Iterable[str]) -> list[str]:
        """Forget the requests with these ids, the caller's or internal ones; return the ids to abort in the core.

        A request with a collector gets a last output there: its unfinished children end with reason "abort".
        Unknown ids are passed over.
        """
        self._end_batch()
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
        parent, child = self._members.get(output.request_id, (self._parents.get(output.request_id), None))
        if parent is None:
            return
        self._end_batch()
        parent.error = output.error or "the engine gave no reason"
        logger.warning("request %s failed: %s", parent.request_id, parent.error)
        if child is not None and len(parent.children) > 1:
            ids_to_abort.append(parent.internal_id)
        ended = parent.end_unfinished(FinishReason.ERROR)
        reported = advanced.setdefault(parent.internal_id, [])
        reported += [child for child in ended if child not in reported]

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
            self._members.pop(child.child_id, None)
        live = self._by_caller[parent.request_id]
        live.remove(parent)
        if not live:
            del self._by_caller[parent.request_id]
