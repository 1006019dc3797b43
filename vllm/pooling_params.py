"""A name that clients import from `vllm`; pooling models are not served."""

from typing import Any

from vllm.exceptions import VLLMUnsupportedError


class PoolingParams:
    """Settings of a pooling request; making one is refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise VLLMUnsupportedError("pooling models (embed, classify, score, reward) are not served by this engine")
