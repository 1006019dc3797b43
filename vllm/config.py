"""The engine's frozen configuration: what every layer may read and none may change.

`EngineArgs.create_engine_config()` makes it from what the user passed; the core settles what only it can know
(KV blocks, the model length that fits) and hands that back in `EngineCoreReady`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
LOGPROBS_MODES: tuple[str, ...] = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One way to rotate heads by position; layers may differ in theirs."""

    theta: float = 10000.0
    rotary_dim: int  # leading elements of each head that are rotated
    scaling: dict[str, Any] | None = None  # rope_type and its own parameters, HF names


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int = 0  # which of TransformerConfig.ropes
    sliding_window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    has_qk_norm: bool = False  # RMSNorm on each head's q and k
    is_fused: bool = False  # the checkpoint holds q, k and v as one matrix, qkv_proj


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """One layer's gated feed-forward part."""

    size: int
    activation: str = "silu"
    bias: bool = False
    is_fused: bool = False  # the checkpoint holds gate and up as one matrix, gate_up_proj


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: norm, attention, norm, feed-forward, each pair added to the residual stream."""

    attention: AttentionConfig
    mlp: MlpConfig


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a decoder, as its family (vllm/model_executor/families/) reads it from a checkpoint."""

    architecture: str  # a name that ModelRegistry knows
    model: str = ""  # "module:Class" of what computes it
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...] = ()
    ropes: tuple[RopeConfig, ...] = ()
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    dtype: str = "float32"  # of the checkpoint


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, from where, in which numbers, and what it allows."""

    model: str  # as the user named it
    path: str  # a Hugging Face folder or a .gguf file on this machine
    tokenizer: str  # path of the tokenizer's folder or .gguf file
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    transformer: TransformerConfig
    dtype: str = "auto"  # "auto", "float32", "bfloat16", "float16"; the worker resolves auto
    quantization: str | None = None  # "int8": 8-bit weights, made as they are loaded
    seed: int = 0
    max_model_len: int
    max_model_len_is_given: bool = False  # by the user: then it is not lowered to what the KV pool holds
    max_logprobs: int = 20  # −1: no cap
    logprobs_mode: LogprobsMode = "raw_logprobs"
    generation_config: dict[str, Any] = field(default_factory=dict)  # of the checkpoint, overrides applied
    generation_eos_token_ids: tuple[int, ...] = ()  # beyond the primary one
    served_model_name: str | None = None
    revision: str | None = None
    hf_config: dict[str, Any] = field(default_factory=dict)  # config.json as it is (empty for GGUF)

    @property
    def vocab_size(self) -> int:
        return self.transformer.vocab_size

    def get_vocab_size(self) -> int:
        return self.transformer.vocab_size


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    gpu_memory_utilization: float | None = None  # None: not given (a CPU then ignores it; CUDA takes 0.92)
    kv_cache_memory_bytes: int | None = None
    cpu_kv_cache_space_gib: float | None = None  # VLLM_CPU_KVCACHE_SPACE
    enable_prefix_caching: bool = True
    enable_prompt_logprobs_cache: bool = True  # cached blocks keep hidden states and scores for prompt logprobs
    num_kept_logprobs: int = 20  # the most likely tokens that a kept score has
    kv_cache_dtype: str = "auto"  # "auto": what the model computes in; "float32", "bfloat16"
    num_gpu_blocks_override: int | None = None

    @property
    def keeps_prompt_logprobs(self) -> bool:
        return self.enable_prefix_caching and self.enable_prompt_logprobs_cache


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0  # 0: no threshold


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How weights are read."""

    load_format: str = "auto"  # "auto", "safetensors", "pt", "gguf", "dummy"
    download_dir: str | None = None
    hf_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many workers compute together, and which of them reads this."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str = "uni"  # a name of vllm/v1/executor/factory.py, or an executor's "module:Class"
    rank: int = 0  # from 0 to world_size − 1; those of one tensor-parallel group follow each other

    @property
    def world_size(self) -> int:
        """The workers of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        return self.rank % self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """All of it."""

    model_config: ModelConfig
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    load_config: LoadConfig = LoadConfig()
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    batch_invariant: bool = False  # values repeat bit for bit, or the worker refuses to start

    def with_max_model_len(self, max_model_len: int) -> "VllmConfig":
        """Return the same with the model length that the core settled on."""
        model_config = dataclasses.replace(self.model_config, max_model_len=max_model_len)
        return dataclasses.replace(self, model_config=model_config)
