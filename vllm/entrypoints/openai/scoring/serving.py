"""POST /v1/score/continuations and /generative_scoring: from a checked request to its answer."""

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request, Response

from vllm.entrypoints.openai.context import ServerContext, make_request_id
from vllm.entrypoints.openai.engine_calls import cancel_all, read_last, run_while_connected
from vllm.entrypoints.openai.prompts import check_cache_salt
from vllm.entrypoints.openai.sampling import check_priority
from vllm.entrypoints.openai.scoring.protocol import (
    MAX_LABELS,
    GenerativeScoringRequest,
    ScoreContinuationsRequest,
    ScoringRequest,
)
from vllm.entrypoints.openai.usage import make_usage
from vllm.entrypoints.scoring.batch import Dispatcher, ScoringBatch
from vllm.entrypoints.scoring.labels import encode_labels, gather_labels, make_label_pairs, tokenize_prompts
from vllm.entrypoints.scoring.pairs import JOINT, PairEncoder, ScoredPair
from vllm.entrypoints.scoring.results import ContinuationScore, as_json_number, describe_labels
from vllm.exceptions import VLLMValidationError
from vllm.inputs import ParsedPrompt

_encode = msgspec.json.Encoder().encode
_TOKEN_COLUMNS = ("token_ids", "logprobs", "ranks")


async def create_continuation_scores(
    request: Request, body: ScoreContinuationsRequest, server: ServerContext
) -> Response:
    """Answer a request for scores of given continuations."""
    model, request_id, priority = _prepare(request, body, server, "score")
    if len(body.contexts) != len(body.continuations):
        raise VLLMValidationError(
            f"`continuations` must have a list for each context: {len(body.contexts)} contexts, "
            f"{len(body.continuations)} lists",
            parameter="continuations",
            value=len(body.continuations),
        )
    encoder = PairEncoder(
        server.engine.model_config,
        server.tokenizer,
        tokenization=body.tokenization or JOINT,
        add_special_tokens=body.add_special_tokens is not False,
    )
    contexts = [_with_salt(context, body.cache_salt) for context in body.contexts]
    pairs = await asyncio.to_thread(encoder.encode_all, contexts, body.continuations)
    flat = list(itertools.chain.from_iterable(pairs))
    scores = iter(await run_while_connected(request.receive, _run(server, flat, request_id, priority)))
    shown = _TOKEN_COLUMNS if body.return_tokens is False else ()
    answer = {
        **_make_head(request_id, model),
        "data": [
            {
                "index": index,
                "object": "continuation_scores",
                "scores": [
                    {"index": place, **_leave_out(score.to_dict(), shown)}
                    for place, score in enumerate(itertools.islice(scores, len(row)))
                ],
            }
            for index, row in enumerate(pairs)
        ],
        "usage": make_usage(_count_tokens(pairs), 0),
    }
    return Response(await asyncio.to_thread(_encode, answer), media_type="application/json")


async def create_generative_scores(request: Request, body: GenerativeScoringRequest, server: ServerContext) -> Response:
    """Answer a request for the probabilities of labels; `score` is the first label's."""
    model, request_id, priority = _prepare(request, body, server, "generative-scoring")
    label_ids = _read_labels(body, server)
    prompts = await asyncio.to_thread(_read_prompts, body, server)
    pairs = make_label_pairs(prompts, label_ids, server.engine.model_config, parameter="items")
    scores = await run_while_connected(request.receive, _run(server, pairs, request_id, priority))
    column = "probabilities" if body.apply_softmax is False else "normalized_probabilities"
    data = [
        {
            "index": index,
            "object": "score",
            "score": as_json_number(getattr(row, column)[0]),
            "labels": describe_labels(row, body.labels),
        }
        for index, row in enumerate(gather_labels(scores, len(label_ids)))
    ]
    num_tokens = sum(len(prompt.token_ids or ()) for prompt in prompts)
    answer = {**_make_head(request_id, model), "data": data, "usage": make_usage(num_tokens, 0)}
    return Response(_encode(answer), media_type="application/json")


# ---------------------------------------------------------------- requests


def _prepare(request: Request, body: ScoringRequest, server: ServerContext, kind: str) -> tuple[str, str, int]:
    """Return the model's name, the request's id and its priority."""
    model = server.check_model(body.model)
    check_cache_salt(body.cache_salt)
    priority = check_priority(body.priority, server.scheduling_policy)
    return model, f"{kind}-{make_request_id(request, body.request_id)}", priority


def _with_salt(prompt: str | list[int], cache_salt: str | None) -> Any:
    if cache_salt is None:
        return prompt
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": cache_salt}


def _read_labels(body: GenerativeScoringRequest, server: ServerContext) -> list[int]:
    if (body.labels is None) == (body.label_token_ids is None):
        raise VLLMValidationError(
            "exactly one of `label_token_ids` and `labels` must be given", parameter="label_token_ids"
        )
    name = "labels" if body.labels is not None else "label_token_ids"
    labels: Sequence[Any] = body.labels if body.labels is not None else body.label_token_ids or []
    if len(labels) > MAX_LABELS:
        raise VLLMValidationError(
            f"`{name}` may hold at most {MAX_LABELS} labels; got {len(labels)}", parameter=name, value=len(labels)
        )
    return encode_labels(labels, server.tokenizer, server.vocab_size, parameter=name)


def _read_prompts(body: GenerativeScoringRequest, server: ServerContext) -> list[ParsedPrompt]:
    """Join the query with each item: texts as texts, token ids as token ids."""
    prompts = []
    for index, item in enumerate(body.items):
        query: Any = body.query or type(item)()
        if type(query) is not type(item):
            raise VLLMValidationError(
                f"`items[{index}]` and `query` must both be strings, or both lists of token ids", parameter="items"
            )
        joined = item + query if body.item_first else query + item
        if not joined:
            raise VLLMValidationError(f"`items[{index}]` and `query` are both empty", parameter="items")
        is_text = isinstance(joined, str)
        prompts.append(ParsedPrompt(joined if is_text else None, None if is_text else joined, body.cache_salt))
    return tokenize_prompts(
        prompts, server.tokenizer, add_special_tokens=body.add_special_tokens is not False, parameter="items"
    )


# ---------------------------------------------------------------- the engine


async def _run(
    server: ServerContext, pairs: Sequence[ScoredPair], request_id: str, priority: int
) -> list[ContinuationScore]:
    """Run the requests of all pairs; if one fails or this is cancelled, the others are aborted."""
    engine = server.engine
    batch = await asyncio.to_thread(ScoringBatch, pairs)
    # Requests that wait for others of the batch count: they are not in the engine's queue yet.
    engine.check_queue_limits(len(batch.requests), batch.count_tokens())
    num_seats = engine.vllm_config.scheduler_config.max_num_seqs
    dispatcher = Dispatcher(batch, sys.maxsize, num_seats)
    running: dict[asyncio.Task[Any], int] = {}

    def start(indices: Sequence[int]) -> None:
        for index in indices:
            batched = batch.requests[index]
            stream = engine.generate(batched.as_input(), batched.params, f"{request_id}-{index}", priority=priority)
            running[asyncio.create_task(read_last(stream))] = index

    try:
        while not dispatcher.is_done:
            start(dispatcher.take_ready())
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = running.pop(task)
                batch.take(index, task.result())
                start(dispatcher.end(index))
    finally:
        await cancel_all(list(running))
    return batch.make_scores()


# ---------------------------------------------------------------- the answer


def _make_head(request_id: str, model: str) -> dict[str, Any]:
    return {"id": request_id, "object": "list", "created": int(time.time()), "model": model}


def _leave_out(described: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name not in names}


def _count_tokens(pairs: Sequence[Sequence[ScoredPair]]) -> int:
    """Return the tokens of a request: each context once (as its longest form), and its continuations."""
    return sum(
        max(len(pair.context.token_ids) for pair in row) + sum(len(pair.token_ids) for pair in row) for row in pairs
    )
