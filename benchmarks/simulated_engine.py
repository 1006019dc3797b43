"""An engine without a model: scheduler and front end are real, a script answers at once in the model's place.

What a token then costs is the engine's own Python: deciding the step, taking in what it made, and making outputs of it.
"""

import gc
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from vllm import RequestOutput, SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, TransformerConfig, VllmConfig
from vllm.logprobs.block import LogprobsBlock
from vllm.logprobs.rows import EMPTY_SLOT
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.wire import Decoder, Encoder, MessageFromCore, StepDone
from vllm.v1.messages import ModelRunnerOutput, RowRange, SampledTokens, SchedulerOutput

_PROMPT_LEN = 8
_BLOCK_SIZE = 16


class Workload(NamedTuple):
    """Requests that all run at once."""

    num_requests: int
    kind: RequestOutputKind
    num_top: int | None  # `logprobs` of each
    max_tokens: int = 64

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.max_tokens


class Cost(NamedTuple):
    """What a token of one request costs: microseconds, and objects that the garbage collector must visit."""

    schedule: float  # deciding who runs
    update: float  # the scores are packed, and the core takes in what the step made
    process: float  # the front end makes outputs of it
    wire: float  # between the two where the core is a process of its own: written, and read again; else 0
    objects: float  # tracked by the garbage collector and alive while the caller holds his outputs

    @property
    def front_end(self) -> float:
        return self.update + self.process


class ScriptedExecutor:
    """Draws the next tokens from a list, and has the scores of a step ready before anybody asks."""

    def __init__(self, num_requests: int, num_top: int | None, vocab_size: int, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._num_steps = 0
        self._has_scores = num_top is not None
        draw = np.random.default_rng(0)
        width = 1 + (num_top or 0)
        token_ids = draw.integers(0, vocab_size, (num_requests, width)).astype(np.int32)
        values = -draw.random((num_requests, width)).astype(np.float32)
        ranks = np.tile(np.arange(1, width + 1, dtype=np.int32), (num_requests, 1))
        num_entries = np.maximum(width - draw.integers(0, 2, num_requests), 1)
        token_ids[ranks > num_entries[:, None]] = EMPTY_SLOT
        self._scores = (token_ids, values, ranks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._num_steps += 1
        names, script, first = list(scheduler_output.num_scheduled_tokens), self._token_ids, self._num_steps
        num_rows = len(names)
        rows = [RowRange(i, i + 1) for i in range(num_rows)] if self._has_scores else [None] * num_rows
        sampled = SampledTokens(
            request_ids=names,
            draws=[0] * num_rows,
            token_ids=[[script[(first + i) % len(script)]] for i in range(num_rows)],
            rows=rows,
        )
        return ModelRunnerOutput(sampled=sampled)

    def add_scores(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Do what the runner does with scores once they are on the host."""
        if not self._has_scores:
            return output
        num_rows = len(output.sampled.rows)
        block = LogprobsBlock.of_rectangle(*(column[:num_rows] for column in self._scores))
        return msgspec.structs.replace(output, logprobs=block)


class SimulatedEngine:
    """Runs workloads; every request gets its tokens one a step, as from a model."""

    def __init__(self, tokenizer: Tokenizer, *, has_wire: bool = False, log_stats: bool = False) -> None:
        self.tokenizer = tokenizer
        self._log_stats = log_stats
        self._encoder = Encoder() if has_wire else None
        self._decoder = Decoder(MessageFromCore)
        # What a text is made of: tokens that are whole characters, and not the end.
        text_of = tokenizer.token_bytes.shown(True).text_of
        self._script = [i for i in range(tokenizer.vocab_size) if text_of[i] and i != tokenizer.eos_token_id]

    def run(self, workload: Workload) -> tuple[Cost, list[RequestOutput]]:
        """Return what a token cost, and all outputs."""
        config = self._make_config(workload)
        scheduler = Scheduler(config, workload.num_requests * (1 + (workload.max_tokens + _PROMPT_LEN) // _BLOCK_SIZE))
        executor = ScriptedExecutor(
            workload.num_requests, workload.num_top, config.model_config.vocab_size, self._script
        )
        front_end = OutputProcessor(self.tokenizer, log_stats=self._log_stats)
        self._add_requests(workload, config, scheduler, front_end)
        outputs: list[RequestOutput] = []
        seconds = np.zeros(4)
        clock = time.thread_time  # what neighbours on the machine take from us is not counted
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            held = gc.get_objects()  # what is there stays: a request that ends must not make up for new objects
            while scheduler.has_unfinished_requests():
                begun = clock()
                scheduler_output = scheduler.schedule()
                scheduled = clock()
                runner_output = executor.execute_model(scheduler_output)
                executed = clock()
                step = scheduler.update_from_output(scheduler_output, executor.add_scores(runner_output))
                updated = clock()
                if self._encoder is not None:
                    frames = self._encoder.encode(StepDone(step, True, 0))
                    step = self._decoder.decode([bytes(frame) for frame in frames]).outputs
                arrived = clock()
                outputs += front_end.process_outputs(step).request_outputs
                done = clock()
                seconds += (scheduled - begun, updated - executed, done - arrived, arrived - updated)
            del scheduler_output, runner_output, step
            num_objects = len(gc.get_objects()) - len(held) - 1
        finally:
            if was_enabled:
                gc.enable()
        return Cost(*(1e6 * seconds / workload.num_tokens).tolist(), num_objects / workload.num_tokens), outputs

    def _add_requests(
        self, workload: Workload, config: VllmConfig, scheduler: Scheduler, front_end: OutputProcessor
    ) -> None:
        inputs = InputProcessor(config, self.tokenizer)
        params = SamplingParams(
            output_kind=workload.kind,
            max_tokens=workload.max_tokens,
            logprobs=workload.num_top,
            ignore_eos=True,
            seed=0,
        )
        for number in range(workload.num_requests):
            prompt = {"prompt_token_ids": [self._script[(number + i) % len(self._script)] for i in range(_PROMPT_LEN)]}
            processed = inputs.process(str(number), prompt, params)
            scheduler.add_request(processed.core_request)
            front_end.add_request(processed)

    def _make_config(self, workload: Workload) -> VllmConfig:
        max_model_len = workload.max_tokens + _PROMPT_LEN
        transformer = TransformerConfig(
            architecture="LlamaForCausalLM",
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=8,
            max_position_embeddings=max_model_len,
        )
        return VllmConfig(
            model_config=ModelConfig(
                model="m", path="m", tokenizer="m", transformer=transformer, max_model_len=max_model_len
            ),
            cache_config=CacheConfig(block_size=_BLOCK_SIZE),
            scheduler_config=SchedulerConfig(
                max_num_seqs=workload.num_requests, max_num_batched_tokens=_PROMPT_LEN * workload.num_requests
            ),
        )
