"""What the tests of real clients share: a server with the embedded model, and one with a tiny random model."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.clients.programs import MAX_MODEL_LEN
from tests.entrypoints.openai.client import Client, serve
from tests.tiny_models import write_tiny_model

# Asked "hi", a model that has seen this much of it answers "hi" and ends: within four tokens.
SHORT_ANSWERS = """
{%- for i in range(8) %}{{ '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n' }}{% endfor -%}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""


@pytest.fixture(scope="session")
def model_server(smollm2_folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """SmolLM2 under the name "smol", with a chat template that makes for short answers."""
    template = tmp_path_factory.mktemp("template") / "short.jinja"
    template.write_text(SHORT_ANSWERS)
    flags = ("--served-model-name", "smol", "--chat-template", str(template), "--disable-uvicorn-access-log")
    with serve(smollm2_folder, "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", *flags) as client:
        yield client


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = write_tiny_model(tmp_path_factory.mktemp("served") / "tiny")
    with serve(folder, "--served-model-name", "tiny", "--disable-uvicorn-access-log") as client:
        yield client
