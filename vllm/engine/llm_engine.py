"""The engine under the module name that older scripts import."""

from vllm.v1.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
