"""A bfloat16 KV cache on the real model: half the memory, and logprobs close to those of a float32 one."""

import pathlib

import numpy as np

from tests.parity import texts
from vllm import LLM, SamplingParams

KV_BYTES = 64 << 20


def test_logprobs_over_a_bfloat16_cache_stay_close(smollm2_llm: LLM, smollm2_folder: pathlib.Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [texts.LONG, texts.CODE, texts.EMOJI_AND_CJK]
    wide = smollm2_llm.generate(prompts, params, use_tqdm=False)
    with LLM(
        str(smollm2_folder),
        dtype="float32",
        kv_cache_dtype="bfloat16",
        max_model_len=1024,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=KV_BYTES,
        enable_prompt_logprobs_cache=False,
    ) as llm:
        narrow = llm.generate(prompts, params, use_tqdm=False)
        runner = llm.llm_engine.model_executor.driver_worker.model_runner
        num_bytes = sum(cache.nbytes for cache in runner.kv_cache.layers)
        num_tokens = llm.llm_engine.vllm_config.cache_config.block_size * len(runner.kv_cache.layers[0][0])
    # 30 layers, keys and values of 3 heads of 64, two bytes each
    assert num_bytes == num_tokens * 30 * 2 * 3 * 64 * 2 <= KV_BYTES < num_bytes * 1.01

    differences = np.array(
        [
            abs(position[token].logprob - expected[token].logprob)
            for one, other in zip(wide, narrow, strict=True)
            for token, position, expected in zip(
                one.prompt_token_ids[1:], other.prompt_logprobs[1:], one.prompt_logprobs[1:], strict=True
            )
        ]
    )
    assert len(differences) > 700
    assert 1e-5 < differences.mean() <= 5e-3, "the cache was not rounded, or badly"
    assert differences.max() <= 1e-1
