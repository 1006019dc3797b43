"""A name that lm-eval and trainers import at start-up; LoRA adapters are not served."""

from typing import Any

from vllm.exceptions import VLLMUnsupportedError


class LoRARequest:
    """An adapter to be applied to a request; making one is refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise VLLMUnsupportedError(
            "LoRA adapters are not served by this engine; merge the adapter into the weights", parameter="lora_request"
        )
