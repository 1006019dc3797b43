"""One tiny model and one server on it a session."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.entrypoints.openai.client import Client, serve
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: pathlib.Path) -> Iterator[Client]:
    flags = ("--served-model-name", "tiny", "org/tiny-alias", "--max-logprobs", "-1", "--max-num-queued-reqs", "400")
    with serve(tiny_model, *flags, "--disable-uvicorn-access-log", VLLM_SERVER_DEV_MODE="1") as client:
        yield client
