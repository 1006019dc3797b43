"""What is loaded on the way to a first token, and what a bare import loads."""

import pathlib
import subprocess
import sys

import pytest

from tests.tiny_models import write_tiny_model

FIRST_TOKEN = """
import sys
from vllm import LLM, SamplingParams
llm = LLM({folder!r}, max_model_len=64, kv_cache_memory_bytes=4 << 20)
out = llm.generate("a b", SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1), use_tqdm=False)[0]
assert out.outputs[0].logprobs[0] and out.prompt_logprobs
loaded = sorted(m for m in sys.modules if m.split(".")[0] in {forbidden})
assert not loaded, loaded
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


def test_transformers_is_not_imported_on_the_way_to_a_first_token(tmp_path: pathlib.Path) -> None:
    write_tiny_model(tmp_path, "LlamaForCausalLM")
    run(
        FIRST_TOKEN.format(
            folder=str(tmp_path), forbidden=("transformers", "huggingface_hub", "fastapi", "pydantic", "zmq")
        )
    )


@pytest.mark.parametrize(
    "code",
    [
        "import vllm",
        "from vllm import SamplingParams; SamplingParams(n=2)",
        "from vllm.v1.core.sched.scheduler import Scheduler",
        "from vllm.v1.engine.output_processor import OutputProcessor",
        "from vllm.entrypoints.cli.main import main; main(['--version'])",
    ],
)
def test_torch_is_not_imported_above_the_worker(code: str) -> None:
    check = (
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers')]; assert not loaded, loaded"
    )
    run(f"import sys; {code}; {check}")


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    import vllm

    assert vllm.__version__ == version("vllm") == "0.31.0+logprobs.1"
