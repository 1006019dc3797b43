"""One tiny model and one server on it for the commands that ask a server."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.entrypoints.openai.client import Client, serve
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("asked") / "tiny")


@pytest.fixture(scope="session")
def server(model: pathlib.Path) -> Iterator[Client]:
    with serve(model, "--disable-uvicorn-access-log", "--kv-cache-memory-bytes", "8M") as client:
        yield client


@pytest.fixture
def url(server: Client) -> str:
    return f"http://{server.host}:{server.port}"
