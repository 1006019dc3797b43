"""Which class runs the model, by the name that `ParallelConfig` gives."""

import pkgutil

from vllm.config import ParallelConfig
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.v1.executor.abstract import Executor

# Name → module:Class, imported when it is chosen: executors bring torch.
EXECUTORS = {"uni": "vllm.v1.executor.uniproc_executor:UniProcExecutor"}


def get_executor_class(parallel_config: ParallelConfig) -> type[Executor]:
    """Return the executor that the configuration names.

    Raises:
        VLLMUnsupportedError: it names a way of running that is not served.
        VLLMValidationError: it names a class that can't be imported, or is no executor.
    """
    backend = parallel_config.distributed_executor_backend
    path = EXECUTORS.get(backend, backend)
    if "." not in path and ":" not in path:
        raise VLLMUnsupportedError(
            f"distributed_executor_backend {backend!r} is not served yet; use {', '.join(EXECUTORS)} or name a class",
            parameter="distributed_executor_backend",
            value=backend,
        )
    try:
        executor = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise VLLMValidationError(
            f"distributed_executor_backend must name a class that can be imported: {error}",
            parameter="distributed_executor_backend",
            value=backend,
        ) from error
    if not isinstance(executor, type) or not issubclass(executor, Executor):
        raise VLLMValidationError(
            "distributed_executor_backend must name a subclass of vllm.v1.executor.abstract.Executor",
            parameter="distributed_executor_backend",
            value=backend,
        )
    return executor
