import pathlib
from collections.abc import Callable, Iterator

import pytest

from tests.tiny_models import write_tiny_model
from vllm import LLM

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_model(folder, "LlamaForCausalLM")
    return folder


@pytest.fixture(scope="session")
def make_llm(tiny_folder: pathlib.Path) -> Iterator[MakeLLM]:
    """Return engines on the tiny model, one for each set of options, kept for the session."""
    made: dict[tuple, LLM] = {}

    def make(**options: object) -> LLM:
        key = tuple(sorted(options.items()))
        if key not in made:
            settings = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_logprobs": -1}
            settings |= {"kv_cache_memory_bytes": 8 << 20, "seed": 0}
            made[key] = LLM(str(tiny_folder), **(settings | options))
        return made[key]

    yield make
    for llm in made.values():
        llm.shutdown()


@pytest.fixture(scope="session")
def tiny_pool_llm(make_llm: MakeLLM) -> LLM:
    """An engine whose KV pool holds little more than one request of the largest length: everything else preempts."""
    return make_llm(num_gpu_blocks_override=10, block_size=16, max_num_seqs=8)
