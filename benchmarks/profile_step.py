"""Where does a step's time go? Model forward, sampling, scoring, and the runner's, core's and front end's own work.

python -m benchmarks.profile_step MODEL [--num-prompts 32 --input-len 128 --output-len 64 --logprobs 5]
"""

import argparse
import dataclasses
import random
import time

from benchmarks.report import add_output_argument, show
from vllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--logprobs", type=int, default=None)
    parser.add_argument("--dtype", default="float32")
    add_output_argument(parser)
    args = parser.parse_args()

    llm = LLM(
        args.model, dtype=args.dtype, max_model_len=args.input_len + args.output_len, max_num_seqs=args.num_prompts
    )
    draw = random.Random(0)
    vocab = llm.llm_engine.model_config.vocab_size
    prompts = [
        {"prompt_token_ids": [draw.randrange(vocab) for _ in range(args.input_len)]} for _ in range(args.num_prompts)
    ]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=args.output_len, logprobs=args.logprobs)
    llm.generate(prompts[:2], params, use_tqdm=False)  # warm-up
    llm.reset_prefix_cache()

    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    before = dataclasses.replace(runner.seconds)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    total = time.perf_counter() - start
    names = [field.name for field in dataclasses.fields(before) if field.name != "num_steps"]
    spent = {name: getattr(runner.seconds, name) - getattr(before, name) for name in names}
    num_steps = runner.seconds.num_steps - before.num_steps
    spent["core and front end"] = total - sum(spent.values())

    rows = [[name, 1e3 * seconds / num_steps, 100 * seconds / total] for name, seconds in spent.items()] + [
        ["all", 1e3 * total / num_steps, 100.0]
    ]
    title = (
        f"{args.num_prompts} × ({args.input_len} in / {args.output_len} out), logprobs={args.logprobs}: "
        f"{num_steps} steps, {args.num_prompts * args.output_len / total:.1f} output tok/s"
    )
    show(title, ["part of a step", "ms a step", "% of the time"], rows, args.json)
    llm.shutdown()


if __name__ == "__main__":
    main()
