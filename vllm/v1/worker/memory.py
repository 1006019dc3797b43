"""How much memory the KV cache gets, and the model length that fits into it."""

from typing import NamedTuple

import numpy as np
import torch

from vllm.config import CacheConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

GIB = 1 << 30
MAX_DEFAULT_CPU_BYTES = 4 * GIB
DEFAULT_GPU_UTILIZATION = 0.92


class Memory(NamedTuple):
    """Bytes of the device that the engine runs on, read after the weights were loaded."""

    total: int
    available: int  # what this process may still take
    taken: int  # what can't be had: by this process (CPU), by all (GPU), and what steps take beside the KV cache


class KVCacheSize(NamedTuple):
    """What the KV cache holds."""

    num_blocks: int
    max_model_len: int


def choose_kv_bytes(
    cache_config: CacheConfig,
    memory: Memory,
    *,
    is_cpu: bool,
    usable_bytes: int,  # what max_num_seqs sequences of max_model_len tokens can use
) -> int:
    """Return the bytes for the KV cache.

    kv_cache_memory_bytes wins. On a CPU then VLLM_CPU_KVCACHE_SPACE, then gpu_memory_utilization if it was given,
    else the least of 4 GiB, a quarter of what is available, and what the sequences can use. On a GPU the share
    gpu_memory_utilization of all memory, less what is taken.
    """
    if cache_config.kv_cache_memory_bytes is not None:
        return cache_config.kv_cache_memory_bytes
    utilization = cache_config.gpu_memory_utilization
    if not is_cpu:
        utilization = DEFAULT_GPU_UTILIZATION if utilization is None else utilization
        return max(0, int(memory.total * utilization) - memory.taken)
    if cache_config.cpu_kv_cache_space_gib is not None:
        return int(cache_config.cpu_kv_cache_space_gib * GIB)
    if utilization is not None:
        share = max(0, int(memory.total * utilization) - memory.taken)
        return min(share, memory.available, usable_bytes)
    return min(MAX_DEFAULT_CPU_BYTES, memory.available // 4, usable_bytes)


def get_usable_blocks(vllm_config: VllmConfig) -> int:
    """Return how many blocks max_num_seqs sequences of max_model_len tokens fill."""
    blocks_per_seq = -(-vllm_config.model_config.max_model_len // vllm_config.cache_config.block_size)
    return vllm_config.scheduler_config.max_num_seqs * blocks_per_seq


def size_kv_cache(vllm_config: VllmConfig, kv_bytes: int, bytes_per_block: int) -> KVCacheSize:
    """Return the number of blocks that `kv_bytes` hold, and the model length that fits into them.

    Raises:
        VLLMValidationError: not one block fits, or the user gave a max_model_len that does not fit.
    """
    cache_config, model_config = vllm_config.cache_config, vllm_config.model_config
    block_size = cache_config.block_size
    num_blocks = kv_bytes // bytes_per_block
    if cache_config.num_gpu_blocks_override is not None:
        num_blocks = cache_config.num_gpu_blocks_override
    if num_blocks < 1:
        raise VLLMValidationError(
            f"the KV cache must hold at least one block of {block_size} tokens ({bytes_per_block} bytes); there is "
            f"room for {kv_bytes} bytes (give kv_cache_memory_bytes, VLLM_CPU_KVCACHE_SPACE or a higher "
            "gpu_memory_utilization, or free memory)",
            parameter="kv_cache_memory_bytes",
            value=kv_bytes,
        )
    num_tokens = num_blocks * block_size
    max_model_len = model_config.max_model_len
    if max_model_len > num_tokens and model_config.max_model_len_is_given:
        raise VLLMValidationError(
            f"max_model_len must be at most {num_tokens}, the tokens that the KV cache holds ({num_blocks} blocks of "
            f"{block_size}); got {max_model_len} (lower it, or give the KV cache more memory: a token takes "
            f"{bytes_per_block // block_size} bytes)",
            parameter="max_model_len",
            value=max_model_len,
        )
    return KVCacheSize(num_blocks, min(max_model_len, num_tokens))


@torch.inference_mode()
def run_largest_step(runner: GPUModelRunner) -> int:
    """Run a step of max_num_batched_tokens positions, to see what steps take; returns the bytes of its own KV."""
    config, block_size, device = runner.vllm_config, runner.block_size, runner.device
    num_tokens = config.scheduler_config.max_num_batched_tokens
    longest = min(num_tokens, config.model_config.max_model_len)
    query_lens = np.array([min(longest, num_tokens - first) for first in range(0, num_tokens, longest)], dtype=np.int32)
    max_blocks = -(-longest // block_size)
    tables = np.arange(len(query_lens) * max_blocks, dtype=np.int32).reshape(len(query_lens), max_blocks)
    layers = runner.kv_cache.make_layers(runner.model.get_cache_specs(), tables.size)
    attn = runner.backend.make_metadata(query_lens, query_lens, tables, block_size, device)
    positions = torch.from_numpy(attn.host.positions).to(device)
    hidden = runner.model(torch.zeros_like(positions), positions, layers, attn)
    rows = hidden[: runner.workspace_rows]
    runner.model.compute_logits(rows, out=runner.workspace[: len(rows)])
    return sum(layer.nbytes for layer in layers)
