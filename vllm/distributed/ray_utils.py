"""A public name of vLLM; clusters of machines are not served."""

from typing import Any, NoReturn

from vllm.exceptions import VLLMUnsupportedError


def initialize_ray_cluster(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: this engine runs on one machine."""
    raise VLLMUnsupportedError("Ray clusters are not served by this engine; it runs on one machine")
