"""Which requests are refused when they come: those that could never run. A request that is admitted always ends."""

from vllm.config import SchedulerConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.messages import EngineCoreRequest


def count_positions(message: EngineCoreRequest, max_model_len: int) -> int:
    """Return the most positions that one sequence of `message` ever writes into the KV cache.

    Neither the last token of a sequence nor, when the prompt is only scored, the prompt's last token is run.
    """
    params, num_prompt = message.sampling_params, len(message.prompt_token_ids)
    if params.max_tokens == 0 and count_unscored(message) == num_prompt:
        return 0
    return min(num_prompt + (params.max_tokens or 0), max_model_len) - 1


def count_unscored(message: EngineCoreRequest) -> int:
    """Return how many leading prompt tokens get no score: all of them, or those before the first scored one."""
    params, num_prompt = message.sampling_params, len(message.prompt_token_ids)
    return num_prompt if params.prompt_logprobs is None else params.first_scored(num_prompt)


def check_can_run(
    message: EngineCoreRequest, max_model_len: int, num_blocks: int, block_size: int, config: SchedulerConfig
) -> None:
    """Raise unless one sequence of `message`, alone in the engine, can run to its end.

    Raises:
        VLLMValidationError: the prompt is empty or too long, or the KV cache is too small for it.
    """
    num_prompt = len(message.prompt_token_ids)
    max_tokens = message.sampling_params.max_tokens or 0
    if num_prompt == 0:
        raise VLLMValidationError("the prompt must hold at least one token; got none", parameter="prompt")
    if max_tokens == 0 and len(message.seeds) > 1:
        raise VLLMValidationError(
            f"n must be 1 when max_tokens is 0 (nothing is sampled); got {len(message.seeds)}",
            parameter="n",
            value=len(message.seeds),
        )
    longest = max_model_len if max_tokens == 0 else max_model_len - 1
    if num_prompt > longest:
        reason = "only scored" if max_tokens == 0 else "to be continued by at least 1 token"
        raise VLLMValidationError(
            f"a prompt that is {reason} must have at most {longest} tokens (max_model_len={max_model_len}); "
            f"got {num_prompt}",
            parameter="prompt",
            value=num_prompt,
        )
    num_positions, num_slots = count_positions(message, max_model_len), num_blocks * block_size
    if num_positions > num_slots:
        raise VLLMValidationError(
            f"a prompt of {num_prompt} tokens with max_tokens={max_tokens} needs {num_positions} positions in the KV "
            f"cache, which holds {num_slots} ({num_blocks} blocks of {block_size}): lower max_tokens, or raise "
            "kv_cache_memory_bytes",
            parameter="max_tokens" if num_prompt <= num_slots else "prompt",
            value=max_tokens if num_prompt <= num_slots else num_prompt,
        )
    if not config.enable_chunked_prefill and num_prompt > config.max_num_batched_tokens:
        raise VLLMValidationError(
            f"without chunked prefill a prompt must fit into one step of max_num_batched_tokens="
            f"{config.max_num_batched_tokens}; got {num_prompt} tokens",
            parameter="prompt",
            value=num_prompt,
        )
