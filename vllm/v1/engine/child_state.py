"""One sequence on the front end's side: its tokens, text and scores so far, and how much of them was handed out."""

from collections.abc import Sequence

from vllm.logprobs import FlatLogprobs
from vllm.logprobs.block import BlockReader
from vllm.logprobs.rows import Row, read_chosen_value
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import Detokenizer
from vllm.v1.engine.logprobs import SequenceTexts
from vllm.v1.messages import EngineCoreOutput, FinishReason, PromptScores


def read_rows(scores: EngineCoreOutput | PromptScores, reader: BlockReader | None) -> list[Row]:
    """Return the rows that a step brought one sequence or prompt."""
    if scores.full_rows is not None:
        return [row for piece in scores.full_rows for row in piece.split()]
    if scores.rows is None:
        return []
    assert reader is not None, f"{scores.request_id}: rows came without their block"
    return [*reader.read(range(*scores.rows))]


class ChildState:
    """One sequence: what it has so far, and how much of that its caller has seen."""

    __slots__ = (
        "child_id",
        "cumulative_logprob",
        "detokenizer",
        "finish_reason",
        "index",
        "is_streamed",
        "is_unseen",
        "num_shown",
        "rows",
        "stop_reason",
        "texts",
        "token_ids",
    )

    def __init__(
        self,
        child_id: str,
        index: int,
        detokenizer: Detokenizer,
        *,
        is_scored: bool,
        texts: SequenceTexts | None,  # of `token_ids`
        token_ids: list[int],  # still empty
        is_unseen: bool,
        is_streamed: bool,
    ) -> None:
        self.child_id = child_id
        self.index = index
        self.detokenizer = detokenizer
        self.rows: list[Row] | None = [] if is_scored else None  # one a token, of those not handed out as a delta
        self.texts = texts
        self.token_ids = token_ids
        self.cumulative_logprob = 0.0 if is_scored else None
        self.num_shown = 0  # tokens handed out
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        # Each token is an output of its own, and can't end the sequence.
        self.is_streamed = is_streamed and not detokenizer.stop
        # Nobody sees anything of it before its end, and its text can't end it: all text is made then.
        self.is_unseen = is_unseen and not detokenizer.stop

    def update(self, output: EngineCoreOutput, reader: BlockReader | None) -> bool:
        """Take what one step brought; return whether a stop string ended a sequence that the core would go on with."""
        rows = read_rows(output, reader)
        values = [read_chosen_value(row) for row in rows]
        return self.advance(output.new_token_ids, rows, values, output.finish_reason, output.stop_reason)

    def advance(
        self,
        new_token_ids: list[int],
        rows: Sequence[Row],
        values: Sequence[float],  # of the chosen tokens
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> bool:
        """Take the next tokens and their rows; return whether a stop string ended what would go on otherwise."""
        stop = None
        if not self.is_unseen:
            stop = self.detokenizer.update(new_token_ids, stop_terminated=finish_reason is FinishReason.STOP)
        if stop is not None:
            new_token_ids = new_token_ids[: self.detokenizer.num_tokens - len(self.token_ids)]
        self.token_ids += new_token_ids
        if self.rows is not None:
            num_new = len(new_token_ids)
            assert len(rows) >= num_new, f"{self.child_id}: tokens came without their logprobs"
            self.rows += rows[:num_new]
            for value in values[:num_new]:
                self.cumulative_logprob += value  # type: ignore[operator]  # a number, where rows are
        ended_here = stop is not None and finish_reason is None
        self.finish_reason = finish_reason if stop is None else FinishReason.STOP
        self.stop_reason = stop_reason if stop is None else stop
        return ended_here

    def make_next_delta(self, token_id: int, row: bytes | None, value: float) -> CompletionOutput:
        """Take one token of an `is_streamed` sequence that goes on, and return it as its next delta."""
        self.token_ids.append(token_id)
        number = self.num_shown
        self.num_shown = number + 1
        text = self.detokenizer.take_token(token_id)
        if row is None:
            return CompletionOutput(self.index, text, [token_id], None, None)
        self.cumulative_logprob += value  # type: ignore[operator]  # a number, where rows are
        scores = FlatLogprobs.of_one_row(row, self.texts, number)
        return CompletionOutput(self.index, text, [token_id], self.cumulative_logprob, scores)

    def make_completion(self, kind: RequestOutputKind, index: int) -> CompletionOutput:
        """Return what there is to report, as `kind` wants it; nothing in it changes afterwards."""
        finish_reason = self.finish_reason
        is_delta = kind is RequestOutputKind.DELTA
        if self.is_unseen:
            unread = self.token_ids[self.detokenizer.num_tokens :]
            self.detokenizer.update(unread, stop_terminated=finish_reason is FinishReason.STOP)
        text = self.detokenizer.take_new_text(finish_reason is not None, is_delta)
        if finish_reason is FinishReason.LENGTH and self.texts is not None:
            self.texts.end()
        first = self.num_shown if is_delta else 0
        scores = None
        if self.rows is not None:
            scores = FlatLogprobs.of_rows(self.rows, self.texts, first)
            if is_delta:
                self.rows = []
        token_ids = self.token_ids[first:]
        self.num_shown = len(self.token_ids)
        return CompletionOutput(
            index,
            text,
            token_ids,
            self.cumulative_logprob,
            scores,
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=self.stop_reason,
        )
