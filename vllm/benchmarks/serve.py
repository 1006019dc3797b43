"""Measure an OpenAI server: send it a load of streamed requests and report the times that a client sees."""

import argparse
import asyncio
import random
import resource
import sys
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop

from vllm import envs
from vllm.benchmarks.arrivals import make_arrivals, make_ramp_up
from vllm.benchmarks.backends import ENDPOINTS, RequestMaker, RequestResult, send_request
from vllm.benchmarks.datasets import SampleRequest, make_requests
from vllm.benchmarks.metrics import (
    compute_metrics,
    make_details,
    read_goodput,
    read_metric_names,
    read_percentiles,
)
from vllm.benchmarks.serve_args import SAMPLING_FLAGS, add_serve_flags, check_serve_flags, read_pairs
from vllm.benchmarks.serve_report import (
    check_result_path,
    format_failures,
    format_report,
    make_document,
    save_document,
)
from vllm.entrypoints.http_client import HttpClient, HttpError, make_key_header
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.tokenizers import Tokenizer, load_tokenizer

_READY_INTERVAL_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    add_serve_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status: 1 where no request succeeded."""
    check_serve_flags(args)
    if args.save_result:
        check_result_path(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        document = runner.run(run_benchmark(args))
    return 0 if document["completed"] else 1


class Target(NamedTuple):
    """What is measured."""

    client: HttpClient
    maker: RequestMaker
    model_id: str
    tokenizer: Tokenizer | None
    tokenizer_id: str | None


class Run(NamedTuple):
    """A load that was sent."""

    results: list[RequestResult]
    start: float  # by time.perf_counter()
    duration: float


async def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Measure as the checked flags say, print the report, save it where asked to, and return what a file would hold.

    Raises:
        VLLMValidationError: a flag or a file is not good.
        HttpError: the server is not there.
    """
    metrics, percentiles = read_metric_names(args.percentile_metrics), read_percentiles(args.metric_percentiles)
    goodput, metadata = read_goodput(args.goodput), read_pairs("--metadata", args.metadata)
    _raise_file_limit()
    url = args.base_url.rstrip("/").removesuffix("/v1") if args.base_url else f"http://{args.host}:{args.port}"
    headers = make_key_header(envs.openai_api_key() or envs.api_key()) | read_pairs("--header", args.header)
    async with HttpClient(url, headers=headers, verifies_certificate=not args.insecure) as client:
        target = await _find_target(args, client)
        requests = make_requests(args, target.tokenizer, seed=args.seed)
        await _prepare_server(args, target, requests)
        if args.profile:
            await _switch_profiler(client, "start")
        done = await send_load(args, target, requests)
        if args.profile:
            await _switch_profiler(client, "stop")
    figures = compute_metrics(
        done.results, done.duration, metrics=metrics, percentiles=percentiles, goodput=goodput or None
    )
    for line in format_failures(done.results):
        print(f"vllm bench serve: {line}", file=sys.stderr)
    print(
        format_report(
            figures,
            request_rate=args.request_rate,
            max_concurrency=args.max_concurrency,
            metrics=metrics,
            percentiles=percentiles,
        ),
        flush=True,
    )
    document = make_document(
        args,
        figures | make_details(done.results, done.start),
        model_id=target.model_id,
        tokenizer_id=target.tokenizer_id,
        metadata=metadata,
    )
    if args.save_result:
        print(f"saved: {save_document(args, document)}")
    return document


# ---------------------------------------------------------------- before the load


async def _find_target(args: argparse.Namespace, client: HttpClient) -> Target:
    """Find out the model and its tokenizer; what the flags leave open is asked of the server."""
    model_id, root = args.model, args.model
    needs_tokenizer = args.dataset_name in ("random", "sharegpt") and not args.skip_tokenizer_init
    if model_id is None or (needs_tokenizer and args.tokenizer is None):
        await _wait_until_listening(args, client)
        listed = await list_models(client)
        if model_id is None:
            if not listed:
                raise VLLMValidationError(f"{client.base_url} lists no models; give --model")
            model_id = str(listed[0]["id"])
        named = args.served_model_name or model_id
        root = next((model.get("root") for model in listed if model["id"] == named), None) or model_id
    tokenizer_id = None if args.skip_tokenizer_init else args.tokenizer or (root if needs_tokenizer else None)
    tokenizer = None if tokenizer_id is None else _load_tokenizer(args, tokenizer_id)
    sampling = {name: getattr(args, name) for name in SAMPLING_FLAGS if getattr(args, name) is not None}
    if args.use_beam_search:
        sampling["use_beam_search"] = True
    maker = RequestMaker(
        backend=args.backend,
        model=args.served_model_name or model_id,
        endpoint=args.endpoint or ENDPOINTS[args.backend],
        logprobs=args.logprobs,
        ignore_eos=args.ignore_eos,
        sampling=sampling,
        extra_body=args.extra_body,
    )
    return Target(client, maker, model_id, tokenizer, tokenizer_id)


def _load_tokenizer(args: argparse.Namespace, tokenizer_id: str) -> Tokenizer:
    try:
        return load_tokenizer(tokenizer_id, mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code)
    except VLLMError as error:
        raise VLLMValidationError(
            f"no tokenizer for {tokenizer_id}: {error}; give --tokenizer PATH, or --skip-tokenizer-init for prompts of "
            "token ids"
        ) from None


async def list_models(client: HttpClient) -> list[dict[str, Any]]:
    """Return the models that the server lists; none where it has no list.

    Raises:
        HttpError: it can't be reached.
        VLLMValidationError: it wants a key.
    """
    answer = await client.send("GET", "/v1/models")
    if answer.status in (401, 403):
        raise VLLMValidationError(f"{client.base_url}: {answer.describe_refusal()} (OPENAI_API_KEY holds the key)")
    try:
        models = msgspec.json.decode(answer.body)["data"]
        return [model for model in models if isinstance(model, dict) and model.get("id")]
    except (msgspec.DecodeError, LookupError, TypeError):
        return []


async def _wait_until_listening(args: argparse.Namespace, client: HttpClient) -> None:
    """Wait for the server as long as the flags allow."""
    end = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            await client.send("GET", "/v1/models")
            return
        except HttpError:
            if time.monotonic() >= end:
                raise
        await asyncio.sleep(_READY_INTERVAL_S)


async def _prepare_server(args: argparse.Namespace, target: Target, requests: Sequence[SampleRequest]) -> None:
    """Wait for a first good answer, and warm the server up, as the flags say."""
    if args.ready_check_timeout_sec > 0:
        end = time.monotonic() + args.ready_check_timeout_sec
        while (result := await _send_one(target, requests[0])).error:
            if time.monotonic() >= end:
                raise HttpError(
                    f"no good answer within --ready-check-timeout-sec {args.ready_check_timeout_sec:g}: {result.error}"
                )
            await asyncio.sleep(_READY_INTERVAL_S)
    if args.num_warmups:
        limit = asyncio.Semaphore(args.max_concurrency or args.num_warmups)

        async def warm_up() -> RequestResult:
            async with limit:
                return await _send_one(target, requests[0])

        await _run_all([warm_up() for _ in range(args.num_warmups)])


async def _send_one(target: Target, request: SampleRequest) -> RequestResult:
    return await send_request(target.client, target.maker.endpoint, target.maker.make_body(request), request.prompt_len)


async def _switch_profiler(client: HttpClient, verb: str) -> None:
    answer = await client.send("POST", f"/{verb}_profile")
    if not answer.is_ok:
        print(f"vllm bench serve: the profiler did not {verb}: {answer.describe_refusal()}", file=sys.stderr)


# ---------------------------------------------------------------- the load


async def send_load(args: argparse.Namespace, target: Target, requests: Sequence[SampleRequest]) -> Run:
    """Send each request at its time and return what they took, in their order."""
    rng = np.random.default_rng([args.seed, 1])  # apart from the prompts: the same times for any dataset
    if args.ramp_up_strategy:
        arrivals = make_ramp_up(
            len(requests),
            args.ramp_up_strategy,
            args.ramp_up_start_rps,
            args.ramp_up_end_rps,
            args.burstiness,
            rng,
        )
    else:
        arrivals = make_arrivals(len(requests), args.request_rate, args.burstiness, rng)
    choose = random.Random(args.seed)
    models = [choose.choice(args.lora_modules) if args.lora_modules else None for _ in requests]
    bodies = [target.maker.make_body(request, model) for request, model in zip(requests, models, strict=True)]
    prefix = args.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-"
    limit = asyncio.Semaphore(args.max_concurrency or len(requests))
    tokenizer = target.tokenizer
    count_tokens = None if tokenizer is None else lambda text: len(tokenizer.encode(text, add_special_tokens=False))
    bar = _make_bar(len(requests), args.disable_tqdm)
    start = time.perf_counter()

    async def send(place: int) -> RequestResult:
        delay = start + arrivals[place] - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        async with limit:
            result = await send_request(
                target.client,
                target.maker.endpoint,
                bodies[place],
                requests[place].prompt_len,
                request_id=f"{prefix}{place}",
                count_tokens=count_tokens,
            )
        bar.update(1)
        return result

    try:
        results = await _run_all([send(place) for place in range(len(requests))])
    finally:
        bar.close()
    return Run(results, start, time.perf_counter() - start)


async def _run_all(coroutines: Sequence[Coroutine[Any, Any, RequestResult]]) -> list[RequestResult]:
    """Run all at once; when one raises, or we are cancelled, the others are ended too."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


def _make_bar(total: int, is_off: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=is_off, unit="req", file=sys.stderr)


def _raise_file_limit() -> None:
    """Let as many connections be open as the system allows: each takes a file descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
