"""What is kept of a step's inputs for the next one is what would be made anew."""

import random

import numpy as np
import pytest
import torch

from tests.v1.worker.steps import make_request, make_step
from tests.v1.worker.test_sampling_inputs import assert_equal
from vllm.v1.attention import get_attention_backend
from vllm.v1.messages import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampled_rows import SampledRows, make_row_index
from vllm.v1.worker.step_inputs import InputsOfSteps, StepInputs, make_step_inputs

BACKEND = get_attention_backend("cpu")
CPU = torch.device("cpu")
BLOCK_SIZE = 8


class Walk:
    """A batch, and steps as a scheduler would plan them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.batch = InputBatch(max_num_reqs=5, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=50)
        self.num_blocks = 0

    def take_blocks(self, name: str, end: int) -> list[int]:
        held = int(self.batch.block_table.num_blocks[self.batch.row_of[name]]) if name in self.batch.row_of else 0
        added = [self.num_blocks + i for i in range(-(-end // BLOCK_SIZE) - held)]
        self.num_blocks += len(added)
        return added

    def plan(self, number: int) -> SchedulerOutput:
        """Somebody may come or go; now and then a sequence waits, or has more than a token to compute."""
        batch, draw = self.batch, self.draw
        names = list(batch.row_of)
        ended = [name for name in names if batch.num_tokens[batch.row_of[name]] >= 60 or draw.random() < 0.01]
        new = []
        if draw.random() < 0.06 and len(names) < 5:
            ids = [draw.randrange(50) for _ in range(draw.randint(1, 20))]
            kind = draw.choice([{}, {"logprobs": 2}, {"max_tokens": 0}, {"seeds": [1, 2]}, {"temperature": 1.0}])
            new.append(make_request(f"r{number}", ids, block_ids=self.take_blocks("", len(ids)), **kind))
        running, counts = {}, {}
        for name in names:
            row = batch.row_of[name]
            missing = int(batch.num_tokens[row] - batch.num_computed[row])
            if name in ended or missing == 0 or draw.random() < 0.02:
                continue
            counts[name] = draw.randint(1, missing)
            computed = int(batch.num_computed[row])
            running[name] = (computed, self.take_blocks(name, computed + counts[name]))
        if new and draw.random() < 0.5:
            counts[new[0].request_id] = draw.randint(1, len(new[0].token_ids))
        return make_step(new=new, running=running, num_scheduled=counts, left=ended)

    def apply(self, step: SchedulerOutput) -> None:
        """Do what the runner does before it makes a step's inputs."""
        batch = self.batch
        for name in step.left_request_ids:
            batch.remove(name)
        for new in step.new_requests:
            batch.add(new)
        for name, blocks in zip(step.running.request_ids, step.running.new_block_ids, strict=True):
            batch.block_table.append(batch.row_of[name], blocks)

    def finish(self, inputs: StepInputs) -> None:
        """Let what ran be computed, and those that were sampled from grow."""
        batch, rows = self.batch, inputs.rows
        batch.num_computed[rows] = inputs.attn.host.seq_lens
        grown = rows[inputs.is_sampled & (batch.num_draws[rows] == 1)]
        batch.append_tokens(grown, np.array([self.draw.randrange(50) for _ in grown], np.int32))


def test_kept_inputs_equal_new_ones_over_a_random_walk() -> None:
    num_kept = num_steps = 0
    for seed in range(12):
        walk = Walk(seed)
        inputs_of_steps = InputsOfSteps(walk.batch, BACKEND, BLOCK_SIZE, CPU)
        sampled_rows = SampledRows(walk.batch, 3, CPU)
        ids = None
        for number in range(150):
            step = walk.plan(number)
            walk.apply(step)
            if not step.num_scheduled_tokens:
                continue
            got = inputs_of_steps.make(step)
            assert_equal(got, make_step_inputs(walk.batch, step, BACKEND, BLOCK_SIZE, CPU))
            assert_equal(sampled_rows.find(got), SampledRows(walk.batch, 3, CPU).find(got))
            num_kept += got.request_ids is ids
            num_steps += 1
            ids = got.request_ids
            walk.finish(got)
    assert 0.2 * num_steps < num_kept < 0.9 * num_steps, "the walk must come by what it is about, and by the rest"


@pytest.mark.parametrize("counts", [(1, 1), (0, 2), (2, 1), (1, 0)], ids=str)
def test_a_step_of_other_lengths_is_made_anew(counts: tuple[int, int]) -> None:
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=50)
    inputs_of_steps = InputsOfSteps(batch, BACKEND, BLOCK_SIZE, CPU)
    batch.add(make_request("a", [1, 2], block_ids=[4], num_computed_tokens=1))
    batch.add(make_request("b", [3, 4, 5], block_ids=[6], num_computed_tokens=2))
    kept = inputs_of_steps.make(make_step(num_scheduled={"a": 1, "b": 1}))
    rows = np.arange(2)
    batch.num_computed[rows] += 1
    for token_id in (7, 8):
        batch.append_tokens(rows, np.full(2, token_id, np.int32))
    step = make_step(num_scheduled=dict(zip("ab", counts, strict=True)))
    got = inputs_of_steps.make(step)
    if counts == (1, 1):
        assert got.request_ids is kept.request_ids and got.input_ids.tolist() == [7, 7]
    else:
        assert_equal(got, make_step_inputs(batch, step, BACKEND, BLOCK_SIZE, CPU))


def test_rows_of_hidden_states_are_those_named_whether_or_not_they_are_neighbours() -> None:
    hidden = torch.randn(7, 3)
    for rows in ([0], [6], [2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [1, 3], [3, 2], [0, 2, 1, 3], [5, 5, 6, 6], [4, 6, 6]):
        assert torch.equal(hidden[make_row_index(np.array(rows), CPU)], hidden[rows])
    assert make_row_index(np.array([2, 3]), CPU) == slice(2, 4), "neighbours are not copied"
