"""Whose scored row is which: from what the runner made to what each sequence gets."""

from vllm.logprobs import FlatLogprobs
from vllm.v1.messages import EngineCoreOutput, ModelRunnerOutput, PromptScores, RowRange
from vllm.v1.request import Request


def take_sample_rows(
    made: ModelRunnerOutput, request_id: str, num_draws: int
) -> list[tuple[RowRange | None, FlatLogprobs | None]]:
    """Return each draw's one row: its place in the step's block, or a block of its own."""
    full_rows = made.full_sample_rows.get(request_id)
    if full_rows is not None:
        assert len(full_rows) == num_draws, f"{request_id}: {len(full_rows)} rows for {num_draws} draws"
        if num_draws == 1:
            return [(None, full_rows)]
        return [(None, full_rows.take_rows(i, i + 1)) for i in range(num_draws)]
    rows = made.sample_rows[request_id]
    assert rows.end - rows.first == num_draws, f"{request_id}: {rows} for {num_draws} draws"
    return [(RowRange(row, row + 1), None) for row in range(*rows)]


def take_prompt_scores(made: ModelRunnerOutput, request_id: str, num_rows: int) -> PromptScores:
    """Return the rows of the prompt tokens that a step scored."""
    full_rows = made.full_prompt_rows.get(request_id)
    rows = made.prompt_rows[request_id] if full_rows is None else RowRange(0, len(full_rows))
    assert rows.end - rows.first == num_rows, f"{request_id}: {rows} for {num_rows} prompt tokens"
    return PromptScores(request_id=request_id, rows=rows if full_rows is None else None, full_rows=full_rows)


def make_output(
    request: Request,
    new_token_ids: list[int],
    rows: RowRange | None = None,
    full_rows: FlatLogprobs | None = None,
) -> EngineCoreOutput:
    """Return what a step brought a sequence, and its end if it has come to one."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        rows=rows,
        full_rows=full_rows,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_preemptions=request.num_preemptions,
        scheduled_ts=request.scheduled_ts,
    )
