"""The model runner: update → prepare → forward → sample → score → output.

The same code runs on a CPU and on a CUDA GPU; the name is the one that clients reach for.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm import host_memory
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.number_types import choose_number_types
from vllm.v1.attention import get_attention_backend
from vllm.v1.messages import ModelRunnerOutput, SchedulerOutput
from vllm.v1.sample.ops.logprobs import RowKind, score
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.batch_invariance import check_batch_invariant
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampled_rows import SampledRows
from vllm.v1.worker.sampling_inputs import SamplingInputs
from vllm.v1.worker.score_store import ScoreStore, score_kept_rows
from vllm.v1.worker.scored_rows import choose_workspace_rows, find_hidden_rows, iter_kept_answers, iter_prompt_chunks
from vllm.v1.worker.step_inputs import InputsOfSteps, StepInputs, copy_blocks
from vllm.v1.worker.step_results import StepResults


@dataclass(slots=True)
class StepSeconds:
    """Wall-clock seconds since start-up, by part of a step (on a GPU: of launching it)."""

    num_steps: int = 0
    update: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    score_prompts: float = 0.0
    output: float = 0.0


class GPUModelRunner:
    """Runs steps on one device.

    The scheduler says what runs; the runner keeps each request's tokens and block table between steps (`batch`).
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.backend = get_attention_backend(device)
        self.dtype = dtype
        quantization = vllm_config.model_config.quantization
        self.compute_dtype = choose_number_types(
            dtype, quantization, device.type, batch_invariant=vllm_config.batch_invariant
        ).compute
        kv_cache_dtype = vllm_config.cache_config.kv_cache_dtype
        self.kv_dtype = self.compute_dtype if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype)
        self.block_size = vllm_config.cache_config.block_size
        self.vocab_size = vllm_config.model_config.vocab_size
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.workspace_rows = choose_workspace_rows(self.vocab_size)
        self.sampler = Sampler()
        self.kv_caches: list[torch.Tensor] = []
        self.score_store: ScoreStore | None = None
        self.on_weights_changed: list[Callable[[], None]] = []
        self.seconds = StepSeconds()
        self.num_scored_sample_rows = 0
        self.num_scored_prompt_rows = 0
        self._is_mid_step = False

    # ------------------------------------------------------------ start-up

    def load_model(self) -> None:
        """Read the weights."""
        self.model = load_model(self.vllm_config, self.dtype, self.device)
        if self.vllm_config.batch_invariant:
            check_batch_invariant(self.model, self.device)
        self.model.on_weights_changed.append(self._tell_weights_changed)
        self.model.on_weights_changed.append(self.invalidate_model)
        self._tell_weights_changed()

    def drop_model(self) -> None:
        """Give the weights back; `load_model` reads them again."""
        vars(self).pop("model", None)

    def release(self) -> None:
        """Give everything back."""
        self.drop_model()
        self.drop_kv_caches()
        for name in ("workspace", "batch", "inputs_of_steps", "sampled_rows", "sampling_inputs"):
            vars(self).pop(name, None)

    def invalidate_model(self) -> None:
        """Tell the model, if there is one, that code which is not the engine's may have changed it."""
        if "model" in vars(self):
            self.model.invalidate()

    def _tell_weights_changed(self) -> None:
        for callback in self.on_weights_changed:
            callback()

    def allocate_workspace(self) -> None:
        """Take the logits workspace that sampling and prompt scoring share."""
        self.workspace = torch.empty((self.workspace_rows, self.vocab_size), dtype=torch.float32, device=self.device)
        if self.device.type == "cpu":
            host_memory.advise_huge_pages(self.workspace.data_ptr(), self.workspace.nbytes)

    def allocate_batch(self, max_model_len: int) -> None:
        """Take the persistent batch."""
        self.batch = InputBatch(self.max_num_reqs, max_model_len, self.block_size, self.vocab_size)
        self.inputs_of_steps = InputsOfSteps(self.batch, self.backend, self.block_size, self.device)
        self.sampled_rows = SampledRows(self.batch, self.workspace_rows, self.device)
        self.sampling_inputs = SamplingInputs(self.batch)

    def allocate_kv_caches(self, num_blocks: int) -> None:
        """Take the KV cache, and what blocks keep for prompt logprobs; pages are touched when they are written."""
        transformer = self.vllm_config.model_config.transformer
        self.kv_caches = self._make_kv_caches(num_blocks)
        cache_config = self.vllm_config.cache_config
        if cache_config.keeps_prompt_logprobs:
            self.score_store = ScoreStore(
                num_blocks=num_blocks,
                block_size=self.block_size,
                max_num_reqs=self.max_num_reqs,
                vocab_size=self.vocab_size,
                hidden_size=transformer.hidden_size,
                num_kept=cache_config.num_kept_logprobs,
                dtype=self.compute_dtype,
                device=self.device,
            )

    def _make_kv_caches(self, num_blocks: int) -> list[torch.Tensor]:  # a layer
        return [
            self.backend.make_cache(spec, num_blocks, self.block_size, self.kv_dtype, self.device)
            for spec in self.model.get_cache_specs()
        ]

    def drop_kv_caches(self) -> None:
        """Give the KV cache back; `allocate_kv_caches` takes it again."""
        self.kv_caches = []
        self.score_store = None

    def kv_bytes_per_block(self) -> int:
        """Return the bytes of a block: keys, values, and what it keeps for prompt logprobs."""
        transformer, cache_config = self.vllm_config.model_config.transformer, self.vllm_config.cache_config
        num_bytes = sum(
            self.backend.count_block_bytes(spec, self.block_size, self.kv_dtype)
            for spec in self.model.get_cache_specs()
        )
        if cache_config.keeps_prompt_logprobs:
            num_kept = cache_config.num_kept_logprobs
            num_bytes += ScoreStore.bytes_per_block(
                self.block_size, self.vocab_size, transformer.hidden_size, num_kept, self.compute_dtype
            )
        return num_bytes

    @torch.inference_mode()
    def run_largest_step(self) -> int:
        """Run a step of max_num_batched_tokens positions, to see what steps take; returns the bytes of its own KV."""
        config = self.vllm_config
        num_tokens = config.scheduler_config.max_num_batched_tokens
        longest = min(num_tokens, config.model_config.max_model_len)
        query_lens = np.array(
            [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)], dtype=np.int32
        )
        max_blocks = -(-longest // self.block_size)
        tables = np.arange(len(query_lens) * max_blocks, dtype=np.int32).reshape(len(query_lens), max_blocks)
        kv_caches = self._make_kv_caches(tables.size)
        attn = self.backend.make_metadata(query_lens, query_lens, tables, self.block_size, self.device)
        positions = torch.from_numpy(attn.host.positions).to(self.device)
        hidden = self.model(torch.zeros_like(positions), positions, kv_caches, attn)
        rows = hidden[: self.workspace_rows]
        self.model.compute_logits(rows, out=self.workspace[: len(rows)])
        return sum(kv_cache.nbytes for kv_cache in kv_caches)

    # ------------------------------------------------------------ a step

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; requests whose logits are not finite come back in `errors`, the others as if alone."""
        if self._is_mid_step:  # the step before raised: the core has dropped all that ran
            self.allocate_batch(self.batch.max_model_len)
        self._is_mid_step = True
        output = self._run_step(step)
        self._is_mid_step = False
        return output

    def _run_step(self, step: SchedulerOutput) -> ModelRunnerOutput:
        seconds = self.seconds
        marks = [time.perf_counter()]
        self._update_batch(step)
        marks.append(time.perf_counter())
        results = StepResults()
        copy_blocks(self.kv_caches, self.backend, self.score_store, step.block_copies)
        if step.total_num_scheduled_tokens == 0:
            self._score_prompts(None, None, step, results)
            return results.finish()
        inputs = self.inputs_of_steps.make(step)
        marks.append(time.perf_counter())
        hidden = self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.attn)
        marks.append(time.perf_counter())
        self._sample(hidden, inputs, results)
        marks.append(time.perf_counter())
        self._score_prompts(hidden, inputs, step, results)
        marks.append(time.perf_counter())
        output = results.finish()
        self._append_tokens(output)
        marks.append(time.perf_counter())
        seconds.num_steps += 1
        parts = ("update", "prepare", "forward", "sample", "score_prompts", "output")
        for part, (start, end) in zip(parts, itertools.pairwise(marks), strict=True):
            setattr(seconds, part, getattr(seconds, part) + end - start)
        return output

    def _update_batch(self, step: SchedulerOutput) -> None:
        """Let requests leave, then enter, then grow."""
        batch = self.batch
        for request_id in step.left_request_ids:
            batch.remove(request_id)
        for new in step.new_requests:
            batch.add(new)
        running = step.running
        rows = [batch.row_of[request_id] for request_id in running.request_ids]
        batch.num_computed[rows] = running.num_computed_tokens
        for row, block_ids in zip(rows, running.new_block_ids, strict=True):
            if block_ids:
                batch.block_table.append(row, block_ids)

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs, results: StepResults) -> None:
        """Sample from, and score, the last row of each request that has reached its end."""
        for chunk in self.sampled_rows.find(inputs):
            logits = self.model.compute_logits(hidden[chunk.hidden_rows], out=self.workspace[: len(chunk.rows)])
            output = self.sampler(logits, self.sampling_inputs.make_metadata(chunk.rows, self.device))
            self.num_scored_sample_rows += sum(owner.num_rows for owner in chunk.owners)
            results.add_samples(output, chunk.request_ids, chunk.num_draws, chunk.owners)

    def _score_prompts(
        self, hidden: torch.Tensor | None, inputs: StepInputs | None, step: SchedulerOutput, results: StepResults
    ) -> None:
        """Score the prompt tokens that the scheduler names; None: no position ran in this step."""
        batch, store = self.batch, self.score_store
        if store is not None and hidden is not None and inputs is not None:
            self._keep_states(store, hidden, inputs)
        if not step.prompt_ranges:
            return
        num_kept = -1 if store is None else store.num_kept
        for chunk in iter_prompt_chunks(batch, step.prompt_ranges, step.known_scores, self.workspace_rows, num_kept):
            if store is not None:
                states = store.read_states(store.find_slots(batch.block_table, chunk.rows, chunk.positions - 1))
            else:
                assert hidden is not None and inputs is not None, "nothing is kept, so rows come from this step"
                states = hidden[torch.from_numpy(find_hidden_rows(inputs, chunk)).to(self.device)]
            logits = self.model.compute_logits(states, out=self.workspace[: len(states)])
            chosen = torch.from_numpy(chunk.chosen).to(self.device)
            self.num_scored_prompt_rows += len(states)
            if store is not None:
                rows, is_finite = score_kept_rows(logits, chosen, store.num_kept)
                store.write_scores(store.find_slots(batch.block_table, chunk.rows, chunk.positions), rows)
                if chunk.is_kept:
                    results.check_prompts(is_finite, chunk.owners)
                    continue
            results.add_prompts(score(logits, chosen, chunk.table), chunk.owners)
        if store is None:
            return
        for answer in iter_kept_answers(batch, step.prompt_ranges, num_kept):
            slots = store.find_slots(batch.block_table, answer.rows, answer.positions)
            results.add_kept_prompts(store.read_answer(slots, answer.num_top, answer.as_logits), answer.owners)

    def _keep_states(self, store: ScoreStore, hidden: torch.Tensor, inputs: StepInputs) -> None:
        """Keep the hidden states of the requests that asked for prompt logprobs; the others cost nothing."""
        if self.batch.num_with_prompt_scores == 0:
            return
        asks = self.batch.prompt_kind[inputs.rows] != RowKind.NONE
        slots = inputs.attn.slot_mapping
        if asks.all():
            store.write_states(slots, hidden)
            return
        index = np.flatnonzero(np.repeat(asks, np.diff(inputs.query_starts)))
        rows = torch.from_numpy(index).to(self.device)
        store.write_states(slots[rows], hidden[rows])

    def _append_tokens(self, output: ModelRunnerOutput) -> None:
        """Let each sequence grow by its token; a family's draws belong to children that are still to come."""
        sampled, batch = output.sampled, self.batch
        if not sampled.request_ids:
            return
        rows = np.array([batch.row_of[request_id] for request_id in sampled.request_ids])
        token_ids = np.array([run[0] for run in sampled.token_ids], dtype=np.int32)
        is_single = batch.num_draws[rows] == 1
        batch.append_tokens(rows[is_single], token_ids[is_single])
