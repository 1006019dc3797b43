"""A tiny random model on disk, its reference, and workers on it."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.tiny_models import write_tiny_model
from vllm.checkpoints import resolve_checkpoint
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.models.registry import read_transformer_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

VOCAB = 320
BLOCK_SIZE = 4
Reference = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("runner") / "model", vocab_size=VOCAB)


@pytest.fixture(scope="session")
def reference(tiny_folder: pathlib.Path) -> Reference:
    """Return token ids → logits [num_tokens, vocab_size] by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()

    def run(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits: np.ndarray = model(torch.tensor([token_ids])).logits[0].numpy()
        return logits

    return run


def make_config(folder: pathlib.Path, **settings: Any) -> VllmConfig:
    """Return a config for the tiny model; settings go to the part that has them."""
    checkpoint = resolve_checkpoint(str(folder))
    model_names = {"max_model_len", "max_model_len_is_given", "dtype"}
    scheduler_names = {"max_num_seqs", "max_num_batched_tokens"}
    model = {"max_model_len": 64} | {name: settings.pop(name) for name in model_names & set(settings)}
    scheduler = {"max_num_seqs": 8} | {name: settings.pop(name) for name in scheduler_names & set(settings)}
    device = settings.pop("device", "cpu")
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            path=checkpoint.path,
            tokenizer=str(folder),
            transformer=read_transformer_config(checkpoint),
            **model,
        ),
        scheduler_config=SchedulerConfig(**scheduler),
        cache_config=CacheConfig(**({"block_size": BLOCK_SIZE, "kv_cache_memory_bytes": 1 << 20} | settings)),
        device=device,
    )


@pytest.fixture
def runner(tiny_folder: pathlib.Path) -> GPUModelRunner:
    """A runner with 64 blocks of 4 tokens, every slot of which starts as NaN."""
    made = GPUModelRunner(make_config(tiny_folder), torch.device("cpu"), torch.float32)
    made.load_model()
    made.allocate_workspace()
    made.allocate_batch(64)
    made.allocate_kv_cache(64)
    for kv_cache in made.kv_cache.layers:
        kv_cache.fill_(torch.nan)
    return made
