"""Tiny random models as real Hugging Face folders, made by transformers' own classes: model and reference in one."""

import json
import os
import pathlib
import shutil
from typing import Any

import torch
import transformers

from tests.tiny_tokenizers import write_tiny_tokenizer

_CONFIGS = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Phi3ForCausalLM": transformers.Phi3Config,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
}


def write_tiny_model(
    folder: str | os.PathLike[str],
    architecture: str = "LlamaForCausalLM",
    *,
    vocab_size: int = 512,
    num_hidden_layers: int = 2,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: bool = True,
    shards: int = 1,
    **overrides: Any,
) -> pathlib.Path:
    """Write a random model into `folder` and return the folder.

    `overrides` go into the configuration (head counts, rope_parameters, sliding_window, tie_word_embeddings, …). The
    weights are wide enough that logits differ by several units, attention is not flat, and biases and norms matter.
    `shards` above 1 splits the weights into that many files with an index.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_hidden_layers": num_hidden_layers,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if architecture == "MistralForCausalLM":
        settings["sliding_window"] = None
    model = make_tiny_model(architecture, settings | overrides, seed).to(getattr(torch, dtype))
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with _quiet():
        model.save_pretrained(folder, max_shard_size=total if shards == 1 else max(1, total // shards))
    if tokenizer:
        write_tiny_tokenizer(folder, vocab_size)
    return folder


def make_tiny_model(architecture: str, settings: dict[str, Any], seed: int) -> torch.nn.Module:
    """Return transformers' model with random float32 weights; the same for the same seed."""
    config = _CONFIGS[architecture](**settings)
    model = getattr(transformers, architecture)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(0.25 * noise)
    return model


def load_tiny_reference(folder: str | os.PathLike[str]) -> torch.nn.Module:
    """Return transformers' float32 model of a folder, with its plainest attention."""
    with _quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def edit_config(folder: str | os.PathLike[str], **changes: Any) -> None:
    """Change keys of config.json in place; a value of `...` takes the key out."""
    path = pathlib.Path(folder) / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def copy_model(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copy a model folder so that a test may damage it."""
    return pathlib.Path(shutil.copytree(source, target, dirs_exist_ok=True))


class _quiet:
    """No progress bars in test output."""

    def __enter__(self) -> None:
        transformers.utils.logging.disable_progress_bar()

    def __exit__(self, *exception: object) -> None:
        transformers.utils.logging.enable_progress_bar()
