"""The engine core: it joins the scheduler (who runs) and the executor (how it runs), one step at a time."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import (
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)

_NOTHING_MADE = ModelRunnerOutput(token_ids={})


class EngineCore:
    """Requests in, outputs out; the only owner of scheduler and executor. Not for several threads at once."""

    def __init__(self, vllm_config: VllmConfig, executor_class: type[Executor]) -> None:
        self.model_executor = executor_class(vllm_config)
        ready = self.model_executor.start()
        max_model_len = ready.max_model_len
        if not vllm_config.model_config.max_model_len_is_given:
            # A length that nobody asked for should not promise what the KV cache can't hold.
            max_model_len = min(max_model_len, ready.num_gpu_blocks * vllm_config.cache_config.block_size)
        self.ready: EngineCoreReady = msgspec.structs.replace(ready, max_model_len=max_model_len)
        self.vllm_config = vllm_config.with_max_model_len(max_model_len)
        self.scheduler = Scheduler(self.vllm_config, ready.num_gpu_blocks)
        self.model_executor.on_weights_changed.append(self._forget_prefixes)

    # ------------------------------------------------------------ requests and steps

    def add_request(self, request: EngineCoreRequest) -> None:
        """Let a request, or a family as a whole, in.

        Raises:
            VLLMValidationError: it could never run to its end, or its id is in use.
        """
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, children, or whole families by their id; unknown ids are ignored."""
        self.scheduler.abort_requests(request_ids)

    def has_work(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Run one step and return what it brought; with nothing to do, an empty answer.

        When it raises, the engine stays usable and nothing is left half done. If the executor raised, the families of
        all running requests are gone and those that waited wait on; if the scheduler itself was broken off (Ctrl-C),
        all requests are gone.
        """
        is_executing = False
        try:
            plan = self.scheduler.schedule()
            is_executing = True
            made = self._execute(plan)
            is_executing = False
            return self.scheduler.update_from_output(plan, made)
        except BaseException:
            if is_executing:
                self.scheduler.abort_running()
            else:
                self.scheduler.forget_everything()
            raise

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if not plan.num_scheduled_tokens and not plan.left_request_ids:
            return _NOTHING_MADE
        return self.model_executor.execute_model(plan)

    # ------------------------------------------------------------ control

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests go on."""
        return self.scheduler.reset_prefix_cache()

    def _forget_prefixes(self) -> None:
        self.scheduler.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back; requests lose their KV and are computed again after `wake_up`."""
        self.scheduler.preempt_everything()
        self.model_executor.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.model_executor.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        return self.model_executor.is_sleeping

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method by name, or a function with the worker as first argument; an answer a worker."""
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def get_stats(self) -> SchedulerStats:
        return self.scheduler.get_stats()

    def shutdown(self) -> None:
        self.model_executor.shutdown()
