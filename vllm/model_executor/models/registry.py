"""Architecture name → class."""

from vllm.checkpoints.architectures import SERVED_ARCHITECTURES, describe_served
from vllm.exceptions import ModelLoadError
from vllm.model_executor.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window on every layer, where the checkpoint has one."""


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biases on q, k and v, and a sliding window on some layers, where the checkpoint asks for it."""


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with a norm on each head's q and k, and a sliding window where the checkpoint asks for it."""


_CLASSES: dict[str, type[LlamaForCausalLM]] = {
    kind.__name__: kind for kind in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
}
assert set(_CLASSES) == set(SERVED_ARCHITECTURES), "checkpoints/architectures.py and this file must agree"


class ModelRegistry:
    """What is served. The set is closed: registering models from outside is not served."""

    @staticmethod
    def get_supported_archs() -> list[str]:
        """Return the names that config.json's `architectures` may hold."""
        return list(_CLASSES)

    @staticmethod
    def resolve(architecture: str) -> type[LlamaForCausalLM]:
        """Return the class of `architecture`.

        Raises:
            ModelLoadError: it is not served; the message lists what is.
        """
        if architecture not in _CLASSES:
            raise ModelLoadError(f"architecture {architecture!r} is not served ({describe_served()})")
        return _CLASSES[architecture]
