"""The engine for many callers in one event loop; the core runs in a process of its own.

generate ─▶ queue limits ─▶ InputProcessor ─▶ core process
generate ◀─ RequestOutputCollector ◀─ OutputProcessor ◀─┘   (in slices, so that the loop stays responsive)
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, TypeVar, TypeVarTuple

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMUnsupportedError, VLLMValidationError
from vllm.inputs import ParsedPrompt, parse_prompt
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client_mp import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor, ProcessedRequest
from vllm.v1.engine.llm_engine import check_arguments, check_sleep_mode, log_start, make_tokenizer
from vllm.v1.engine.output_collector import RequestOutputCollector
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.queue_limits import QueueLimits
from vllm.v1.engine.wire import Refused
from vllm.v1.messages import EngineCoreOutputs, SchedulerStats
from vllm.v1.metrics.prometheus import SLEEP_STATES, EngineMetrics

logger = init_logger(__name__)

_Args = TypeVarTuple("_Args")
_Answer = TypeVar("_Answer")

# Shorter texts are tokenised in the loop: they take a millisecond, and a thread costs as much.
_LONG_TEXT = 4_000


class AsyncLLM:
    """An engine that any number of tasks of one event loop use at once.

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model))
        async for output in engine.generate("Hello", SamplingParams(logprobs=1), "a"): ...
        engine.shutdown()

    It is made outside of a loop or in one (then the loop waits while the model loads) and serves the loop of its first
    asynchronous call, or a later one when that is gone.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        log_stats: bool = True,
        stream_interval: int = 1,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
    ) -> None:
        started = time.monotonic()
        self._limits = QueueLimits(
            max_num_queued_reqs, max_num_queued_tokens, vllm_config.scheduler_config.max_num_seqs
        )
        self._client = AsyncMPClient(vllm_config, self)
        try:
            self.tokenizer = make_tokenizer(vllm_config.model_config)  # while the core loads the model
            self._client.wait_until_ready()
        except BaseException:
            self._client.shutdown()
            raise
        ready = self._client.ready
        self.vllm_config = vllm_config.with_max_model_len(ready.max_model_len)
        self._input_processor = InputProcessor(self.vllm_config, self.tokenizer)
        self._output_processor = OutputProcessor(self.tokenizer, stream_interval=stream_interval, log_stats=log_stats)
        self.metrics = self._make_metrics() if log_stats else None
        self._collectors: dict[str, RequestOutputCollector] = {}  # of the open requests, by the engine's own ids
        self._dead_error: EngineDeadError | None = None
        self._is_shut_down = False
        self._reopened: asyncio.Event | None = None  # set when a pause ends; None: no pause
        self._idle_waiters: list[asyncio.Future[None]] = []
        log_start(vllm_config, ready, time.monotonic() - started)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> "AsyncLLM":
        """Return the engine that the arguments describe; `start_engine_loop` and `usage_context` change nothing.

        Raises:
            VLLMValidationError: an argument breaks a rule, or asks for what is not served.
            ModelLoadError: the model can't be found or read.
        """
        return cls.from_vllm_config(
            engine_args.create_engine_config(),
            stat_loggers=stat_loggers,
            disable_log_stats=engine_args.disable_log_stats,
            stream_interval=engine_args.stream_interval,
            max_num_queued_reqs=getattr(engine_args, "max_num_queued_reqs", None),
            max_num_queued_tokens=getattr(engine_args, "max_num_queued_tokens", None),
        )

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: VllmConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
        disable_log_stats: bool = False,
        stream_interval: int = 1,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
    ) -> "AsyncLLM":
        """Return an engine for a configuration."""
        if stat_loggers:
            raise VLLMUnsupportedError("stat_loggers is not supported; read `metrics`", parameter="stat_loggers")
        return cls(
            vllm_config,
            log_stats=not disable_log_stats,
            stream_interval=stream_interval,
            max_num_queued_reqs=max_num_queued_reqs,
            max_num_queued_tokens=max_num_queued_tokens,
        )

    def _make_metrics(self) -> EngineMetrics:
        cache = self.vllm_config.cache_config
        metrics = EngineMetrics(self._model_name, self.vllm_config.model_config.max_model_len)
        metrics.set_cache_config(
            block_size=cache.block_size,
            cache_dtype=cache.kv_cache_dtype,
            enable_prefix_caching=cache.enable_prefix_caching,
            gpu_memory_utilization=cache.gpu_memory_utilization,
            num_gpu_blocks=self._client.ready.num_gpu_blocks,
        )
        return metrics

    # ------------------------------------------------------------ requests

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one prompt, of the kind that the params ask for; the last one is `finished`.

        Nothing happens before the first one is asked for. A reader that is slow finds outputs merged, none lost; one
        that goes away (the generator closed, its task cancelled) aborts the request. `prompt` has any of the forms of
        vllm/inputs.py; the params are read now and never changed. The same id may be in use several times.

        Raises:
            VLLMValidationError: the prompt or the params break a rule, or the request could never run to its end.
            QueueOverflowError, MaxQueuedTokensError: the queue has no room for it.
            EngineGenerateError: this request failed; the engine goes on.
            EngineDeadError: the engine has died or was shut down.
        """
        self._attach()
        check_arguments(request_id, lora_request, priority)
        if data_parallel_rank:
            raise VLLMUnsupportedError(
                "data_parallel_rank is not supported: there is one engine", parameter="data_parallel_rank"
            )
        parsed = await self._tokenize(prompt, prompt_text, tokenization_kwargs)
        while self._reopened is not None:
            await self._reopened.wait()
        self._check_alive()
        processed = self._input_processor.process(
            request_id,
            parsed,
            sampling_params,
            arrival_time=arrival_time,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )
        collector = self._admit(processed)
        try:
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            self._leave(processed.core_request.request_id)

    async def _tokenize(self, prompt: Any, prompt_text: str | None, options: Mapping[str, Any] | None) -> ParsedPrompt:
        parsed = prompt if isinstance(prompt, ParsedPrompt) else parse_prompt(prompt)
        if prompt_text is not None and parsed.text is None:
            parsed = parsed._replace(text=prompt_text)
        if parsed.token_ids is not None or len(parsed.text or "") < _LONG_TEXT:
            return parsed  # the input processor does what is left
        (tokenized,) = await asyncio.to_thread(self._input_processor.tokenize, [parsed], options)
        return tokenized

    def _admit(self, processed: ProcessedRequest) -> RequestOutputCollector:
        """Hand a request to the core, or refuse it; from here on it is open."""
        core_request = processed.core_request
        num_prompt_tokens = len(core_request.prompt_token_ids)
        self.check_queue_limits(len(core_request.seeds) * processed.num_copies, num_prompt_tokens)
        self._client.add_request(core_request)
        collector = RequestOutputCollector(core_request.sampling_params.output_kind)
        self._output_processor.add_request(processed, collector)
        self._collectors[core_request.request_id] = collector
        self._limits.add(core_request)
        if self.metrics is not None:
            self.metrics.add_request(core_request, processed.num_copies)
        return collector

    def _leave(self, internal_id: str) -> None:
        """Forget a request whose reader has got everything or is gone; what still runs is aborted."""
        self._abort([internal_id])
        self._collectors.pop(internal_id, None)

    def check_queue_limits(self, num_sequences: int, num_prompt_tokens: int) -> None:
        """Raise unless so much more may enter the queue.

        Raises:
            QueueOverflowError, MaxQueuedTokensError: the queue has no room for it.
        """
        try:
            self._limits.check(num_sequences, num_prompt_tokens, self._client.num_in_flight)
        except (QueueOverflowError, MaxQueuedTokensError) as error:
            if self.metrics is not None:
                is_by_tokens = isinstance(error, MaxQueuedTokensError)
                self.metrics.count_rejection("max_num_queued_tokens" if is_by_tokens else "max_num_queued_reqs")
            raise

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests by their ids, the caller's or the engine's; each gets a last output with reason "abort".

        Unknown ids are ignored; `internal` changes nothing.
        """
        self._attach()
        self._abort([request_id] if isinstance(request_id, str) else list(request_id))

    def _abort(self, ids: list[str]) -> None:
        core_ids = self._output_processor.abort_requests(ids)
        if core_ids:
            self._limits.forget(core_ids)
            self._client.abort_requests(core_ids)
            if self.metrics is not None:
                self.metrics.abort_requests(core_ids)
        self._wake_idle_waiters()

    @property
    def num_unfinished_requests(self) -> int:
        """Requests as callers count them: a family is one."""
        return self._output_processor.num_unfinished_requests

    # ------------------------------------------------------------ what the core sends

    def _attach(self) -> None:
        """Serve the running loop.

        Raises:
            EngineDeadError: there is nothing to serve any more.
        """
        self._check_alive()
        self._client.attach()

    def handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take a step's outputs, or a slice of them."""
        self._limits.note_outputs(outputs)
        processed = self._output_processor.process_outputs(outputs)
        if processed.ids_to_abort:
            self._client.abort_requests(processed.ids_to_abort)
        if self.metrics is not None:
            self.metrics.record_step(outputs, processed.ids_to_abort)
        self._wake_idle_waiters()

    def handle_refusal(self, refused: Refused) -> None:
        """Give a request's reader the core's refusal."""
        collector = self._collectors.get(refused.request_id)
        if collector is not None:
            collector.put(refused.error.rebuild())
        self._abort([refused.request_id])

    def handle_death(self, reason: str) -> None:
        """Fail every open request and every call, now and from now on."""
        if self._dead_error is None and not self._is_shut_down:
            logger.error("%s", reason)
            self._dead_error = EngineDeadError(reason)
            self._end(reason)

    # ------------------------------------------------------------ life and death

    def _end(self, reason: str) -> None:
        for collector in self._collectors.values():
            collector.put(EngineDeadError(reason))
        self._client.shutdown(reason)
        self._abort(self._output_processor.get_live_ids())
        if self._reopened is not None:
            self._reopened.set()
            self._reopened = None

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down; make a new one")
        if self._dead_error is None and self._client.has_died():
            self._client.drain()
        if self._dead_error is not None:
            raise EngineDeadError(str(self._dead_error))

    async def check_health(self) -> None:
        """Return if the engine lives.

        Raises:
            EngineDeadError: it does not.
        """
        self._check_alive()

    @property
    def errored(self) -> bool:
        """Say whether the engine has died; one that was shut down has not."""
        return self._dead_error is not None or (not self._is_shut_down and self._client.has_died())

    @property
    def dead_error(self) -> EngineDeadError:
        return self._dead_error or EngineDeadError()

    @property
    def is_running(self) -> bool:
        return not self._is_shut_down and not self.errored

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop for good; a second call does nothing.

        Open requests fail with EngineDeadError. To be called in the loop's own thread, or when the loop is gone; it
        takes a second at most, whatever `timeout` says.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._end("the engine was shut down; make a new one")

    # ------------------------------------------------------------ control

    async def _call(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        self._attach()
        return await self._client.call_utility(method, *args)

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Let no request in until `resume_generation`: later calls of `generate` wait.

        Mode "abort" ends those that are open, "wait" waits for their end, "keep" halts them where they are (with what
        they have computed). `wait_for_inflight_requests` is mode "wait" under its older name. `clear_cache` forgets all
        cached prefixes.
        """
        self._attach()
        if wait_for_inflight_requests is not None:
            mode = "wait" if wait_for_inflight_requests else "abort"
        check_sleep_mode(mode)
        if self._reopened is None:
            self._reopened = asyncio.Event()
        if mode == "keep":
            await self._call(EngineCore.pause, "generation")
        else:
            await self._clear(mode)
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """End a pause."""
        if self._reopened is not None:
            self._reopened.set()
            self._reopened = None
            await self._call(EngineCore.resume, "generation")

    async def is_paused(self) -> bool:
        return self._reopened is not None

    async def _clear(self, mode: str) -> None:
        """Bring open requests to their end."""
        if mode == "abort":
            self._abort(self._output_processor.get_live_ids())
        while mode == "wait" and self._output_processor.has_unfinished_requests():
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter
            self._check_alive()

    def _wake_idle_waiters(self) -> None:
        if not self._idle_waiters or self._output_processor.has_unfinished_requests():
            return
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes; requests that run go on with what they have."""
        return await self._call(EngineCore.reset_prefix_cache)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: level 1 keeps the weights aside, level 2 drops them; level 0 only stops stepping.

        Mode "abort" ends the open requests first, "wait" waits for their end; with "keep" they, and those that come
        meanwhile, are computed after `wake_up`.
        """
        self._attach()
        check_sleep_mode(mode)
        if level not in range(len(SLEEP_STATES)):
            raise VLLMValidationError("level must be 0, 1 or 2", parameter="level", value=level)
        await self._clear(mode)
        await (self._call(EngineCore.sleep, level) if level else self._call(EngineCore.pause, "sleep"))
        if self.metrics is not None:
            self.metrics.set_sleep_state(SLEEP_STATES[level])

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again and go on: all of it, or what `tags` name ("weights", "kv_cache", "scheduling")."""
        await self._call(EngineCore.wake_up, tags)
        if self.metrics is not None and not await self.is_sleeping():
            self.metrics.set_sleep_state("awake")

    async def is_sleeping(self) -> bool:
        """Say whether memory is given back and not all of it taken again, or the core paused by level 0."""
        return await self._call(EngineCore.is_sleeping)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method by name; numbers, text, lists, dicts and numpy arrays can travel.

        Raises:
            VLLMUnsupportedError: `method` is a function.
            TypeError: an argument or the answer can't travel.
            asyncio.TimeoutError: no answer came in `timeout` seconds.
        """
        return await asyncio.wait_for(self._call(EngineCore.collective_rpc, method, timeout, args, kwargs), timeout)

    # ------------------------------------------------------------ what it is

    @property
    def _model_name(self) -> str:
        model_config = self.vllm_config.model_config
        return model_config.served_model_name or model_config.model

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, with the length that the core settled on."""
        return self.vllm_config.model_config

    async def get_tokenizer(self) -> Any:
        """Return the tokenizer as a Hugging Face object, made in a thread (it loads transformers)."""
        config = self.model_config
        return await asyncio.to_thread(
            get_tokenizer,
            config.tokenizer,
            tokenizer_mode=config.tokenizer_mode,
            trust_remote_code=config.trust_remote_code,
        )

    async def get_stats(self) -> SchedulerStats:
        """Return gauges as they are, and counters since start-up."""
        return await self._call(EngineCore.get_stats)

    async def do_log_stats(self) -> None:
        """Write a line about the time since the last one into the log."""
        if self.metrics is not None and (line := self.metrics.format_log_line()) is not None:
            logger.info("%s", line)
