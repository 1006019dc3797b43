"""From the scheduler's output to what the model and the sampler read; one pass over arrays, nothing a token."""

from typing import NamedTuple

import numpy as np
import torch

from vllm.v1.attention import AttentionBackend, AttentionMetadata
from vllm.v1.messages import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampled_rows import SampledChunk, advance_sampled_chunk, make_sampled_chunks


class StepInputs(NamedTuple):
    """The requests of a step, in the order of their tokens."""

    request_ids: list[str]
    rows: np.ndarray  # [num_reqs] int64, rows of the batch
    first_positions: np.ndarray  # [num_reqs] int32, positions computed before this step
    query_starts: np.ndarray  # [num_reqs + 1] int64, where each one's tokens start
    input_ids: torch.Tensor  # [num_tokens] int64, device
    positions: torch.Tensor  # [num_tokens] int64, device
    attn: AttentionMetadata
    sampled: list[SampledChunk]  # of those that have reached their end

    def find_hidden_rows(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:  # [num] int64 each → [num] int64
        """Return the rows of the step's hidden states at these positions of rows of the batch."""
        place = np.full(int(self.rows.max()) + 1, -1, dtype=np.int64)
        place[self.rows] = np.arange(len(self.rows))
        index = place[rows]
        offsets = positions - self.first_positions[index]
        hidden_rows = self.query_starts[index] + offsets
        assert (offsets >= 0).all() and (hidden_rows < self.query_starts[index + 1]).all(), "a row is not in this step"
        return hidden_rows


class StepInputsMaker:
    """Makes the inputs of one batch, step after step.

    While a decode batch goes on, all but the tokens is that of the step before or follows from it: a few operations of
    numpy in place of a hundred, which cost 3 to 5 µs each while a step's weights drive Python's data out of the cache.
    """

    def __init__(
        self, batch: InputBatch, backend: AttentionBackend, block_size: int, max_sampled_rows: int, device: torch.device
    ) -> None:
        self._batch = batch
        self._backend = backend
        self._block_size = block_size
        self._max_sampled_rows = max_sampled_rows  # of a chunk
        self._device = device
        self._last: StepInputs | None = None  # of a decode batch
        self._batch_id: int | None = None
        self._num_steps_left = 0  # in which no sequence comes to its next block

    def make(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """Return the inputs of a step in which some request has a position to run."""
        batch_id = scheduler_output.decode_batch_id
        last = self._last if batch_id is not None and batch_id == self._batch_id else None
        self._last = None
        if last is None or self._num_steps_left == 0:
            inputs = self._make_anew(scheduler_output, None if last is None else last.sampled)
            if batch_id is not None:
                places = (inputs.attn.host.seq_lens - 1) % self._block_size
                self._num_steps_left = self._block_size - 1 - int(places.max())
        else:
            inputs = self._advance(last)
            self._num_steps_left -= 1
        if batch_id is not None:
            self._last, self._batch_id = inputs, batch_id
        return inputs

    def _make_anew(self, scheduler_output: SchedulerOutput, last_sampled: list[SampledChunk] | None) -> StepInputs:
        """Gather the step's tokens, positions and block tables from the batch."""
        batch, device = self._batch, self._device
        scheduled = {name: count for name, count in scheduler_output.num_scheduled_tokens.items() if count > 0}
        request_ids = list(scheduled)
        rows = np.array([batch.row_of[request_id] for request_id in request_ids], dtype=np.int64)
        query_lens = np.fromiter(scheduled.values(), dtype=np.int32, count=len(request_ids))
        first_positions = batch.num_computed[rows]
        seq_lens = first_positions + query_lens
        num_tokens = batch.num_tokens[rows]
        assert (seq_lens <= num_tokens).all(), "a step may not run past a sequence's known tokens"
        max_blocks = -(-int(seq_lens.max()) // self._block_size)
        assert (batch.block_table.num_blocks[rows] * self._block_size >= seq_lens).all(), "a request ran out of blocks"
        tables = batch.block_table.take_rows(rows, max_blocks)
        attn = self._backend.make_metadata(query_lens, seq_lens, tables, self._block_size, device)
        positions = attn.host.positions
        token_rows = rows if len(positions) == len(rows) else np.repeat(rows, query_lens)
        if last_sampled is not None:
            sampled = [advance_sampled_chunk(batch, chunk, device) for chunk in last_sampled]
        else:
            is_sampled = (seq_lens == num_tokens) & ~batch.is_never_sampled[rows]
            last_rows = attn.host.query_starts[1:] - 1
            sampled = make_sampled_chunks(
                batch, rows[is_sampled], last_rows[is_sampled], self._max_sampled_rows, device
            )
        return StepInputs(
            request_ids=request_ids,
            rows=rows,
            first_positions=first_positions,
            query_starts=attn.host.query_starts,
            input_ids=torch.from_numpy(batch.token_ids[token_rows, positions].astype(np.int64)).to(device),
            positions=torch.from_numpy(positions).to(device),
            attn=attn,
            sampled=sampled,
        )

    def _advance(self, last: StepInputs) -> StepInputs:
        """Return the inputs of the step after `last`: each sequence's next token, in the block of its last one."""
        batch, device = self._batch, self._device
        attn = self._backend.advance_metadata(last.attn, device)
        positions = attn.host.positions
        return last._replace(
            first_positions=last.first_positions + 1,
            input_ids=torch.from_numpy(batch.token_ids[last.rows, positions].astype(np.int64)).to(device),
            positions=torch.from_numpy(positions).to(device),
            attn=attn,
            sampled=[advance_sampled_chunk(batch, chunk, device) for chunk in last.sampled],
        )
