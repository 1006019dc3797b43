"""What the runner keeps of the sampler's inputs between steps is what it would make anew."""

import dataclasses
import random
from typing import Any

import numpy as np
import torch

from tests.v1.worker.steps import make_request
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampling_inputs import SamplingInputs, make_sampling_metadata

CPU = torch.device("cpu")
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "seeds": [1, 2, 3]},
    {"temperature": 1.0, "seeds": [5], "logprobs": 0},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "logprobs": 1},  # nothing to change before there is a generated token
    {"min_tokens": 4, "stop_ids": [2]},  # nothing to change after the fourth
    {"logit_bias": {3: 1.0}},
]


def assert_equal(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(got, np.ndarray):
        assert got.dtype == expected.dtype and np.array_equal(got, expected)
    elif isinstance(got, torch.Tensor):
        assert torch.equal(got, expected)
    elif isinstance(got, tuple | list):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    elif dataclasses.is_dataclass(got):
        for field in dataclasses.fields(got):
            assert_equal(getattr(got, field.name), getattr(expected, field.name))
    elif not callable(got):
        assert got == expected


def test_kept_inputs_equal_new_ones_over_a_random_walk() -> None:
    draw = random.Random(5)
    batch = InputBatch(max_num_reqs=6, max_model_len=64, block_size=4, vocab_size=50)
    inputs = SamplingInputs(batch)
    num_kept = 0
    for step in range(600):
        names = list(batch.row_of)
        if draw.random() < 0.1 and len(names) < 6:
            batch.add(make_request(f"r{step}", [1, 2, 3], **draw.choices(KINDS, (6, 6, 6, 6, 1, 1, 1, 1))[0]))
        elif draw.random() < 0.1 and names:
            batch.remove(draw.choice(names))
        if not batch.num_reqs:
            continue
        rows = np.arange(batch.num_reqs)
        if draw.random() < 0.2:
            rows = np.array(draw.sample(rows.tolist(), draw.randint(1, len(rows))))
        before = inputs._metadata
        got = inputs.make_metadata(rows, CPU)
        num_kept += inputs._metadata is before and before is not None
        wanted = make_sampling_metadata(batch, rows, CPU)
        if wanted.all_greedy:  # nobody looks at where a draw stands
            got, wanted = (made._replace(draws=made.draws._replace(positions=rows)) for made in (got, wanted))
        assert_equal(got, wanted)
        growing = rows[batch.num_tokens[rows] < 60]
        batch.append_tokens(growing, np.full(len(growing), 7, np.int32))
    assert num_kept > 30, "the walk must come by what it is about"


def test_another_batch_is_not_taken_for_the_one_before() -> None:
    for kind in ({"logprobs": 2}, {}):
        batch = InputBatch(max_num_reqs=2, max_model_len=8, block_size=4, vocab_size=50)
        batch.add(make_request("r", [1, 2], **kind))
        assert (SamplingInputs(batch).make_metadata(np.arange(1), CPU).score_table is None) == (not kind)
