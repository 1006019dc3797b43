"""The names of `import vllm`: which there are, where they come from, and what they cost."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

import vllm

NAMES = [
    "AsyncEngineArgs", "AsyncLLMEngine", "ClassificationOutput", "ClassificationRequestOutput", "CompletionOutput",
    "EmbeddingOutput", "EmbeddingRequestOutput", "EngineArgs", "LLM", "LLMEngine", "ModelRegistry", "PoolingOutput",
    "PoolingParams", "PoolingRequestOutput", "PromptType", "RequestOutput", "SamplingParams", "ScoringOutput",
    "ScoringRequestOutput", "TextPrompt", "TokensPrompt", "__version__", "initialize_ray_cluster",
]  # fmt: skip


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_public_names_are_pinned_sorted_and_listed() -> None:
    assert vllm.__all__ == NAMES == sorted(NAMES)
    assert set(NAMES) <= set(dir(vllm))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_loads_on_first_use_and_stays_the_same_object(name: str) -> None:
    assert getattr(vllm, name) is getattr(vllm, name)
    assert name in vars(vllm)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'vllm' has no attribute 'LLMM'"):
        vllm.LLMM  # noqa: B018
    with pytest.raises(ImportError):
        exec("from vllm import LLMM")


def test_the_version_is_that_of_the_distribution() -> None:
    assert vllm.__version__ == importlib.metadata.version("vllm")


def test_import_vllm_alone_loads_nothing_heavy() -> None:
    loaded = json.loads(run_python("import vllm, sys, json; print(json.dumps(sorted(sys.modules)))"))
    assert not {"numpy", "msgspec", "torch", "transformers", "tokenizers"} & set(loaded)
    assert [name for name in loaded if name.startswith("vllm.")] == []


def test_the_vocabulary_loads_no_torch() -> None:
    code = (
        "import sys, vllm.sampling_params, vllm.logprobs, vllm.logprobs.block, vllm.outputs, vllm.inputs;"
        "import vllm.pooling_params, vllm.v1.messages;"
        "print([m for m in ('torch', 'transformers', 'pydantic', 'tokenizers') if m in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_a_star_import_brings_exactly_the_public_names() -> None:
    found = run_python("from vllm import *; print(sorted(n for n in dir() if n == '__version__' or n[0] != '_'))")
    assert found.strip() == str(sorted(NAMES))
