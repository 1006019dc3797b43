"""Shared fixtures: one embedded model folder, one reference model and one engine on it a session."""

import os
import pathlib
import signal
import tempfile
from collections.abc import Iterator

import pytest

# Tests never reach for a hub; the two cores are shared with nothing.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure() -> None:
    """Let Ctrl-C be heard: a run that a shell starts in the background inherits that SIGINT is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Under CI nothing skips in silence: a skip is a failure, but for GPU and AVX-512."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    allowed = {"gpu", "avx512"} & {mark.name for mark in item.iter_markers()}
    if report.skipped and os.environ.get("CI") and not allowed and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI: {report.longrepr}"


@pytest.fixture(scope="session")
def cache_folder() -> pathlib.Path:
    """Where what is derived from the embedded model is kept between runs, keyed by content."""
    root = os.environ.get("VLLM_TEST_CACHE") or os.path.join(tempfile.gettempdir(), f"vllm-test-cache-{os.getuid()}")
    path = pathlib.Path(root)
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> pathlib.Path:
    from vllm.model_executor.model_loader.export_folder import find_embedded_model

    return find_embedded_model()


@pytest.fixture(scope="session")
def smollm2_folder(cache_folder: pathlib.Path) -> pathlib.Path:
    """SmolLM2-135M-Instruct as a float32 Hugging Face folder."""
    from vllm.model_executor.model_loader.export_folder import embedded_model_folder

    return embedded_model_folder(cache_folder)
