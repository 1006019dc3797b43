"""From a scheduler's step to what the model reads; one pass over arrays, nothing a token."""

from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.attention import AttentionBackend, AttentionMetadata
from vllm.v1.messages import BlockCopy, SchedulerOutput
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.score_store import ScoreStore


class StepInputs(NamedTuple):
    """The requests of a step, in the order of their tokens."""

    request_ids: list[str]
    rows: np.ndarray  # [num_reqs] int64, rows of the batch
    first_positions: np.ndarray  # [num_reqs] int32, positions computed before this step
    query_starts: np.ndarray  # [num_reqs + 1] int64, where each one's tokens start
    is_sampled: np.ndarray  # [num_reqs] bool
    input_ids: torch.Tensor  # [num_tokens] int64, device
    positions: torch.Tensor  # [num_tokens] int64, device
    attn: AttentionMetadata


def make_step_inputs(
    batch: InputBatch, step: SchedulerOutput, backend: AttentionBackend, block_size: int, device: torch.device
) -> StepInputs:
    """Gather the step's tokens, positions and block tables from the batch; some request has a position to run."""
    scheduled = {request_id: count for request_id, count in step.num_scheduled_tokens.items() if count > 0}
    request_ids = list(scheduled)
    rows = np.array([batch.row_of[request_id] for request_id in request_ids], dtype=np.int64)
    query_lens = np.fromiter(scheduled.values(), dtype=np.int32, count=len(request_ids))
    first_positions = batch.num_computed[rows]
    seq_lens = first_positions + query_lens
    num_tokens = batch.num_tokens[rows]
    assert (seq_lens <= num_tokens).all(), "a step may not run past a sequence's known tokens"
    max_blocks = -(-int(seq_lens.max()) // block_size)
    assert (batch.block_table.num_blocks[rows] * block_size >= seq_lens).all(), "a request ran out of blocks"
    attn = backend.make_metadata(
        query_lens, seq_lens, batch.block_table.take_rows(rows, max_blocks), block_size, device
    )
    positions = attn.host.positions
    token_rows = rows if len(positions) == len(rows) else np.repeat(rows, query_lens)
    return StepInputs(
        request_ids=request_ids,
        rows=rows,
        first_positions=first_positions,
        query_starts=attn.host.query_starts,
        is_sampled=(seq_lens == num_tokens) & ~batch.is_never_sampled[rows],
        input_ids=torch.from_numpy(batch.token_ids[token_rows, positions].astype(np.int64)).to(device),
        positions=torch.from_numpy(positions).to(device),
        attn=attn,
    )


class InputsOfSteps:
    """Makes the inputs of one batch, step after step.

    While the same sequences go on, a token each, all of it but the tokens is that of the step before or follows it by
    one: some ten operations of numpy in place of forty, which cost 3 to 5 µs each while a step's weights drive Python's
    own data out of the cache.
    """

    def __init__(self, batch: InputBatch, backend: AttentionBackend, block_size: int, device: torch.device) -> None:
        self._batch = batch
        self._backend = backend
        self._block_size = block_size
        self._device = device
        self._last: StepInputs | None = None
        self._num_changes = -1
        self._num_steps_left = 0  # in which no sequence comes to its next block

    def make(self, step: SchedulerOutput) -> StepInputs:
        """Do what `make_step_inputs` does; a sequence that was sampled from in the last step has got its token."""
        last, self._last = self._last, None
        if last is not None and self._goes_on(last, step):
            inputs = _follow(last, self._batch, self._backend, self._device)
            self._num_steps_left -= 1
        else:
            inputs = make_step_inputs(self._batch, step, self._backend, self._block_size, self._device)
            self._num_steps_left = _count_steps_in_blocks(inputs, self._block_size)
        if self._num_steps_left > 0:
            self._last, self._num_changes = inputs, self._batch.num_changes
        return inputs

    def _goes_on(self, last: StepInputs, step: SchedulerOutput) -> bool:
        counts = step.num_scheduled_tokens
        return (
            self._batch.num_changes == self._num_changes
            and step.total_num_scheduled_tokens == len(counts)
            and list(counts) == last.request_ids
            and min(counts.values()) == 1
        )


def _count_steps_in_blocks(inputs: StepInputs, block_size: int) -> int:
    """Return for how many steps all sequences stay in their blocks, if each got one token and is sampled from."""
    if len(inputs.positions) != len(inputs.rows) or not inputs.is_sampled.all():
        return 0
    return block_size - 1 - int(((inputs.attn.host.seq_lens - 1) % block_size).max())


def _follow(last: StepInputs, batch: InputBatch, backend: AttentionBackend, device: torch.device) -> StepInputs:
    """Return the inputs of the step after `last`: each sequence's next token, in the block of its last one."""
    attn = backend.advance_metadata(last.attn, device)
    positions = attn.host.positions
    tokens = batch.token_ids[last.rows, positions].astype(np.int64)
    return StepInputs(
        request_ids=last.request_ids,
        rows=last.rows,
        first_positions=last.first_positions + 1,
        query_starts=last.query_starts,
        is_sampled=last.is_sampled,
        input_ids=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        attn=attn,
    )


def copy_blocks(
    kv_caches: list[torch.Tensor], backend: AttentionBackend, store: ScoreStore | None, copies: list[BlockCopy]
) -> None:
    """Run a step's block copies, in order, on every layer."""
    if not copies:
        return
    origin: dict[int, int] = {}  # block → the block whose content it ends with, so that all can be read first
    for copy in copies:
        origin[copy.target] = origin.get(copy.source, copy.source)
    device = kv_caches[0].device
    targets = torch.tensor(list(origin), device=device)
    sources = torch.tensor(list(origin.values()), device=device)
    for kv_cache in kv_caches:
        backend.copy_blocks(kv_cache, sources, targets)
    if store is not None:
        store.copy_blocks(sources, targets)
