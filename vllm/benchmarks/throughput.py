"""Answer many prompts at once in this process, and report requests and tokens a second."""

import argparse
import asyncio
import time
from collections.abc import Sequence

from vllm.benchmarks.datasets import SampleRequest, add_dataset_flags, check_dataset_flags, make_requests
from vllm.benchmarks.offline import add_engine_flags, make_params, write_json
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.cli_args import check_at_least
from vllm.entrypoints.cli.local_args import make_engine_args
from vllm.entrypoints.llm import LLM
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.async_llm import AsyncLLM

_Prompt = TextPrompt | TokensPrompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    parser.add_argument(
        "--backend", choices=("vllm", "vllm-chat"), default="vllm", help="vllm-chat: through the chat template"
    )
    parser.add_argument("--async-engine", action="store_true", help="AsyncLLM, whose core is a process of its own")
    parser.add_argument("--num-warmups", type=int, default=0, metavar="INT", help="requests before the clock starts")
    add_dataset_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    check_dataset_flags(args)
    check_at_least(args, n=1, num_warmups=0)
    if args.async_engine:
        engine = AsyncLLM.from_engine_args(make_engine_args(args, AsyncEngineArgs))
        try:
            prompts, params = _prepare(args, engine.tokenizer)
            elapsed, outputs = asyncio.run(_time_async(engine, args.num_warmups, prompts, params))
        finally:
            engine.shutdown()
    else:
        with LLM.from_engine_args(make_engine_args(args)) as llm:
            prompts, params = _prepare(args, llm.llm_engine.tokenizer)
            if args.num_warmups:
                llm.generate(prompts[: args.num_warmups], params[: args.num_warmups], use_tqdm=False)
                llm.reset_prefix_cache()  # what warmed up must not be what is measured
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            elapsed = time.perf_counter() - start
    _report(args, elapsed, outputs)
    return 0


def _prepare(args: argparse.Namespace, tokenizer: Tokenizer | None) -> tuple[list[_Prompt], list[SamplingParams]]:
    is_chat = args.backend == "vllm-chat"
    requests = make_requests(args, tokenizer, seed=getattr(args, "seed", 0), as_token_ids=not is_chat)
    params = [make_params(args, request.output_len) for request in requests]
    return [_make_prompt(request, tokenizer if is_chat else None) for request in requests], params


def _make_prompt(request: SampleRequest, chat_tokenizer: Tokenizer | None) -> _Prompt:
    if isinstance(request.prompt, list):
        return TokensPrompt(prompt_token_ids=request.prompt)
    if chat_tokenizer is None:
        return TextPrompt(prompt=request.prompt)
    messages = [{"role": "user", "content": request.prompt}]
    text = chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return TokensPrompt(prompt_token_ids=chat_tokenizer.encode(text, add_special_tokens=False))


async def _time_async(
    engine: AsyncLLM, num_warmups: int, prompts: Sequence[_Prompt], params: Sequence[SamplingParams]
) -> tuple[float, list[RequestOutput]]:
    async def answer(place: int, name: str) -> RequestOutput:
        async for output in engine.generate(prompts[place], params[place], f"{name}-{place}"):
            if output.finished:
                return output
        raise AssertionError("a request ends with a finished output")

    if num_warmups:
        await asyncio.gather(*(answer(place, "warm-up") for place in range(min(num_warmups, len(prompts)))))
        await engine.reset_prefix_cache()
    start = time.perf_counter()
    outputs = await asyncio.gather(*(answer(place, "bench") for place in range(len(prompts))))
    return time.perf_counter() - start, outputs


def _report(args: argparse.Namespace, elapsed: float, outputs: Sequence[RequestOutput]) -> None:
    num_prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    total = num_prompt + num_output
    print(
        f"Throughput: {len(outputs) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{num_output / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}")
    print(f"Total num output tokens:  {num_output}")
    figures = {
        "model_id": args.model,
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "total_output_tokens": num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": num_output / elapsed,
    }
    write_json(args.output_json, figures)
