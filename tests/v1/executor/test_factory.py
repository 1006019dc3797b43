"""Which executor a configuration names."""

import pytest

from vllm.config import ParallelConfig
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.v1.executor.factory import get_executor_class
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OwnExecutor(UniProcExecutor):
    """A caller's own."""


def choose(backend: str) -> type:
    return get_executor_class(ParallelConfig(distributed_executor_backend=backend))


def test_the_default_is_one_worker_in_this_process() -> None:
    assert get_executor_class(ParallelConfig()) is choose("uni") is UniProcExecutor


@pytest.mark.parametrize("separator", [".", ":"])
def test_a_callers_class_is_found_by_its_name(separator: str) -> None:
    assert choose(f"{__name__}{separator}OwnExecutor") is OwnExecutor


@pytest.mark.parametrize("backend", ["mp", "ray", "external_launcher", "nonsense"])
def test_what_is_not_served_is_refused_by_name(backend: str) -> None:
    with pytest.raises(VLLMUnsupportedError, match=f"distributed_executor_backend '{backend}' is not served yet"):
        choose(backend)


@pytest.mark.parametrize(
    "path", ["no.such.module:Class", f"{__name__}:Missing", "a..b", f"{__name__}:choose", "os:path"]
)
def test_a_name_that_leads_to_no_executor_is_refused(path: str) -> None:
    with pytest.raises(VLLMValidationError, match="distributed_executor_backend must name") as caught:
        choose(path)
    assert caught.value.value == path
