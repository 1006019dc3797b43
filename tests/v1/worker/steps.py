"""Hand-made requests and steps for the runner's tests."""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.messages import (
    BlockCopy,
    ModelRunnerOutput,
    NewRequest,
    PromptRange,
    RowRange,
    RunningRequests,
    SchedulerOutput,
)


def make_request(
    request_id: str,
    token_ids: list[int],
    *,
    block_ids: list[int] | None = None,
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    seeds: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
    stop_ids: list[int] | None = None,
    **params: Any,
) -> NewRequest:
    """Return a request in the form that the core sends: logprobs_mode is set, the default is greedy."""
    params = {"temperature": 0.0, "logprobs_mode": "raw_logprobs"} | params
    return NewRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=block_ids or [],
        sampling_params=SamplingParams(**params),
        seeds=[0] if seeds is None else seeds,
        min_tokens_stop_ids=stop_ids or [],
        bad_words_token_ids=bad_words or [],
    )


def make_step(
    new: list[NewRequest] | None = None,
    running: dict[str, tuple[int, list[int]]] | None = None,  # id → (computed tokens, new blocks)
    num_scheduled: dict[str, int] | None = None,
    prompt_ranges: dict[str, tuple[int, int]] | None = None,
    left: list[str] | None = None,
    copies: list[tuple[int, int]] | None = None,
    decode_batch_id: int | None = None,
) -> SchedulerOutput:
    """Return one step's work; new requests run all their tokens unless `num_scheduled` says otherwise."""
    new, running = new or [], running or {}
    scheduled = {item.request_id: len(item.token_ids) - item.num_computed_tokens for item in new}
    scheduled |= dict.fromkeys(running, 1)
    scheduled |= num_scheduled or {}
    return SchedulerOutput(
        new_requests=new,
        running=RunningRequests(
            request_ids=list(running),
            new_block_ids=[blocks for _, blocks in running.values()],
            num_computed_tokens=[computed for computed, _ in running.values()],
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        prompt_ranges={name: PromptRange(*bounds) for name, bounds in (prompt_ranges or {}).items()},
        left_request_ids=left or [],
        block_copies=[BlockCopy(*pair) for pair in copies or []],
        decode_batch_id=decode_batch_id,
    )


def get_tokens(output: ModelRunnerOutput) -> dict[str, list[int]]:
    """Return each request's tokens, one a draw."""
    sampled, tokens = output.sampled, dict[str, list[int]]()
    for request_id, draw, run in zip(sampled.request_ids, sampled.draws, sampled.token_ids, strict=True):
        assert draw == len(tokens.setdefault(request_id, [])), "draws are neighbours, in order"
        tokens[request_id] += run
    return tokens


def get_sample_rows(output: ModelRunnerOutput) -> dict[str, RowRange]:
    """Return the rows of each request's draws in the step's rectangle."""
    ranges: dict[str, RowRange] = {}
    for request_id, rows in zip(output.sampled.request_ids, output.sampled.rows, strict=True):
        if rows is not None and request_id not in output.full_sample_rows:
            before = ranges.get(request_id, RowRange(rows.first, rows.first))
            assert before.end == rows.first, "rows are torn apart"
            ranges[request_id] = RowRange(before.first, rows.end)
    return ranges
