"""schemathesis, unmodified: whatever it makes of /openapi.json, the server answers, and never with a 5xx."""

import pathlib

import pytest

from tests.clients.programs import run_program
from tests.entrypoints.openai.client import Client


@pytest.mark.timeout(900)
def test_no_request_breaks_the_server(tiny_server: Client, tmp_path: pathlib.Path) -> None:
    url = f"http://{tiny_server.host}:{tiny_server.port}/openapi.json"
    options = ["--checks", "not_a_server_error,content_type_conformance", "--phases", "examples,coverage,fuzzing"]
    options += ["--max-examples", "40", "--seed", "1", "--request-timeout", "30", "--continue-on-failure"]
    run_program("schemathesis", "run", url, *options, folder=tmp_path)
    tiny_server.wait_until_idle()
    assert tiny_server.complete(model="tiny").status == 200
    assert tiny_server.metric("kv_cache_usage_perc") == 0
