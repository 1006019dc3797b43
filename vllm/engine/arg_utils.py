"""`EngineArgs`: everything that a user may say about an engine, checked and turned into a `VllmConfig`.

Three kinds of fields: those that this engine serves, hints that change no result (accepted, said once in the debug
log), and features that it does not serve (`vllm/engine/unserved.py`: neutral values pass, others are refused by name).
`None` always means "not given".
"""

import argparse
import dataclasses
import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.config import VllmConfig
from vllm.engine import cli_args
from vllm.engine.config_builder import build_vllm_config
from vllm.engine.unserved import refuse_unserved
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger

logger = init_logger(__name__)


_Args = TypeVar("_Args", bound="EngineArgs")


def _served(default: Any, help_text: str, **cli: Any) -> Any:
    return dataclasses.field(default=default, metadata={"kind": "served", "help": help_text, **cli})


def _hint(default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"kind": "hint"})


def _unserved(default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"kind": "unserved"})


@dataclass
class EngineArgs:
    """The arguments of an engine.

    Raises:
        TypeError: an unknown keyword; the message suggests the nearest known one.
    """

    # ---- the model
    model: str = _served("", "a Hugging Face folder, a .gguf file or a hub id")
    served_model_name: str | list[str] | None = _served(None, "the name that answers carry")
    tokenizer: str | None = _served(None, "a tokenizer from elsewhere: folder, .gguf file or hub id")
    tokenizer_mode: str = _served("auto", "how the tokenizer is loaded", choices=("auto", "hf", "slow"))
    tokenizer_revision: str | None = _served(None, "revision of a tokenizer from the hub")
    skip_tokenizer_init: bool = _served(False, "no tokenizer: token ids in, token ids out")
    trust_remote_code: bool = _served(False, "passed on to the Hugging Face tokenizer; model code is never run")
    revision: str | None = _served(None, "revision of a model from the hub")
    code_revision: str | None = _hint()
    hf_token: str | bool | None = _served(None, "token for the Hugging Face hub")
    download_dir: str | None = _served(None, "where models from the hub are kept")
    load_format: str = _served("auto", "auto, safetensors, pt, gguf or dummy (seeded random weights)")
    dtype: Any = _served("auto", "auto, float32, bfloat16 or float16")
    quantization: str | None = _served(None, "int8: 8-bit weights, made while loading, on a CPU")
    seed: int = _served(0, "seed of everything random that has no seed of its own")
    max_model_len: int | str | None = _served(None, "longest sequence, prompt and answer; 16k and 16K are read")
    generation_config: str = _served("auto", "auto: the checkpoint's sampling defaults; vllm: none; or a folder")
    override_generation_config: dict[str, Any] | None = _served(None, "JSON object laid over the generation config")
    # ---- logprobs
    max_logprobs: int = _served(20, "the most logprobs a request may ask for; -1 lifts the cap")
    logprobs_mode: str = _served("raw_logprobs", "which values logprobs are, unless a request says otherwise")
    batch_invariant: bool | None = _served(
        None, "values repeat bit for bit, whatever else runs; on a CPU (VLLM_BATCH_INVARIANT)"
    )
    # ---- where and with how much
    device: str = _served("auto", "auto, cpu, cuda or cuda:N")
    block_size: int | None = _served(None, "positions in a block of the KV cache (16)")
    gpu_memory_utilization: float | None = _served(None, "share of the device's memory; on a CPU only when given")
    kv_cache_memory_bytes: int | str | None = _served(None, "bytes of KV cache")
    kv_cache_dtype: str = _served("auto", "auto: what the model computes in; float32 or bfloat16")
    num_gpu_blocks_override: int | None = _served(None, "KV blocks, for tests of a full cache")
    enable_prefix_caching: bool | None = _served(True, "keep finished blocks for prompts that begin alike")
    enable_prompt_logprobs_cache: bool | None = _served(
        True, "cached blocks keep hidden states and scores (about 6 % of the KV cache) for prompt logprobs"
    )
    # ---- how steps are filled
    max_num_seqs: int | None = _served(None, "sequences that run at once (256)")
    max_num_batched_tokens: int | str | None = _served(None, "tokens of one step (4096; 8192 on CUDA)")
    enable_chunked_prefill: bool | None = _served(True, "let a long prompt take several steps")
    long_prefill_token_threshold: int = _served(0, "a prompt's tokens in one step at most; 0: no limit")
    scheduling_policy: str = _served("fcfs", "fcfs or priority", choices=("fcfs", "priority"))
    distributed_executor_backend: Any = _served(None, "uni: the worker runs in the core's process; or module:Class")
    stream_interval: int = _served(1, "tokens between two outputs of a stream")
    disable_log_stats: bool = _served(False, "no statistics of requests")
    # ---- hints: they change no result here
    enforce_eager: bool = _hint(False)
    async_scheduling: bool | None = _hint()
    attention_config: Any = _hint()
    attention_backend: Any = _hint()
    compilation_config: Any = _hint()
    optimization_level: Any = _hint()
    kernel_config: Any = _hint()
    cudagraph_capture_sizes: Any = _hint()
    max_cudagraph_capture_size: int | None = _hint()
    disable_cascade_attn: bool = _hint(False)
    disable_custom_all_reduce: bool = _hint(False)
    swap_space: float | None = _hint()
    max_seq_len_to_capture: int | None = _hint()
    max_parallel_loading_workers: int | None = _hint()
    use_tqdm_on_load: bool = _hint(True)
    prefix_caching_hash_algo: str | None = _hint()
    model_loader_extra_config: Any = _hint()
    ignore_patterns: Any = _hint()
    enable_sleep_mode: bool = _hint(False)
    allowed_local_media_path: str = _hint("")
    allowed_media_domains: Any = _hint()
    max_loras: int | None = _hint()
    max_lora_rank: int | None = _hint()
    max_cpu_loras: int | None = _hint()
    lora_dtype: Any = _hint()
    fully_sharded_loras: bool = _hint(False)
    mm_processor_cache_gb: float | None = _hint()
    disable_mm_preprocessor_cache: bool = _hint(False)
    skip_mm_profiling: bool = _hint(False)
    spec_tokens: int | None = _hint()
    shutdown_timeout: float | None = _hint()
    # ---- features that are not served
    runner: str = _unserved("auto")
    convert: str = _unserved("auto")
    task: str | None = _unserved()
    model_impl: str = _unserved("auto")
    config_format: str = _unserved("auto")
    hf_config_path: str | None = _unserved()
    hf_overrides: Any = _unserved()
    quantization_config: Any = _unserved()
    calculate_kv_scales: bool = _unserved(False)
    cpu_offload_gb: float = _unserved(0)
    disable_sliding_window: bool = _unserved(False)
    tensor_parallel_size: int = _unserved(1)
    pipeline_parallel_size: int = _unserved(1)
    decode_context_parallel_size: int = _unserved(1)
    data_parallel_size: int = _unserved(1)
    data_parallel_size_local: int | None = _unserved()
    data_parallel_rank: int | None = _unserved()
    nnodes: int = _unserved(1)
    enable_expert_parallel: bool = _unserved(False)
    enable_eplb: bool = _unserved(False)
    enable_dbo: bool = _unserved(False)
    enable_return_routed_experts: bool = _unserved(False)
    return_sampling_mask: bool = _unserved(False)
    enable_lora: bool = _unserved(False)
    default_mm_loras: Any = _unserved()
    speculative_config: Any = _unserved()
    spec_method: str | None = _unserved()
    spec_model: str | None = _unserved()
    structured_outputs_config: Any = _unserved()
    reasoning_parser: str = _unserved("")
    logits_processors: Any = _unserved()
    enable_prompt_embeds: bool = _unserved(False)
    enable_mm_embeds: bool = _unserved(False)
    pooler_config: Any = _unserved()
    limit_mm_per_prompt: Any = _unserved()
    media_io_kwargs: Any = _unserved()
    mm_processor_kwargs: Any = _unserved()
    interleave_mm_strings: bool = _unserved(False)
    profiler_config: Any = _unserved()
    kv_transfer_config: Any = _unserved()
    kv_events_config: Any = _unserved()
    ec_transfer_config: Any = _unserved()
    otlp_traces_endpoint: str | None = _unserved()
    collect_detailed_traces: Any = _unserved()
    worker_cls: Any = _unserved("auto")
    worker_extension_cls: Any = _unserved("")
    additional_config: Any = _unserved()

    def __new__(cls: type[_Args], *args: Any, **kwargs: Any) -> _Args:
        check_argument_names(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None:
                setattr(self, field.name, field.default)

    def create_engine_config(self) -> VllmConfig:
        """Read the checkpoint's description and return the checked configuration.

        Raises:
            VLLMValidationError: an argument breaks a rule, or asks for what is not served (VLLMUnsupportedError).
            ModelLoadError: the checkpoint can't be found or read.
        """
        by_kind: dict[str, dict[str, Any]] = {"served": {}, "hint": {}, "unserved": {}}
        for field in dataclasses.fields(self):
            by_kind[field.metadata["kind"]][field.name] = getattr(self, field.name)
        refuse_unserved(by_kind["unserved"])
        if not self.model or not isinstance(self.model, str):
            raise VLLMValidationError(
                "model must name a Hugging Face folder, a .gguf file or a hub id", parameter="model", value=self.model
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        given = [name for name, value in by_kind["hint"].items() if value != defaults[name]]
        if given:
            logger.debug("accepted, and without effect here: %s", ", ".join(given))
        return build_vllm_config(by_kind["served"] | by_kind["unserved"])

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> argparse.ArgumentParser:
        """Give `parser` a flag for each field, but for those in `leave_out`, and return it."""
        return cli_args.add_cli_args(cls, parser, leave_out)

    @classmethod
    def from_cli_args(cls: type[_Args], namespace: argparse.Namespace) -> _Args:
        """Return the arguments that a parsed command line holds; what it doesn't hold keeps its default."""
        names = [field.name for field in dataclasses.fields(cls) if hasattr(namespace, field.name)]
        return cls(**{name: getattr(namespace, name) for name in names})


@dataclass
class AsyncEngineArgs(EngineArgs):
    """The arguments of an engine that serves many callers at once."""

    enable_log_requests: bool = _served(False, "a line in the log for each request")
    max_num_queued_reqs: int | None = _served(None, "sequences that may wait; more are answered with 503")
    max_num_queued_tokens: int | None = _served(None, "prompt tokens that may wait; more are answered with 503")


def check_argument_names(kind: type[EngineArgs], given: dict[str, Any]) -> None:
    """Raise TypeError for a keyword that `kind` doesn't know, with the nearest known one."""
    known = [field.name for field in dataclasses.fields(kind)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unexpected keyword argument {name!r}{hint}")
