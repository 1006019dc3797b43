"""Runs a loaded model over token ids the way the worker does: paged cache, chunks, several requests in a step."""

import pathlib

import numpy as np
import torch

from vllm.checkpoints import resolve_checkpoint
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.model_executor.model_loader import load_model
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.registry import read_transformer_config
from vllm.v1.attention import get_attention_backend


def make_config(
    path: str | pathlib.Path,
    max_model_len: int | None = None,
    load_format: str = "auto",
    quantization: str | None = None,
) -> VllmConfig:
    checkpoint = resolve_checkpoint(str(path))
    transformer = read_transformer_config(checkpoint)
    return VllmConfig(
        model_config=ModelConfig(
            model=str(path),
            path=checkpoint.path,
            tokenizer=str(path),
            transformer=transformer,
            quantization=quantization,
            max_model_len=max_model_len or transformer.max_position_embeddings,
        ),
        load_config=LoadConfig(load_format=load_format),
    )


def load(
    path: str | pathlib.Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_model_len: int | None = None,
    load_format: str = "auto",
    quantization: str | None = None,
) -> DecoderForCausalLM:
    return load_model(make_config(path, max_model_len, load_format, quantization), dtype, torch.device(device))


class PagedRunner:
    """Requests over one paged cache: NaN where nothing was written, blocks handed out in a shuffled order."""

    def __init__(
        self,
        model: DecoderForCausalLM,
        block_size: int = 4,
        num_blocks: int = 128,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.device = next(model.parameters()).device
        self.backend = get_attention_backend(self.device)
        self.kv_caches = [
            self.backend.make_cache(spec, num_blocks, block_size, kv_dtype or model.dtype, self.device)
            for spec in model.get_cache_specs()
        ]
        for cache in self.kv_caches:
            cache.fill_(float("nan"))
        self.free = list(np.random.default_rng(seed).permutation(num_blocks))
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, tokens: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Run each request's next tokens; return its logits [num_tokens, vocab_size] float32 on the CPU."""
        for name, ids in tokens.items():
            self.lengths[name] = self.lengths.get(name, 0) + len(ids)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < self.lengths[name]:
                table.append(int(self.free.pop()))
        query_lens = np.array([len(ids) for ids in tokens.values()])
        seq_lens = np.array([self.lengths[name] for name in tokens])
        # What lies beyond a request's blocks must not matter.
        tables = np.full((len(tokens), max(len(self.tables[name]) for name in tokens) + 2), 2**31 - 1, np.int32)
        for row, name in enumerate(tokens):
            tables[row, : len(self.tables[name])] = self.tables[name]
        attn = self.backend.make_metadata(query_lens, seq_lens, tables, self.block_size, self.device)
        ids = torch.tensor([token for part in tokens.values() for token in part], device=self.device)
        positions = torch.from_numpy(attn.host.positions).to(self.device)
        hidden = self.model(ids, positions, self.kv_caches, attn)
        logits = self.model.compute_logits(hidden).cpu()
        assert logits.dtype == torch.float32
        return dict(zip(tokens, logits.split([int(n) for n in query_lens]), strict=True))

    def run_in_chunks(self, name: str, ids: list[int], chunk: int) -> torch.Tensor:  # [len(ids), vocab_size]
        return torch.cat([self.step({name: ids[i : i + chunk]})[name] for i in range(0, len(ids), chunk)])


@torch.inference_mode()
def compute_reference_logits(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:  # [len(ids), vocab_size]
    return reference(torch.tensor([ids])).logits[0].float()
