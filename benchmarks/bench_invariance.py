"""What does batch-invariant mode cost?

    python -m benchmarks.bench_invariance MODEL [--pairs 5] [--dtype float32] [--quantization int8] [--json FILE]

Two engines in one process, one with the mode and one without, answer the same requests (32 prompts of 128 tokens, 64
generated each) in turn, the order alternating, so that a machine that wanders slows both alike. A figure is the time
with the mode over that of the run beside it.
"""

import argparse
import random
import time
from typing import Any

from benchmarks import report
from vllm import LLM, SamplingParams

COLUMNS = [
    "what", "s without", "s with", "tokens/s without", "tokens/s with", "ratio: lower quartile", "median",
    "upper quartile", "ratio of the fastest", "pairs",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face folder or a .gguf file")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    report.add_output_argument(parser)
    args = parser.parse_args()
    options: dict[str, Any] = {"dtype": args.dtype, "quantization": args.quantization, "enable_prefix_caching": False}
    options |= {"max_model_len": args.input_len + args.output_len, "max_num_seqs": args.num_prompts}
    options |= {"kv_cache_memory_bytes": 1 << 30}
    with LLM(args.model, batch_invariant=False, **options) as without, LLM(
        args.model, batch_invariant=True, **options
    ) as with_:  # fmt: skip
        draw = random.Random(0)
        vocab_size = without.model_config.vocab_size
        prompts = [
            {"prompt_token_ids": draw.choices(range(vocab_size), k=args.input_len)} for _ in range(args.num_prompts)
        ]
        params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
        engines = (without, with_)
        for llm in engines:  # the first call pays for what is made once
            llm.generate(prompts[:2], params, use_tqdm=False)
        times: list[tuple[float, float]] = []
        for turn in range(args.pairs):
            seconds = [0.0, 0.0]
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                begun = time.perf_counter()
                engines[side].generate(prompts, params, use_tqdm=False)
                seconds[side] = time.perf_counter() - begun
            times.append((seconds[0], seconds[1]))
    num_tokens = args.num_prompts * args.output_len
    what = f"{args.num_prompts} x ({args.input_len}/{args.output_len}), {args.quantization or args.dtype}"
    report.show("Batch-invariant mode", COLUMNS, [summarise(what, times, num_tokens)], args.json)


def summarise(what: str, times: list[tuple[float, float]], num_tokens: int) -> list[object]:
    """Return the row of `times`, seconds (without, with) a pair."""
    fastest = [min(pair[side] for pair in times) for side in (0, 1)]
    ratios = report.quartiles([with_ / without for without, with_ in times])
    speeds = [num_tokens / seconds for seconds in fastest]
    return [what, *fastest, *speeds, *ratios, fastest[1] / fastest[0], len(times)]


if __name__ == "__main__":
    main()
