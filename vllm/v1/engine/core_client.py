"""The front end's way to the engine core, wherever that runs."""

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, TypeVarTuple

from vllm import platforms
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.factory import get_executor_class
from vllm.v1.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest

_Args = TypeVarTuple("_Args")
_Answer = TypeVar("_Answer")


class EngineCoreClient(Protocol):
    """What a front end may ask of an `EngineCore`; nothing of it says in which process the core lives."""

    ready: EngineCoreReady  # what the core settled at start-up

    @property
    def model_executor(self) -> Any:
        """The executor, where the core is in this process; trainers reach the model through it."""

    def add_request(self, request: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: Iterable[str]) -> None: ...
    def has_work(self) -> bool: ...
    def get_output(self) -> EngineCoreOutputs:
        """Return what the next step brings; empty when there is nothing to do."""

    def call_utility(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        """Call one of the `@utility` methods of `EngineCore`, such as `EngineCore.get_stats`, and return its answer."""

    def shutdown(self) -> None: ...


class InprocClient(EngineCore):
    """The core in this very process and thread: a step runs when its output is asked for."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        platforms.bound_openmp_spinning(os.environ)  # has an effect only where torch is not loaded yet
        super().__init__(vllm_config, get_executor_class(vllm_config.parallel_config))

    def get_output(self) -> EngineCoreOutputs:
        return self.step()

    def call_utility(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        return method(self, *args)
