"""A name that TRL imports at start-up and calls only with a weight server on CUDA, which is not served."""

from typing import Any, NoReturn

from vllm.exceptions import VLLMUnsupportedError


def packed_nccl_broadcast_producer(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: in one process, weights are handed over by `model.load_weights`."""
    raise VLLMUnsupportedError(
        "weight transfer over NCCL is not served by this engine; in one process use model.load_weights"
    )
