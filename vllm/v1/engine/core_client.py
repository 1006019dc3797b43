"""The front end's way to the engine core, wherever that runs."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, TypeVarTuple

from vllm import platforms
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.factory import get_executor_class
from vllm.v1.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest

_Args = TypeVarTuple("_Args")
_Answer = TypeVar("_Answer")


class EngineCoreClient(ABC):
    """What a front end may ask of a core; nothing of it says in which process the core lives."""

    ready: EngineCoreReady  # what the core settled at start-up

    @property
    @abstractmethod
    def model_executor(self) -> Any:
        """The executor, where the core is in this process; trainers reach the model through it."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Let a request in.

        Raises:
            VLLMValidationError: it could never run to its end.
        """

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, children, or whole families by their id; unknown ids are ignored."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """Return what the next step brings; empty when there is nothing to do."""

    @abstractmethod
    def has_work(self) -> bool:
        """Say whether any request is unfinished."""

    @abstractmethod
    def call_utility(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        """Call one of the `@utility` methods of `EngineCore`, such as `EngineCore.get_stats`, and return its answer."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop for good; a second call does nothing."""


class InprocClient(EngineCoreClient):
    """The core in this very process and thread: a step runs when its output is asked for."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        platforms.bound_openmp_spinning(os.environ)  # has an effect only where torch is not loaded yet
        self._core = EngineCore(vllm_config, get_executor_class(vllm_config.parallel_config))
        self.ready = self._core.ready

    @property
    def model_executor(self) -> Any:
        return self._core.model_executor

    def add_request(self, request: EngineCoreRequest) -> None:
        self._core.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        return self._core.step()

    def has_work(self) -> bool:
        return self._core.has_work()

    def call_utility(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        return method(self._core, *args)

    def shutdown(self) -> None:
        self._core.shutdown()
