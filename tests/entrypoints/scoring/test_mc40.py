"""benchmarks/data/mc40.jsonl: what it holds, and what scoring it costs and says with a real model."""

import json
import pathlib

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.bench_scoring import DATA, count_distinct, count_positions
from benchmarks.data.make_mc40 import make_beginning, make_items
from vllm import LLM


def read_items() -> list[dict]:
    return [json.loads(line) for line in DATA.read_text().splitlines()]


def test_the_file_is_what_its_maker_writes() -> None:
    items = read_items()
    assert items == make_items() and len(items) == 40
    assert all(item["context"].startswith(make_beginning()) for item in items)
    assert all(len(set(item["choices"])) == 4 for item in items)
    assert len({item["context"] for item in items}) == 40
    assert {item["answer"] for item in items} == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_position_runs_once_and_values_are_those_of_transformers(smollm2_folder: pathlib.Path) -> None:
    items = read_items()
    contexts, choices = [item["context"] for item in items], [item["choices"] for item in items]
    with LLM(str(smollm2_folder), dtype="float32", max_model_len=1024) as llm:
        scores = llm.score_continuations(contexts, choices)
        num_computed = count_positions(llm)
        num_there = count_distinct(llm, items, scores)
        again = llm.score_continuations(contexts, choices)
        encode = llm.llm_engine.tokenizer.encode
    # Questions begin alike too: every distinct beginning runs once, which is less than each question once.
    prefixes = {
        tuple(ids[:end])
        for context, row in zip(contexts, scores, strict=True)
        for score in row
        for ids in [[*encode(context), *score.token_ids]]
        for end in range(1, len(ids))
    }
    assert num_computed == len(prefixes) < num_there
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    for place in (7, 32):
        context = encode(contexts[place])
        for score, second in zip(scores[place], again[place], strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([[*context, *score.token_ids]])).logits[0, len(context) - 1 : -1]
            want = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(score.token_ids)[:, None])[:, 0]
            assert score.logprobs == pytest.approx(want.tolist(), abs=1e-4)
            assert second.logprobs == pytest.approx(want.tolist(), abs=1e-4)
    right = [max(range(4), key=lambda i, row=row: row[i].logprob) for row in scores]
    assert sum(one == item["answer"] for one, item in zip(right, items, strict=True)) >= 25
