"""What harnesses and trainers import and look up by name, in an environment where they are installed."""

import importlib
import importlib.metadata

import pytest

NAMES = {
    "vllm": "LLM SamplingParams TokensPrompt TextPrompt RequestOutput EngineArgs AsyncEngineArgs AsyncLLMEngine "
    "__version__",
    "vllm.lora.request": "LoRARequest",
    "vllm.renderers.hf": "resolve_chat_template",
    "vllm.tokenizers": "get_tokenizer",
    "vllm.sampling_params": "StructuredOutputsParams",
    "vllm.inputs": "TokensPrompt",
    "vllm.utils": "random_uuid",
    "vllm.utils.network_utils": "get_ip",
    "vllm.distributed.weight_transfer.nccl_common": "trainer_init",
    "vllm.distributed.weight_transfer.packed_tensor": "packed_nccl_broadcast_producer",
}


@pytest.mark.parametrize("module", NAMES)
def test_clients_find_the_names_that_they_import(module: str) -> None:
    found = importlib.import_module(module)
    for name in NAMES[module].split():
        assert getattr(found, name) is not None, f"{module}.{name}"


def test_the_distribution_has_a_version_that_clients_take() -> None:
    release = importlib.metadata.version("vllm").split("+")[0]
    assert (0, 22) <= tuple(map(int, release.split(".")[:2])) <= (0, 31)


def test_the_harness_finds_the_engine() -> None:
    """lm-eval imports the engine where it is asked for it and says so when a name is missing."""
    models = importlib.import_module("lm_eval.models.vllm_causallms")
    assert models.LLM is importlib.import_module("vllm").LLM
