"""The engine core: it joins the scheduler (who runs) and the executor (how it runs), one step at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from vllm.config import VllmConfig
from vllm.exceptions import VLLMUnsupportedError
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

_EMPTY_OUTPUT = ModelRunnerOutput()
_SCHEDULING_TAG = "scheduling"  # of what `wake_up` brings back: the core's own part

_Method = TypeVar("_Method", bound=Callable[..., Any])
UTILITY_CALLS: dict[str, Callable[..., Any]] = {}


def utility(method: _Method) -> _Method:
    """Let front ends call this method of `EngineCore` wherever the core runs: `client.call_utility(method, *args)`.

    Arguments and the answer may have to travel between processes (vllm/v1/engine/wire.py says what can); the answer
    arrives as the type that the method declares.
    """
    UTILITY_CALLS[method.__name__] = method
    return method


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
        self._pauses: set[str] = set()  # why a core that steps by itself does not

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
            scheduler_output = self.scheduler.schedule()
            is_executing = True
            runner_output = self._execute(scheduler_output)
            is_executing = False
            return self.scheduler.update_from_output(scheduler_output, runner_output)
        except BaseException:
            if is_executing:
                self.scheduler.abort_running()
            else:
                self.scheduler.forget_everything()
            raise

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if not scheduler_output.num_scheduled_tokens and not scheduler_output.left_request_ids:
            return _EMPTY_OUTPUT
        return self.model_executor.execute_model(scheduler_output)

    # ------------------------------------------------------------ control

    @utility
    def get_stats(self) -> SchedulerStats:
        """Return gauges as they are, and counters since start-up."""
        return self.scheduler.get_stats()

    @utility
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; running requests go on."""
        return self.scheduler.reset_prefix_cache()

    def _forget_prefixes(self) -> None:
        self.scheduler.reset_prefix_cache()

    @utility
    def pause(self, reason: str) -> None:
        """Let a core that steps by itself take requests in, but run none, until `reason` and all others are gone."""
        self._pauses.add(reason)

    @utility
    def resume(self, reason: str) -> None:
        """Take a reason for the pause back."""
        self._pauses.discard(reason)

    @property
    def may_step(self) -> bool:
        """Say whether a core that steps by itself should: it is not paused, and nothing of it sleeps."""
        return not self._pauses and not self.model_executor.is_sleeping

    @utility
    def sleep(self, level: int) -> None:
        """Give the device's memory back; requests lose their KV and are computed again after `wake_up`."""
        self.scheduler.preempt_everything()
        self.model_executor.collective_rpc("sleep", args=(level,))

    @utility
    def wake_up(self, tags: list[str] | None) -> None:
        """Take the memory back that `tags` name, and end a pause for `sleep`; None is all of it."""
        if tags is None or _SCHEDULING_TAG in tags:
            self.resume("sleep")
        rest = None if tags is None else [tag for tag in tags if tag != _SCHEDULING_TAG]
        if rest is None or rest:
            self.model_executor.collective_rpc("wake_up", args=(rest,))

    @utility
    def is_sleeping(self) -> bool:
        """Say whether memory is given back and not all of it taken again, or the core is paused for `sleep`."""
        return "sleep" in self._pauses or self.model_executor.is_sleeping

    @utility
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> list[Any]:
        """Call a worker's public method by name, or a function with the worker as first argument; an answer a worker.

        Raises:
            VLLMUnsupportedError: the method is private.
        """
        if isinstance(method, str) and method.startswith("_"):
            raise VLLMUnsupportedError(f"{method!r} is no public method of a worker", parameter="method", value=method)
        return self.model_executor.collective_rpc(method, timeout, tuple(args), dict(kwargs or {}))

    def shutdown(self) -> None:
        self.model_executor.shutdown()
