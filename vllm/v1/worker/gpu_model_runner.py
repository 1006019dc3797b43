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
from vllm.model_executor.dtypes import choose_dtypes
from vllm.model_executor.model_loader import load_model
from vllm.v1.attention import get_attention_backend
from vllm.v1.messages import ModelRunnerOutput, SchedulerOutput
from vllm.v1.sample.ops.logprobs import RowKind, score
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.batch_invariance import check_batch_invariant
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.kv_cache import KVCache
from vllm.v1.worker.prompt_logprobs_cache import PromptLogprobsCache, score_kept_rows
from vllm.v1.worker.scored_rows import choose_workspace_rows, iter_kept_answers, iter_prompt_chunks
from vllm.v1.worker.step_inputs import StepInputs, StepInputsMaker
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
        compute_dtype = choose_dtypes(
            dtype, quantization, device.type, batch_invariant=vllm_config.batch_invariant
        ).compute
        self.kv_cache = KVCache(vllm_config, self.backend, compute_dtype, device)
        self.block_size = vllm_config.cache_config.block_size
        self.vocab_size = vllm_config.model_config.vocab_size
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.workspace_rows = choose_workspace_rows(self.vocab_size)
        self.sampler = Sampler()
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
        self.model.on_weights_changed.append(self._notify_weights_changed)
        self.model.on_weights_changed.append(self.invalidate_model)
        self._notify_weights_changed()

    def drop_model(self) -> None:
        """Give the weights back; `load_model` reads them again."""
        vars(self).pop("model", None)

    def release(self) -> None:
        """Give everything back."""
        self.drop_model()
        self.kv_cache.drop()
        for name in ("workspace", "batch", "step_inputs"):
            vars(self).pop(name, None)

    def invalidate_model(self) -> None:
        """Invalidate what the model keeps, if there is one: code which is not the engine's may have changed it."""
        if "model" in vars(self):
            self.model.invalidate()

    def _notify_weights_changed(self) -> None:
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
        self.step_inputs = StepInputsMaker(self.batch, self.backend, self.block_size, self.workspace_rows, self.device)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Take the KV cache; `kv_cache.drop` gives it back."""
        self.kv_cache.allocate(self.model.get_cache_specs(), num_blocks)

    # ------------------------------------------------------------ a step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; requests whose logits are not finite come back in `errors`, the others as if alone."""
        if self._is_mid_step:  # the step before raised: the core has dropped all that ran
            self.allocate_batch(self.batch.max_model_len)
        self._is_mid_step = True
        output = self._run_step(scheduler_output)
        self._is_mid_step = False
        return output

    def _run_step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        seconds = self.seconds
        marks = [time.perf_counter()]
        self._update_batch(scheduler_output)
        marks.append(time.perf_counter())
        results = StepResults()
        self.kv_cache.copy_blocks(scheduler_output.block_copies)
        if scheduler_output.total_num_scheduled_tokens == 0:
            self._score_prompts(None, None, scheduler_output, results)
            return results.finish()
        inputs = self.step_inputs.make(scheduler_output)
        marks.append(time.perf_counter())
        hidden = self.model(inputs.input_ids, inputs.positions, self.kv_cache.layers, inputs.attn)
        marks.append(time.perf_counter())
        self._sample(hidden, inputs, results)
        marks.append(time.perf_counter())
        self._score_prompts(hidden, inputs, scheduler_output, results)
        marks.append(time.perf_counter())
        output = results.finish()
        self._append_tokens(output)
        marks.append(time.perf_counter())
        seconds.num_steps += 1
        parts = ("update", "prepare", "forward", "sample", "score_prompts", "output")
        for part, (start, end) in zip(parts, itertools.pairwise(marks), strict=True):
            setattr(seconds, part, getattr(seconds, part) + end - start)
        return output

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        """Let requests leave, then enter, then grow."""
        batch = self.batch
        for request_id in scheduler_output.left_request_ids:
            batch.remove(request_id)
        for new in scheduler_output.new_requests:
            batch.add(new)
        running = scheduler_output.running
        rows = [batch.row_of[request_id] for request_id in running.request_ids]
        batch.num_computed[rows] = running.num_computed_tokens
        for row, block_ids in zip(rows, running.new_block_ids, strict=True):
            if block_ids:
                batch.block_table.append(row, block_ids)

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs, results: StepResults) -> None:
        """Sample from, and score, the last row of each request that has reached its end."""
        for chunk in inputs.sampled:
            logits = self.model.compute_logits(hidden[chunk.hidden_rows], out=self.workspace[: len(chunk.rows)])
            output = self.sampler(logits, chunk.metadata)
            self.num_scored_sample_rows += sum(owner.num_rows for owner in chunk.owners)
            results.add_samples(output, chunk.request_ids, chunk.num_draws, chunk.owners)

    def _score_prompts(
        self,
        hidden: torch.Tensor | None,
        inputs: StepInputs | None,
        scheduler_output: SchedulerOutput,
        results: StepResults,
    ) -> None:
        """Score the prompt tokens that the scheduler names; None: no position ran in this step."""
        batch, cache = self.batch, self.kv_cache.prompt_logprobs
        if cache is not None and hidden is not None and inputs is not None:
            self._keep_states(cache, hidden, inputs)
        if not scheduler_output.prompt_ranges:
            return
        num_kept = -1 if cache is None else cache.num_kept
        ranges, known = scheduler_output.prompt_ranges, scheduler_output.known_scores
        for chunk in iter_prompt_chunks(batch, ranges, known, self.workspace_rows, num_kept):
            if cache is not None:
                states = cache.read_states(cache.find_slots(batch.block_table, chunk.rows, chunk.positions - 1))
            else:
                assert hidden is not None and inputs is not None, "nothing is kept, so rows come from this step"
                hidden_rows = inputs.find_hidden_rows(chunk.rows, chunk.positions - 1)
                states = hidden[torch.from_numpy(hidden_rows).to(self.device)]
            logits = self.model.compute_logits(states, out=self.workspace[: len(states)])
            chosen = torch.from_numpy(chunk.chosen).to(self.device)
            self.num_scored_prompt_rows += len(states)
            if cache is not None:
                rows, is_finite = score_kept_rows(logits, chosen, cache.num_kept)
                cache.write_scores(cache.find_slots(batch.block_table, chunk.rows, chunk.positions), rows)
                if chunk.is_kept:
                    results.check_prompts(is_finite, chunk.owners)
                    continue
            results.add_prompts(score(logits, chosen, chunk.table), chunk.owners)
        if cache is None:
            return
        for answer in iter_kept_answers(batch, ranges, num_kept):
            slots = cache.find_slots(batch.block_table, answer.rows, answer.positions)
            results.add_kept_prompts(cache.read_answer(slots, answer.num_top, answer.as_logits), answer.owners)

    def _keep_states(self, cache: PromptLogprobsCache, hidden: torch.Tensor, inputs: StepInputs) -> None:
        """Keep the hidden states of the requests that asked for prompt logprobs; the others cost nothing."""
        if self.batch.num_with_prompt_scores == 0:
            return
        asks = self.batch.prompt_kind[inputs.rows] != RowKind.NONE
        slots = inputs.attn.slot_mapping
        if asks.all():
            cache.write_states(slots, hidden)
            return
        index = np.flatnonzero(np.repeat(asks, np.diff(inputs.query_starts)))
        rows = torch.from_numpy(index).to(self.device)
        cache.write_states(slots[rows], hidden[rows])

    def _append_tokens(self, output: ModelRunnerOutput) -> None:
        """Let each sequence grow by its token; a family's draws belong to children that are still to come."""
        sampled, batch = output.sampled, self.batch
        if not sampled.request_ids:
            return
        rows = np.array([batch.row_of[request_id] for request_id in sampled.request_ids])
        token_ids = np.array([run[0] for run in sampled.token_ids], dtype=np.int32)
        is_single = batch.num_draws[rows] == 1
        batch.append_tokens(rows[is_single], token_ids[is_single])
