"""What the engine core knows of those who run the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.messages import EngineCoreReady, ModelRunnerOutput, SchedulerOutput


class Executor(ABC):
    """Runs steps on its workers; constructed by the core, started once."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        # Called after weights were handed over from outside: what was computed with the old ones is void.
        self.on_weights_changed: list[Callable[[], None]] = []

    @abstractmethod
    def start(self) -> EngineCoreReady:
        """Load the model and take the memory; return what was settled."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by its name, or a function with the worker as first argument.

        Returns an answer a worker. This is how all control calls reach the workers (`Worker.sleep`, …).
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop for good; a second call does nothing."""

    @property
    @abstractmethod
    def is_sleeping(self) -> bool:
        """Say whether memory is given back and not all of it taken again."""

    def _notify_weights_changed(self) -> None:
        for callback in self.on_weights_changed:
            callback()
