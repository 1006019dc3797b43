"""What KV blocks hold on the device: keys and values of each layer, and what they keep for prompt logprobs."""

import torch

from vllm.config import VllmConfig
from vllm.v1.attention import AttentionBackend, CacheSpec
from vllm.v1.messages import BlockCopy
from vllm.v1.worker.prompt_logprobs_cache import PromptLogprobsCache


class KVCache:
    """The memory of all blocks, which can be given back and taken again."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        backend: AttentionBackend,
        compute_dtype: torch.dtype,  # of hidden states, and of keys and values unless kv_cache_dtype names another
        device: torch.device,
    ) -> None:
        self._config = vllm_config
        self._backend = backend
        self._compute_dtype = compute_dtype
        self._device = device
        dtype = vllm_config.cache_config.kv_cache_dtype
        self.dtype = compute_dtype if dtype == "auto" else getattr(torch, dtype)
        self.block_size = vllm_config.cache_config.block_size
        self.layers: list[torch.Tensor] = []
        self.prompt_logprobs: PromptLogprobsCache | None = None

    def make_layers(self, specs: list[CacheSpec], num_blocks: int) -> list[torch.Tensor]:
        """Make the cache of each layer."""
        return [self._backend.make_cache(spec, num_blocks, self.block_size, self.dtype, self._device) for spec in specs]

    def allocate(self, specs: list[CacheSpec], num_blocks: int) -> None:
        """Take memory for `num_blocks`; pages are touched when they are written."""
        self.layers = self.make_layers(specs, num_blocks)
        model_config, cache_config = self._config.model_config, self._config.cache_config
        if cache_config.keeps_prompt_logprobs:
            self.prompt_logprobs = PromptLogprobsCache(
                num_blocks=num_blocks,
                block_size=self.block_size,
                max_num_reqs=self._config.scheduler_config.max_num_seqs,
                vocab_size=model_config.vocab_size,
                hidden_size=model_config.transformer.hidden_size,
                num_kept=cache_config.num_kept_logprobs,
                dtype=self._compute_dtype,
                device=self._device,
            )

    def drop(self) -> None:
        """Give the memory back."""
        self.layers = []
        self.prompt_logprobs = None

    def count_block_bytes(self, specs: list[CacheSpec]) -> int:
        """Return the bytes that one block takes."""
        model_config, cache_config = self._config.model_config, self._config.cache_config
        num_bytes = sum(self._backend.count_block_bytes(spec, self.block_size, self.dtype) for spec in specs)
        if cache_config.keeps_prompt_logprobs:
            num_bytes += PromptLogprobsCache.bytes_per_block(
                self.block_size,
                model_config.vocab_size,
                model_config.transformer.hidden_size,
                cache_config.num_kept_logprobs,
                self._compute_dtype,
            )
        return num_bytes

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Run a step's block copies, in order."""
        if not copies:
            return
        origin: dict[int, int] = {}  # block → the block whose content it ends with, so that all can be read first
        for copy in copies:
            origin[copy.target] = origin.get(copy.source, copy.source)
        targets = torch.tensor(list(origin), device=self._device)
        sources = torch.tensor(list(origin.values()), device=self._device)
        for layer in self.layers:
            self._backend.copy_blocks(layer, sources, targets)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.copy_blocks(sources, targets)
