"""The asynchronous engine under the module name that older scripts import."""

from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
