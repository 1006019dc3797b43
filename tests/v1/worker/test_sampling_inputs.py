"""What the runner keeps of the sampler's inputs between steps is what it would make anew."""

import dataclasses
import random
from typing import Any

import numpy as np
import torch

from tests.v1.worker.steps import make_request
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampling_inputs import advance_sampling_metadata, make_sampling_metadata

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


def test_metadata_that_follows_from_the_last_step_equals_new_one_over_a_random_walk() -> None:
    draw = random.Random(5)
    num_kept = 0
    for _ in range(60):
        batch = InputBatch(max_num_reqs=6, max_model_len=64, block_size=4, vocab_size=50)
        for number in range(draw.randint(1, 6)):
            kind = draw.choices(KINDS, (6, 6, 6, 6, 1, 1, 1, 1))[0]
            batch.add(make_request(f"r{number}", [1, 2, 3], **kind))
        rows = np.array(draw.sample(range(batch.num_reqs), draw.randint(1, batch.num_reqs)))
        metadata = make_sampling_metadata(batch, rows, CPU)
        for _ in range(8):
            batch.append_tokens(rows, np.array([draw.randrange(50) for _ in rows], np.int32))
            last, metadata = metadata, advance_sampling_metadata(batch, rows, metadata, CPU)
            num_kept += metadata.draws.seeds is last.draws.seeds
            got, wanted = metadata, make_sampling_metadata(batch, rows, CPU)
            if wanted.all_greedy:  # nobody reads where a draw stands
                got, wanted = (made._replace(draws=made.draws._replace(positions=rows)) for made in (got, wanted))
            assert_equal(got, wanted)
    assert 100 < num_kept < 400, "the walk must come by what it is about, and by the rest"
