import pathlib
from collections.abc import Iterator

import pytest

from vllm import LLM


@pytest.fixture(scope="session")
def smollm2_llm(smollm2_folder: pathlib.Path) -> Iterator[LLM]:
    """The one engine on the real model; a small token budget, so that the long prompt comes in chunks."""
    with LLM(
        str(smollm2_folder),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=512 << 20,
        max_logprobs=-1,
    ) as llm:
        yield llm
