"""`vllm serve --batch-invariant`: an answer's numbers are the same to the bit whatever else is served."""

import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.entrypoints.openai.client import Client, serve


def make_body(i: int) -> dict[str, Any]:
    prompt = [(7 * i + j) % 90 + 3 for j in range(20 + 11 * i)]
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0.8, "seed": i, "logprobs": 3, "prompt_logprobs": 1}


def read_numbers(client: Client, body: dict[str, Any]) -> list[Any]:
    answer = client.complete(**body)
    assert answer.status == 200, answer
    return [(choice["text"], choice["logprobs"], choice["prompt_logprobs"]) for choice in answer.json["choices"]]


@pytest.mark.slow
def test_answers_among_others_are_those_given_alone(tiny_model: pathlib.Path) -> None:
    bodies = [make_body(i) for i in range(12)]
    with serve(tiny_model, "--batch-invariant", OMP_NUM_THREADS="2") as client:
        alone = [read_numbers(client, body) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            for _ in range(3):
                assert list(pool.map(lambda body: read_numbers(client, body), bodies)) == alone
