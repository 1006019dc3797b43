"""One tiny model, its float32 reference and one engine on it a session."""

import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.tiny_models import load_tiny_reference, write_tiny_model
from vllm import LLM

Reference = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("scored") / "tiny", seed=3)


@pytest.fixture(scope="session")
def reference(folder: pathlib.Path) -> Reference:
    """Return log-softmax rows [num_tokens, vocab] of a float32 forward pass by transformers."""
    model = load_tiny_reference(folder)

    @torch.inference_mode()
    def compute(token_ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].double(), -1)

    return compute


@pytest.fixture(scope="session")
def llm(folder: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(folder), max_model_len=256, max_num_batched_tokens=128, kv_cache_memory_bytes=16 << 20) as llm:
        yield llm


def assert_idle(llm: LLM) -> None:
    """Nothing runs, and what ran before gave its blocks back."""
    assert not llm.llm_engine.has_unfinished_requests()
    llm.llm_engine.step()
    stats = llm.llm_engine.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
