"""The executor whose one worker lives in the core's own process."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreReady, ModelRunnerOutput, SchedulerOutput
from vllm.v1.worker.gpu_worker import Worker


class UniProcExecutor(Executor):
    """One worker, called directly. Trainers reach the model as `driver_worker.model_runner.model`."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.driver_worker = Worker(vllm_config)
        self.driver_worker.model_runner.on_weights_changed.append(self._notify_weights_changed)

    def start(self) -> EngineCoreReady:
        return self.driver_worker.start()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.driver_worker.execute_model(scheduler_output)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call the worker; `timeout` has no meaning for a direct call."""
        kwargs = kwargs or {}
        try:
            if callable(method):
                return [method(self.driver_worker, *args, **kwargs)]
            return [getattr(self.driver_worker, method)(*args, **kwargs)]
        finally:
            self.driver_worker.invalidate_model()

    @property
    def is_sleeping(self) -> bool:
        return self.driver_worker.is_sleeping

    def shutdown(self) -> None:
        self.driver_worker.shutdown()
