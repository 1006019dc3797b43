"""From checked arguments to `VllmConfig`: what the checkpoint says, what the user said, and the limits of both."""

import json
import math
import pathlib
import re
from typing import Any, cast

from vllm import envs, platforms
from vllm.checkpoints import (
    Checkpoint,
    derive_model_len_limits,
    read_generation_eos_token_ids,
    resolve_checkpoint,
)
from vllm.config import (
    LOGPROBS_MODES,
    CacheConfig,
    LoadConfig,
    LogprobsMode,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SchedulingPolicy,
    TransformerConfig,
    VllmConfig,
)
from vllm.engine.unserved import is_neutral, refuse_unserved
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.model_executor.models.registry import read_transformer_config
from vllm.plugins import load_general_plugins
from vllm.sampling_checks import refusal
from vllm.tokenizers.loader import find_tokenizer_path

DTYPE_NAMES = {
    "auto": "auto",
    "float": "float32",
    "float32": "float32",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
}
LOAD_FORMATS = {"hf": "auto"} | {name: name for name in ("auto", "safetensors", "pt", "gguf", "dummy")}
TOKENIZER_MODES = ("auto", "hf", "slow")
UNIT_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def build_vllm_config(args: dict[str, Any]) -> VllmConfig:
    """Return the configuration for the arguments `args` of `EngineArgs`, by name; what is not served is neutral."""
    load_general_plugins()
    dtype = _choose(args, "dtype", str(args["dtype"]).removeprefix("torch."), DTYPE_NAMES)
    load_format = _choose(args, "load_format", args["load_format"], LOAD_FORMATS)
    device = _check_device(args["device"])
    _check_whole(args, "stream_interval", lowest=1)
    hf_token = args["hf_token"] if isinstance(args["hf_token"], str) else None
    checkpoint = resolve_checkpoint(args["model"], args["revision"], hf_token, args["download_dir"])
    transformer = read_transformer_config(checkpoint)
    max_model_len = _settle_max_model_len(args["max_model_len"], transformer)
    generation_config, eos_token_ids = _read_generation_config(args, checkpoint)
    names = args["served_model_name"]
    return VllmConfig(
        model_config=ModelConfig(
            model=args["model"],
            path=checkpoint.path,
            tokenizer=_find_tokenizer(args, checkpoint),
            tokenizer_mode=_choose(args, "tokenizer_mode", args["tokenizer_mode"], {m: m for m in TOKENIZER_MODES}),
            skip_tokenizer_init=bool(args["skip_tokenizer_init"]),
            trust_remote_code=bool(args["trust_remote_code"]),
            transformer=transformer,
            dtype=dtype,
            quantization=_read_quantization(args["quantization"]),
            seed=_check_whole(args, "seed", lowest=-(2**63)),
            max_model_len=max_model_len,
            max_model_len_is_given=args["max_model_len"] not in (None, -1, "auto", "-1"),
            max_logprobs=_check_whole(args, "max_logprobs", lowest=-1),
            logprobs_mode=cast(
                LogprobsMode, _choose(args, "logprobs_mode", args["logprobs_mode"], {m: m for m in LOGPROBS_MODES})
            ),
            generation_config=generation_config,
            generation_eos_token_ids=eos_token_ids,
            served_model_name=names[0] if isinstance(names, list | tuple) and names else names or None,
            revision=args["revision"],
            hf_config=checkpoint.config,
        ),
        cache_config=_build_cache_config(args),
        scheduler_config=_build_scheduler_config(args, max_model_len, device),
        parallel_config=_build_parallel_config(args),
        load_config=LoadConfig(load_format=load_format, download_dir=args["download_dir"], hf_token=hf_token),
        device=device,
        batch_invariant=bool(envs.batch_invariant() if args["batch_invariant"] is None else args["batch_invariant"]),
    )


def parse_whole(name: str, value: Any) -> int:
    """Return `value` as an int; text such as 16k (16,000), 16K (16,384) or 25.6k is read too.

    Raises:
        VLLMValidationError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        found = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", value.strip())
        if found:
            number = float(found[1]) * UNIT_SIZES.get(found[2], 1)
            if number == int(number):
                return int(number)
    raise refusal(name, value, "must be a whole number, such as 16384, 16k or 16K")


def _check_whole(args: dict[str, Any], name: str, lowest: int) -> int:
    number = parse_whole(name, args[name])
    if number < lowest:
        raise refusal(name, number, f"must be at least {lowest}; got {number}")
    return number


def _read_quantization(value: Any) -> str | None:
    if value in (None, "", "none", "auto", "gguf"):  # a .gguf file says itself how it is quantised
        return None
    if value == "int8":
        return "int8"
    raise VLLMUnsupportedError(
        "quantization is not supported: int8 is made from any checkpoint, a .gguf file is read as it is; others aren't",
        parameter="quantization",
        value=value,
    )


def _choose(args: dict[str, Any], name: str, value: Any, choices: dict[str, str]) -> str:
    if value not in choices:
        raise VLLMValidationError(
            f"{name} must be one of {', '.join(choices)}; got {value!r}", parameter=name, value=args[name]
        )
    return choices[value]


def _check_device(device: Any) -> str:
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise refusal("device", device, "must be auto, cpu, cuda or cuda:N")
    return device


def _settle_max_model_len(given: Any, transformer: TransformerConfig) -> int:
    limits = derive_model_len_limits(transformer)
    if given is None or given in (-1, "auto", "-1"):
        return limits.default
    number = parse_whole("max_model_len", given)
    if not 1 <= number <= limits.largest:
        raise refusal(
            "max_model_len",
            number,
            f"must be from 1 to {limits.largest}, the most that the model was made for; got {number}",
        )
    return number


def _find_tokenizer(args: dict[str, Any], checkpoint: Checkpoint) -> str:
    name = args["tokenizer"]
    if name is None or name == args["model"]:
        return checkpoint.path
    return str(find_tokenizer_path(name, args["tokenizer_revision"]))


def _read_generation_config(args: dict[str, Any], checkpoint: Checkpoint) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the sampling defaults and the end tokens.

    The end tokens are the model's nature, so they are read under "vllm" too. Without a generation config the
    end tokens of config.json stand for it.
    """
    source = args["generation_config"]
    found = checkpoint.generation_config
    if source not in ("auto", "vllm"):
        path = pathlib.Path(source) / "generation_config.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise VLLMValidationError(
                f'generation_config must be "auto", "vllm" or a folder with generation_config.json: {error}',
                parameter="generation_config",
                value=source,
            ) from error
    end_tokens = found if "eos_token_id" in found else {"eos_token_id": checkpoint.config.get("eos_token_id")}
    overrides = args["override_generation_config"] or {}
    defaults = {} if source == "vllm" else found
    return {**defaults, **overrides}, read_generation_eos_token_ids({**end_tokens, **overrides})


# What may be asked for, and what it is called from here on.
_KV_CACHE_DTYPES = {name: name for name in ("auto", "float32", "bfloat16")} | {"bf16": "bfloat16"}


def _build_cache_config(args: dict[str, Any]) -> CacheConfig:
    share = args["gpu_memory_utilization"]
    if share is not None and not (isinstance(share, int | float) and math.isfinite(share) and 0 < share <= 1):
        raise refusal("gpu_memory_utilization", share, "must be above 0 and at most 1")
    if args["kv_cache_dtype"] not in _KV_CACHE_DTYPES:
        raise VLLMUnsupportedError(
            "kv_cache_dtype must be auto (what the model computes in), float32 or bfloat16; narrower are not served",
            parameter="kv_cache_dtype",
            value=args["kv_cache_dtype"],
        )
    whole = {
        name: None if args[name] is None else _check_whole(args, name, lowest=1)
        for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override")
    }
    return CacheConfig(
        block_size=16 if args["block_size"] is None else _check_whole(args, "block_size", lowest=1),
        gpu_memory_utilization=share,
        kv_cache_memory_bytes=whole["kv_cache_memory_bytes"],
        cpu_kv_cache_space_gib=envs.cpu_kvcache_space(),
        enable_prefix_caching=bool(args["enable_prefix_caching"]),
        kv_cache_dtype=_KV_CACHE_DTYPES[args["kv_cache_dtype"]],
        enable_prompt_logprobs_cache=bool(args["enable_prompt_logprobs_cache"]),
        num_gpu_blocks_override=whole["num_gpu_blocks_override"],
    )


def _build_scheduler_config(args: dict[str, Any], max_model_len: int, device: str) -> SchedulerConfig:
    chunked = bool(args["enable_chunked_prefill"])
    if args["max_num_batched_tokens"] is None:
        budget = 8192 if platforms.guess_device(device).startswith("cuda") else 4096
        budget = budget if chunked else max(budget, max_model_len)
    else:
        budget = _check_whole(args, "max_num_batched_tokens", lowest=1)
    if not chunked and budget < max_model_len:
        raise VLLMValidationError(
            f"max_num_batched_tokens must be at least max_model_len ({max_model_len}) without chunked prefill; got "
            f"{budget} (raise it, lower max_model_len, or leave enable_chunked_prefill on)",
            parameter="max_num_batched_tokens",
            value=budget,
        )
    policies = {"fcfs": "fcfs", "priority": "priority"}
    return SchedulerConfig(
        max_num_seqs=256 if args["max_num_seqs"] is None else _check_whole(args, "max_num_seqs", lowest=1),
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        policy=cast(SchedulingPolicy, _choose(args, "scheduling_policy", args["scheduling_policy"], policies)),
        long_prefill_token_threshold=_check_whole(args, "long_prefill_token_threshold", lowest=0),
    )


def _build_parallel_config(args: dict[str, Any]) -> ParallelConfig:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    sizes = {name: 1 if is_neutral(name, args[name]) else _check_whole(args, name, lowest=1) for name in names}
    backend = args["distributed_executor_backend"]
    if isinstance(backend, type):
        backend = f"{backend.__module__}:{backend.__qualname__}"  # a configuration travels between processes
    elif not isinstance(backend, str) or "." not in backend:
        refuse_unserved({"distributed_executor_backend": backend})
        backend = "uni"
    return ParallelConfig(distributed_executor_backend=backend, **sizes)
