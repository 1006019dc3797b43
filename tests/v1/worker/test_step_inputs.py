"""What is kept of a step's inputs for the next one is what would be made anew."""

import random

import numpy as np
import torch

from tests.v1.worker.steps import make_request, make_step
from tests.v1.worker.test_sampling_inputs import KINDS, assert_equal
from vllm.v1.attention import get_attention_backend
from vllm.v1.messages import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampled_rows import make_row_index
from vllm.v1.worker.step_inputs import StepInputs, StepInputsMaker

BACKEND = get_attention_backend("cpu")
CPU = torch.device("cpu")
BLOCK_SIZE = 8


class Walk:
    """A batch, and steps as a scheduler would plan them."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.batch = InputBatch(max_num_reqs=5, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=50)
        self.num_blocks = 0
        self.last_names: list[str] | None = None  # of a decode batch
        self.num_batches = 0

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
            kind = draw.choices([*KINDS, {"max_tokens": 0}], (6, 6, 6, 6, 1, 1, 1, 1, 3))[0]
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
        batch_id = self.find_decode_batch(running, counts, len(names) - len(ended), bool(new))
        return make_step(new=new, running=running, num_scheduled=counts, left=ended, decode_batch_id=batch_id)

    def find_decode_batch(
        self, running: dict[str, tuple[int, list[int]]], counts: dict[str, int], num_staying: int, has_new: bool
    ) -> int | None:
        """Return an id as a scheduler would: that of the last step while the same ones run a position each."""
        batch = self.batch
        is_decode = not has_new and 0 < len(running) == num_staying
        for name, (computed, _) in running.items():
            row = batch.row_of[name]
            is_decode &= counts[name] == 1 and computed + 1 == batch.num_tokens[row] and not batch.is_never_sampled[row]
            is_decode &= batch.num_draws[row] == 1
        names = list(running) if is_decode else None
        if names is not None and names != self.last_names:
            self.num_batches += 1
        self.last_names = names
        return self.num_batches if is_decode else None

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
        batch = self.batch
        batch.num_computed[inputs.rows] = inputs.attn.host.seq_lens
        for chunk in inputs.sampled:
            grown = chunk.rows[batch.num_draws[chunk.rows] == 1]
            batch.append_tokens(grown, np.array([self.draw.randrange(50) for _ in grown], np.int32))


def make_inputs(batch: InputBatch) -> StepInputsMaker:
    return StepInputsMaker(batch, BACKEND, BLOCK_SIZE, 3, CPU)


def without_positions_of_greedy(inputs: StepInputs) -> StepInputs:
    """Return inputs without what nobody reads: where a draw stands, when nothing is drawn at random."""
    sampled = []
    for chunk in inputs.sampled:
        metadata = chunk.metadata
        if metadata.all_greedy:
            draws = metadata.draws._replace(positions=np.zeros(0, np.int64))
            chunk = chunk._replace(metadata=metadata._replace(draws=draws))
        sampled.append(chunk)
    return inputs._replace(sampled=sampled)


def test_inputs_that_follow_from_the_last_step_equal_new_ones_over_a_random_walk() -> None:
    num_kept = num_steps = 0
    for seed in range(24):
        walk = Walk(seed)
        maker = make_inputs(walk.batch)
        last: StepInputs | None = None
        for number in range(150):
            step = walk.plan(number)
            walk.apply(step)
            if not step.num_scheduled_tokens:
                walk.last_names = None
                continue
            got = maker.make(step)
            anew = make_inputs(walk.batch).make(step)
            assert_equal(without_positions_of_greedy(got), without_positions_of_greedy(anew))
            num_kept += last is not None and got.rows is last.rows
            num_steps += 1
            last = got
            walk.finish(got)
    assert 0.2 * num_steps < num_kept < 0.9 * num_steps, "the walk must come by what it is about, and by the rest"


def test_only_the_id_of_the_last_step_lets_inputs_follow_from_it() -> None:
    for ids, is_kept in (
        ((4, 4), True),
        ((4, 5), False),
        ((4, None), False),
        ((None, None), False),
        ((None, 4), False),
    ):
        batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=50)
        maker = make_inputs(batch)
        batch.add(make_request("a", [1, 2], block_ids=[4], num_computed_tokens=1))
        batch.add(make_request("b", [3, 4, 5], block_ids=[6], num_computed_tokens=2))
        rows, counts = np.arange(2), {"a": 1, "b": 1}
        first = maker.make(make_step(num_scheduled=counts, decode_batch_id=ids[0]))
        batch.num_computed[rows] += 1
        batch.append_tokens(rows, np.full(2, 7, np.int32))
        second = maker.make(make_step(num_scheduled=counts, decode_batch_id=ids[1]))
        assert (second.rows is first.rows) is is_kept
        assert second.input_ids.tolist() == [7, 7] and second.positions.tolist() == [2, 3]


def test_an_id_that_a_step_of_others_interrupts_is_not_followed() -> None:
    batch = InputBatch(max_num_reqs=2, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=50)
    maker = make_inputs(batch)
    batch.add(make_request("a", [1, 2, 3, 4, 5], block_ids=[4], num_computed_tokens=1))
    kept = maker.make(make_step(num_scheduled={"a": 1}, decode_batch_id=4))
    batch.num_computed[0] = 2
    maker.make(make_step(num_scheduled={"a": 2}))
    batch.num_computed[0] = 4
    got = maker.make(make_step(num_scheduled={"a": 1}, decode_batch_id=4))
    assert got.rows is not kept.rows and got.positions.tolist() == [4]


def test_rows_of_hidden_states_are_those_named_whether_or_not_they_are_neighbours() -> None:
    hidden = torch.randn(7, 3)
    for rows in ([0], [6], [2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [1, 3], [3, 2], [0, 2, 1, 3], [5, 5, 6, 6], [4, 6, 6]):
        assert torch.equal(hidden[make_row_index(np.array(rows), CPU)], hidden[rows])
    assert make_row_index(np.array([2, 3]), CPU) == slice(2, 4), "neighbours are not copied"
