"""When a sequence ends by itself (stop strings are the front end's: only it knows the text)."""

from typing import NamedTuple

from vllm.v1.messages import FinishReason
from vllm.v1.request import Request


class Ending(NamedTuple):
    """Why a sequence ends; `stop_reason` is the stop token's id, unless that is the model's own end token."""

    finish_reason: FinishReason
    stop_reason: int | None = None


def find_ending(request: Request, max_model_len: int) -> Ending | None:
    """Return how the newest token of `request` ends it, or None when it goes on."""
    params = request.sampling_params
    token_id = request.output_token_ids[-1]
    num_output = len(request.output_token_ids)
    if num_output >= params.min_tokens:
        if token_id == request.message.eos_token_id and not params.ignore_eos:
            return Ending(FinishReason.STOP)
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return Ending(FinishReason.STOP, token_id)
    # Not held back by min_tokens: the model has no position for a further token.
    if num_output >= (params.max_tokens or 0) or request.num_tokens >= max_model_len:
        return Ending(FinishReason.LENGTH)
    return None
