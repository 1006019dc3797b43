"""What do narrow weights cost in accuracy? Scores one text with each kind of weights and compares with float32.

The text is Python's own reference manual as every interpreter carries it (pydoc_data), cut into prompts of a length.
A row: the largest and the mean difference between the logprobs of the text's tokens, its perplexity, and how often the
most likely token is another one.

    python -m benchmarks.bench_weights MODEL --gguf MODEL-Q8_0.gguf --json weights.json
"""

import argparse
import gc
import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import report
from vllm import LLM, SamplingParams
from vllm.tokenizers import load_tokenizer


class Scores(NamedTuple):
    """What a model says of the text's tokens, one after the other."""

    logprobs: np.ndarray  # [num_tokens] float32, of the tokens that are there
    best_ids: np.ndarray  # [num_tokens] int32


def cut_text(tokenizer_path: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return prompts of token ids out of the manual's longest topics."""
    topics = importlib.import_module("pydoc_data.topics").topics
    tokenizer = load_tokenizer(tokenizer_path)
    ids: list[int] = []
    for text in sorted(topics.values(), key=len, reverse=True):
        ids += tokenizer.encode(text)
        if len(ids) >= num_prompts * num_tokens:
            break
    return [ids[i * num_tokens : (i + 1) * num_tokens] for i in range(num_prompts)]


def score(prompts: Sequence[Sequence[int]], options: dict[str, Any]) -> Scores:
    llm = LLM(max_model_len=len(prompts[0]) + 1, **options)
    outputs = llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in prompts],
        SamplingParams(max_tokens=0, prompt_logprobs=1),
        use_tqdm=False,
    )
    logprobs, best = [], []
    for output in outputs:
        assert output.prompt_logprobs is not None
        for position in output.prompt_logprobs:
            if position is not None:
                entries = list(position.items())
                logprobs.append(entries[0][1].logprob)
                best.append(next(token_id for token_id, entry in entries if entry.rank == 1))
    del llm
    gc.collect()
    return Scores(np.asarray(logprobs, np.float32), np.asarray(best, np.int32))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--gguf", help="a Q8_0 file of the same model, whose numbers are kept as they are")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=1024, help="tokens of a prompt")
    report.add_output_argument(parser)
    given = parser.parse_args(arguments)
    prompts = cut_text(given.model, given.num_prompts, given.prompt_len)
    kinds: dict[str, dict[str, Any]] = {
        "float32": {"model": given.model, "dtype": "float32"},
        "bfloat16": {"model": given.model, "dtype": "bfloat16"},
        "int8, a factor a row": {"model": given.model, "quantization": "int8"},
    }
    if given.gguf:
        kinds["int8, a Q8_0 file's own factors"] = {
            "model": given.gguf,
            "tokenizer": given.model,
            "quantization": "int8",
        }
    wanted: Scores | None = None
    table: list[list[object]] = []
    for name, options in kinds.items():
        got = score(prompts, options)
        wanted = wanted or got
        difference = np.abs(got.logprobs - wanted.logprobs)
        perplexity, base = (math.exp(-float(x.logprobs.mean(dtype=np.float64))) for x in (got, wanted))
        changed = float((got.best_ids != wanted.best_ids).mean())
        change = 100 * (perplexity / base - 1)
        differences = float(difference.mean()), float(difference.max())
        table.append([name, len(difference), perplexity, change, *differences, changed])
    columns = [
        "weights",
        "tokens",
        "perplexity",
        "change, %",
        "mean |Δlogprob|",
        "max |Δlogprob|",
        "other most likely token",
    ]
    report.show("Accuracy of narrow weights, beside float32", columns, table, given.json)


if __name__ == "__main__":
    main()
