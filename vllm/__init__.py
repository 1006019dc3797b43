"""vllm: log-probabilities and parallel sampling, exact, cheap and bounded in memory.

The public names are loaded when they are first asked for: `import vllm` itself loads no numpy, msgspec or torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.ray_utils import initialize_ray_cluster
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from vllm.v1.engine.llm_engine import LLMEngine

    __version__: str

# public name → the module that holds it, and its name there
_HOMES: dict[str, tuple[str, str]] = {
    "AsyncEngineArgs": ("vllm.engine.arg_utils", "AsyncEngineArgs"),
    "AsyncLLMEngine": ("vllm.v1.engine.async_llm", "AsyncLLM"),
    "ClassificationOutput": ("vllm.outputs", "ClassificationOutput"),
    "ClassificationRequestOutput": ("vllm.outputs", "ClassificationRequestOutput"),
    "CompletionOutput": ("vllm.outputs", "CompletionOutput"),
    "EmbeddingOutput": ("vllm.outputs", "EmbeddingOutput"),
    "EmbeddingRequestOutput": ("vllm.outputs", "EmbeddingRequestOutput"),
    "EngineArgs": ("vllm.engine.arg_utils", "EngineArgs"),
    "LLM": ("vllm.entrypoints.llm", "LLM"),
    "LLMEngine": ("vllm.v1.engine.llm_engine", "LLMEngine"),
    "ModelRegistry": ("vllm.model_executor.models.registry", "ModelRegistry"),
    "PoolingOutput": ("vllm.outputs", "PoolingOutput"),
    "PoolingParams": ("vllm.pooling_params", "PoolingParams"),
    "PoolingRequestOutput": ("vllm.outputs", "PoolingRequestOutput"),
    "PromptType": ("vllm.inputs", "PromptType"),
    "RequestOutput": ("vllm.outputs", "RequestOutput"),
    "SamplingParams": ("vllm.sampling_params", "SamplingParams"),
    "ScoringOutput": ("vllm.outputs", "ScoringOutput"),
    "ScoringRequestOutput": ("vllm.outputs", "ScoringRequestOutput"),
    "TextPrompt": ("vllm.inputs", "TextPrompt"),
    "TokensPrompt": ("vllm.inputs", "TokensPrompt"),
    "initialize_ray_cluster": ("vllm.distributed.ray_utils", "initialize_ray_cluster"),
}

__all__ = [  # noqa: RUF022 - in plain order, written out for type checkers
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLM",
    "LLMEngine",
    "ModelRegistry",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "initialize_ray_cluster",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = importlib.import_module("importlib.metadata").version("vllm")
    elif name in _HOMES:
        module, attribute = _HOMES[name]
        value = getattr(importlib.import_module(module), attribute)
    else:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
