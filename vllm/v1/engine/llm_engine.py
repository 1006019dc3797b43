"""The engine that its caller steps: requests in, a step at a time, outputs out."""

import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMServerError, VLLMUnsupportedError, VLLMValidationError
from vllm.inputs import ParsedPrompt
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.loader import load_tokenizer
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient, InprocClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.messages import EngineCoreReady, SchedulerStats

logger = init_logger(__name__)

SLEEP_MODES = ("abort", "keep", "wait")


class LLMEngine:
    """Ties input processor, core and output processor together. Not for several threads at once.

    engine = LLMEngine.from_engine_args(EngineArgs(model))
    engine.add_request("a", "Hello", SamplingParams(logprobs=1))
    while engine.has_unfinished_requests():
        for output in engine.step(): ...
    """

    def __init__(self, vllm_config: VllmConfig, *, log_stats: bool = False, stream_interval: int = 1) -> None:
        started = time.monotonic()
        self._is_shut_down = False
        with ThreadPoolExecutor(1) as beside:  # reading a tokenizer takes a third of a second
            tokenizer = beside.submit(make_tokenizer, vllm_config.model_config)
            self.engine_core: EngineCoreClient = make_core_client(vllm_config)
        try:
            self.tokenizer = tokenizer.result()
        except BaseException:
            self.engine_core.shutdown()
            raise
        ready = self.engine_core.ready
        self.vllm_config = vllm_config.with_max_model_len(ready.max_model_len)
        self.input_processor = InputProcessor(self.vllm_config, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer, stream_interval=stream_interval, log_stats=log_stats)
        log_start(vllm_config, ready, time.monotonic() - started)

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: Any = None, stat_loggers: Any = None
    ) -> "LLMEngine":
        """Return the engine that the arguments describe; `usage_context` changes nothing."""
        if stat_loggers:
            raise VLLMUnsupportedError("stat_loggers is not supported; leave it out", parameter="stat_loggers")
        return cls(
            engine_args.create_engine_config(),
            log_stats=not engine_args.disable_log_stats,
            stream_interval=engine_args.stream_interval,
        )

    # ------------------------------------------------------------ requests

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Let a request in and return the engine's own id of it; `abort_request` takes either id.

        `prompt` has any of the forms of vllm/inputs.py. The params are read now and never changed.

        Raises:
            VLLMValidationError: the prompt or the params break a rule, or the request could never run to its end.
            TypeError: an argument has the wrong type.
            EngineDeadError: the engine was shut down.
        """
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down; make a new one")
        check_arguments(request_id, lora_request, priority)
        processed = self.input_processor.process(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )
        self.engine_core.add_request(processed.core_request)
        self.output_processor.add_request(processed)
        return processed.core_request.request_id

    def tokenize(self, prompts: list[ParsedPrompt], tokenization_kwargs: Any = None) -> list[ParsedPrompt]:
        """Return the prompts with token ids; many texts are tokenised faster together than one by one."""
        return self.input_processor.tokenize(prompts, tokenization_kwargs)

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs that it led to.

        When the core raises, all requests are gone and the engine can be used again.
        """
        try:
            core_outputs = self.engine_core.get_output()
            processed = self.output_processor.process_outputs(core_outputs)
            if processed.ids_to_abort:
                self.engine_core.abort_requests(processed.ids_to_abort)
        except BaseException:
            self.abort_all_requests()
            raise
        if self.output_processor.has_unfinished_requests() and not self.engine_core.has_work():
            self.abort_all_requests()
            raise VLLMServerError("the engine core has lost requests: it has no work, and they are not answered")
        return processed.request_outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests by their ids, the caller's or the engine's, without an output; unknown ones are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self.engine_core.abort_requests(self.output_processor.abort_requests(ids))

    def abort_all_requests(self) -> None:
        """End everything that is not finished."""
        self.abort_request(self.output_processor.get_live_ids())

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """Requests as callers count them: a family is one."""
        return self.output_processor.num_unfinished_requests

    # ------------------------------------------------------------ what it is

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, with the length that the core settled on."""
        return self.vllm_config.model_config

    @property
    def model_executor(self) -> Any:
        """The executor; trainers reach the model as `.driver_worker.model_runner.model`."""
        return self.engine_core.model_executor

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def get_stats(self) -> SchedulerStats:
        """Return gauges as they are, and counters since start-up (computed positions among them)."""
        return self.engine_core.call_utility(EngineCore.get_stats)

    # ------------------------------------------------------------ control

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes; requests that run go on with what they have."""
        return self.engine_core.call_utility(EngineCore.reset_prefix_cache)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: level 1 keeps the weights aside, level 2 drops them.

        Mode "abort" ends the requests that are not finished; with "keep" and "wait" they are computed again afterwards.
        """
        check_sleep_mode(mode)
        if mode == "abort":
            self.abort_all_requests()
        self.engine_core.call_utility(EngineCore.sleep, level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again: all of it, or what `tags` name ("weights", "kv_cache")."""
        self.engine_core.call_utility(EngineCore.wake_up, tags)

    def is_sleeping(self) -> bool:
        return self.engine_core.call_utility(EngineCore.is_sleeping)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method by name, or a function with the worker as first argument; an answer a worker."""
        return self.engine_core.call_utility(EngineCore.collective_rpc, method, timeout, args, kwargs)

    def shutdown(self) -> None:
        """Stop for good and give all memory back; a second call does nothing."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self.abort_all_requests()
            self.engine_core.shutdown()


def make_core_client(vllm_config: VllmConfig) -> EngineCoreClient:
    """Return a core in this process, or in one of its own where the environment asks for that."""
    if envs.enable_v1_multiprocessing():
        # Loaded only then, since it brings zmq.
        return pkgutil.resolve_name("vllm.v1.engine.core_client_mp:SyncMPClient")(vllm_config)
    return InprocClient(vllm_config)


def check_sleep_mode(mode: str) -> None:
    """Raise unless `mode` says what becomes of requests when an engine sleeps or pauses."""
    if mode not in SLEEP_MODES:
        raise VLLMValidationError(
            f"mode must be one of {', '.join(SLEEP_MODES)}; got {mode!r}", parameter="mode", value=mode
        )


def check_arguments(request_id: Any, lora_request: Any, priority: Any) -> None:
    """Raise for what no request may have, whatever its prompt and params."""
    if not isinstance(request_id, str):
        raise TypeError(f"request_id must be a str; got {type(request_id).__name__}")
    refuse_lora(lora_request)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise VLLMValidationError("priority must be a whole number", parameter="priority", value=priority)


def refuse_lora(lora_request: Any) -> None:
    """Raise for a LoRA adapter; None, and a list of Nones, ask for nothing."""
    asked = lora_request if isinstance(lora_request, list | tuple) else [lora_request]
    if any(item is not None for item in asked):
        raise VLLMUnsupportedError("lora_request is not supported: there is no LoRA here", parameter="lora_request")


def make_tokenizer(model_config: ModelConfig) -> Tokenizer | None:
    """Return the tokenizer that the configuration names; None where it wants none."""
    if model_config.skip_tokenizer_init:
        return None
    return load_tokenizer(
        model_config.tokenizer,
        mode=model_config.tokenizer_mode,
        trust_remote_code=model_config.trust_remote_code,
    )


def log_start(vllm_config: VllmConfig, ready: EngineCoreReady, seconds: float) -> None:
    """Say in the log what has started."""
    model_config = vllm_config.model_config
    logger.info(
        "%s ready: %s on %s, %d KV tokens, %d %s, %.1f s",
        model_config.served_model_name or model_config.model,
        ready.dtype,
        ready.device,
        ready.num_gpu_blocks * vllm_config.cache_config.block_size,
        ready.num_threads,
        "thread" if ready.num_threads == 1 else "threads",
        seconds,
    )
