"""The front end's way to the engine core, wherever that runs."""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest, SchedulerStats


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
    def get_stats(self) -> SchedulerStats:
        """Return gauges as they are, and counters since start-up."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Give memory back: level 1 keeps the weights aside, level 2 drops them."""

    @abstractmethod
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take it again: all of it, or what `tags` name ("weights", "kv_cache")."""

    @property
    @abstractmethod
    def is_sleeping(self) -> bool:
        """Say whether memory is given back and not all of it taken again."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method by name, or a function with the worker as first argument; an answer a worker."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop for good; a second call does nothing."""


class InprocClient(EngineCoreClient):
    """The core in this very process and thread: a step runs when its output is asked for."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        bound_openmp_spinning(os.environ)  # heard only where torch is not loaded yet
        # Picking who runs the model: loaded only now, since it brings torch, and the front end never loads that.
        executor = importlib.import_module("vllm.v1.executor.uniproc_executor").UniProcExecutor
        self._core = EngineCore(vllm_config, executor)
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

    def get_stats(self) -> SchedulerStats:
        return self._core.get_stats()

    def reset_prefix_cache(self) -> bool:
        return self._core.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        self._core.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._core.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        return self._core.is_sleeping

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        return self._core.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self) -> None:
        self._core.shutdown()


# How often a thread of libgomp that waits looks again before it sleeps. The default is some milliseconds, all through
# what the front end has to do between two steps: on two cores that is its core. A thousand looks (10 to 50 µs) bridge
# the gap between two parallel regions of one step, so that threads don't have to be woken for each.
OPENMP_SPIN_COUNT = "1000"


def bound_openmp_spinning(environment: MutableMapping[str, str]) -> None:
    """Set the bound for an OpenMP runtime that starts in `environment`, unless the user has set his own.

    Beside another busy process on two cores a step of 32 rows took 0.9 s without the bound and 0.2 s with it: a thread
    that spins keeps the one that it waits for from running.
    """
    if not environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        environment["GOMP_SPINCOUNT"] = OPENMP_SPIN_COUNT


def make_core_client(vllm_config: VllmConfig) -> EngineCoreClient:
    """Return a core in this process, or in one of its own where the environment asks for that."""
    if envs.enable_v1_multiprocessing():
        # Picking where the core lives: loaded only then, since it brings zmq.
        return importlib.import_module("vllm.v1.engine.core_client_mp").SyncMPClient(vllm_config)
    return InprocClient(vllm_config)
