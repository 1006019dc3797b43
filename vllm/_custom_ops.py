"""The name under which vLLM's clients import the ops; `vllm.ops.api` holds them."""

from vllm.ops.api import *  # noqa: F403
from vllm.ops.api import __all__ as __all__
