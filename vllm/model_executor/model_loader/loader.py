"""From configuration to a model with its weights in place.

The model is first made without memory; names and shapes are compared with the checkpoint's; only then is memory taken
and each weight copied into its place, so a damaged checkpoint costs neither time nor memory.
"""

import itertools
import logging
import pathlib
from collections.abc import Collection, Mapping

import torch
from torch import nn

from vllm import host_memory, platforms
from vllm.checkpoints.gguf_file import open_gguf
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.distributed.parallel_state import tensor_parallel
from vllm.exceptions import ModelLoadError
from vllm.logger import init_logger, log_once
from vllm.model_executor.dtypes import choose_dtypes
from vllm.model_executor.model_loader.gguf_weights import GgufSource
from vllm.model_executor.model_loader.hf_weights import SafetensorsSource, open_folder
from vllm.model_executor.model_loader.weight_source import WeightSource
from vllm.model_executor.models.interface import CausalLM
from vllm.model_executor.models.registry import ModelRegistry, import_class
from vllm.model_executor.weights import WeightSlot, check_weights, to_canonical_name
from vllm.v1.attention import get_attention_backend

logger = init_logger(__name__)

_ALIGNMENT = 256  # bytes: a cache line on any device
_DUMMY_SPREAD = 0.02  # of random weights; norms are drawn around 1


def resolve_dtype(dtype: str, checkpoint_dtype: str, device: str) -> torch.dtype:
    """Return the type that weights are stored in.

    dtype: "auto", "float32", "bfloat16", "float16" (also "float", "half"); "auto" is the checkpoint's, unless `device`
    ("cpu", "cuda", …) computes it slowly: then float32, said in the log.

    Raises:
        ModelLoadError: another name.
    """
    name = {"float": "float32", "half": "float16"}.get(dtype, dtype)
    if name == "auto":
        name = checkpoint_dtype
        if not platforms.has_fast_dtype(name, device.partition(":")[0]):
            message = (
                f"computing in float32: this {device} has no units for the checkpoint's {name} (dtype={name} insists)"
            )
            log_once(logger.name, logging.INFO, message)
            name = "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelLoadError(f"dtype must be auto, float32, bfloat16 or float16; got {dtype!r}")
    return getattr(torch, name)


def load_model(vllm_config: VllmConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Return the model with its weights on `device`, stored and computed in what `dtype` comes to there.

    Raises:
        ModelLoadError: missing, unexpected or mis-shaped weights (listed), or a damaged file.
    """
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    config, parallel = model_config.transformer, vllm_config.parallel_config
    dtypes = choose_dtypes(dtype, model_config.quantization, device.type, batch_invariant=vllm_config.batch_invariant)
    # Weights are changed later, outside inference mode: they must not be born inside it.
    with torch.inference_mode(False), torch.no_grad():
        ranks = tensor_parallel(parallel.tensor_parallel_rank, parallel.tensor_parallel_size)
        with torch.device("meta"), ranks:
            model_class: type[CausalLM] = import_class(config.model)
            model = model_class(config, dtypes, model_config.max_model_len, get_attention_backend(device))
        if load_config.load_format == "dummy":
            _take_memory(model, device)
            _fill_at_random(model, model_config.seed)
            return model.eval()
        source = _open_source(model_config, load_config)
        check_weights(model.get_slots(), source.read_shapes(), source.where, is_tied=config.tie_word_embeddings)
        slots = _name_slots(model, source)
        if isinstance(source, GgufSource):
            source.choose_group_scales(slots)
        _take_memory(model, device)
        filled: Collection[str] = ()
        if isinstance(source, SafetensorsSource):
            filled = source.fill(_list_memory(slots))
        elif isinstance(source, GgufSource):
            filled = source.fill_group_scales(slots)
        model.load_weights(source.iterate(skipped=filled))
        return model.eval()


def _name_slots(model: CausalLM, source: WeightSource) -> dict[str, WeightSlot]:
    """Return name in the checkpoint → slot."""
    slots = model.get_slots()
    named = ((name, slots.get(to_canonical_name(name))) for name in source.read_shapes())
    return {name: slot for name, slot in named if slot is not None}


def _list_memory(slots: Mapping[str, WeightSlot]) -> dict[str, torch.Tensor]:
    """Return name in the checkpoint → memory that its elements can be read into as they are."""
    return {name: memory for name, slot in slots.items() if (memory := slot.find_memory()) is not None}


def _open_source(model_config: ModelConfig, load_config: LoadConfig) -> WeightSource:
    path = pathlib.Path(model_config.path)
    if path.is_dir():
        return open_folder(path, load_config.load_format)
    if load_config.load_format not in ("auto", "gguf"):
        raise ModelLoadError(f"load_format {load_config.load_format!r} does not read {path} (auto and gguf do)")
    transformer = model_config.transformer
    return GgufSource(open_gguf(path), transformer, ModelRegistry.resolve(transformer.architecture))


def _take_memory(model: CausalLM, device: torch.device) -> None:
    """Give each parameter uninitialised memory, all out of one block.

    On a CPU the block asks for large pages: a step reads 1.05 (int8) to 1.09 (float32) times as fast, and a small
    model's matrices are too small to have such pages of their own.
    """
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    ends = [*itertools.accumulate(-(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT for *_, parameter in places)]
    try:
        block = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        if device.type == "cpu":
            host_memory.advise_huge_pages(block.data_ptr(), block.nbytes)
        for (module, name, parameter), first in zip(places, [0, *ends[:-1]], strict=True):
            memory = block[first : first + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
    except RuntimeError as error:
        raise ModelLoadError(
            f"no memory on {device} for {model.weights_bytes() >> 20} MiB of weights: {error}"
        ) from error


def _fill_at_random(model: CausalLM, seed: int) -> None:
    """Draw every weight: the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    for name, slot in model.get_slots().items():
        centre = 1.0 if "norm" in name else 0.0
        noise = torch.empty(slot.shape, dtype=torch.float32).normal_(centre, _DUMMY_SPREAD, generator=generator)
        slot.write(name, noise)
