"""Logprobs on the host: as they travel (`block`), as they are kept (`rows`), and as they are read (`flat`)."""

from vllm.logprobs.columns import LogprobColumns
from vllm.logprobs.flat import FlatLogprobs, Logprob, LogprobsOnePosition, PromptLogprobs, SampleLogprobs
from vllm.logprobs.texts import TokenTexts

__all__ = [
    "FlatLogprobs",
    "Logprob",
    "LogprobColumns",
    "LogprobsOnePosition",
    "PromptLogprobs",
    "SampleLogprobs",
    "TokenTexts",
]
