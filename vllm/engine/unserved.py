"""Engine arguments that clients pass and this engine does not serve: which of their values ask for nothing.

A neutral value passes in silence; any other is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMUnsupportedError

# Values beyond the generally neutral ones (None, False, 0, "", "auto", empty containers) that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "convert": ("none",),
    "config_format": ("hf",),
    "data_parallel_size": (1,),
    "data_parallel_size_local": (1,),
    "decode_context_parallel_size": (1,),
    "distributed_executor_backend": ("mp", "uni", "external_launcher"),  # one worker each, at world size 1
    "model_impl": ("vllm",),
    "nnodes": (1,),
    "num_redundant_experts": (0,),
    "pipeline_parallel_size": (1,),
    "runner": ("generate",),
    "task": ("generate",),
    "tensor_parallel_size": (1,),
}

WHAT_IS_SERVED: dict[str, str] = {
    "tensor_parallel_size": "one worker computes everything; use 1",
    "pipeline_parallel_size": "one worker computes everything; use 1",
    "data_parallel_size": "start one engine a process instead; use 1",
    "distributed_executor_backend": "the worker runs in the engine's own process; leave it out",
    "runner": 'text generation only; use "auto" or "generate"',
    "task": 'text generation only; use "auto" or "generate"',
    "model_impl": 'the models are our own; use "auto" or "vllm"',
    "cpu_offload_gb": "the weights stay where they are computed with; use 0",
    "hf_overrides": "edit config.json, or leave it out",
}


def is_neutral(name: str, value: Any) -> bool:
    """Say whether `value` of engine argument `name` asks for nothing."""
    if value is None or value is False:
        return True
    if isinstance(value, str | int | float) and value in (0, "", "auto"):
        return True
    if any(value == neutral for neutral in NEUTRAL_VALUES.get(name, ())):
        return True
    if isinstance(value, Mapping):
        return all(is_neutral(key, item) for key, item in value.items())
    return isinstance(value, list | tuple | set | frozenset) and len(value) == 0


def refuse_unserved(arguments: Mapping[str, Any]) -> None:
    """Raise for the first of the unserved `arguments` whose value asks for something.

    Raises:
        VLLMUnsupportedError: it names the argument, its value and what to do.
    """
    for name, value in arguments.items():
        if not is_neutral(name, value):
            advice = WHAT_IS_SERVED.get(name, "this engine does not serve it; leave it out")
            raise VLLMUnsupportedError(f"{name} is not supported: {advice}", parameter=name, value=value)
