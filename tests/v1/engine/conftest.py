import pathlib
from collections.abc import Iterator

import pytest

from tests.tiny_models import write_tiny_model
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.tokenizers import Tokenizer, load_tokenizer
from vllm.v1.engine.llm_engine import LLMEngine

VOCAB = 512


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-for-engine"))


@pytest.fixture(scope="session")
def tiny_config(tiny_folder: pathlib.Path) -> VllmConfig:
    return EngineArgs(str(tiny_folder), max_model_len=64, max_logprobs=-1).create_engine_config()


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_folder: pathlib.Path) -> Tokenizer:
    return load_tokenizer(tiny_folder)


@pytest.fixture(scope="module")
def engine(tiny_folder: pathlib.Path) -> Iterator[LLMEngine]:
    """A real engine on a tiny random model."""
    engine = LLMEngine.from_engine_args(
        EngineArgs(str(tiny_folder), max_model_len=64, max_logprobs=-1, kv_cache_memory_bytes=4 << 20)
    )
    yield engine
    engine.shutdown()
