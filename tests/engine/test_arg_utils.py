"""What a user may say about an engine, and what comes of it."""

import argparse
import copy
import json
import pathlib
import pickle

import pytest
import torch

from tests.tiny_models import write_tiny_model
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.cli_args import with_dashes
from vllm.exceptions import ModelLoadError, VLLMUnsupportedError, VLLMValidationError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-for-args"), max_position_embeddings=256)


def config_of(folder: pathlib.Path, **args: object):
    return EngineArgs(str(folder), **args).create_engine_config()


def test_what_evaluation_harnesses_pass_is_accepted(folder: pathlib.Path) -> None:
    config = EngineArgs(
        model=str(folder), revision=None, dtype="auto", tokenizer=None, tokenizer_mode="auto", tokenizer_revision=None,
        trust_remote_code=False, tensor_parallel_size=1, max_model_len=None, max_num_seqs=None, quantization=None,
        seed=1234, enable_lora=False, max_lora_rank=16, gpu_memory_utilization=0.9, enforce_eager=True, swap_space=4,
    ).create_engine_config()  # fmt: skip
    assert (config.model_config.seed, config.scheduler_config.max_num_seqs) == (1234, 256)


def test_what_trainers_pass_is_accepted(folder: pathlib.Path) -> None:
    config = EngineArgs(
        model=str(folder), tensor_parallel_size=1, gpu_memory_utilization=0.3, max_model_len=64, max_num_seqs=8,
        enable_sleep_mode=True, model_impl="vllm", distributed_executor_backend="external_launcher", seed=0,
        max_num_batched_tokens=4096, logprobs_mode="processed_logprobs", quantization=None, trust_remote_code=False,
    ).create_engine_config()  # fmt: skip
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.model_config.max_model_len_is_given and config.model_config.max_model_len == 64


def test_none_means_not_given_for_every_argument(folder: pathlib.Path) -> None:
    names = [name for name in EngineArgs.__dataclass_fields__ if name != "model"]
    assert EngineArgs(str(folder), **dict.fromkeys(names)) == EngineArgs(str(folder))
    assert config_of(folder, **dict.fromkeys(names)) == config_of(folder)


def test_an_unknown_keyword_is_a_type_error_that_suggests_the_nearest(folder: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="max_modle_len.*did you mean 'max_model_len'"):
        EngineArgs(str(folder), max_modle_len=5)
    with pytest.raises(TypeError, match="zzz"):
        AsyncEngineArgs(str(folder), zzz=5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("distributed_executor_backend", "ray"),
        ("quantization", "awq"),
        ("enable_lora", True),
        ("speculative_config", {"model": "x"}),
        ("cpu_offload_gb", 1.5),
        ("hf_overrides", {"vocab_size": 3}),
        ("structured_outputs_config", {"backend": "xgrammar"}),
        ("logits_processors", ["a.b"]),
        ("limit_mm_per_prompt", {"image": 2}),
        ("enable_prompt_embeds", True),
        ("runner", "pooling"),
        ("model_impl", "transformers"),
        ("kv_cache_dtype", "fp8"),
        ("pooler_config", object()),
    ],
)
def test_a_feature_that_is_not_served_is_refused_by_name(folder: pathlib.Path, name: str, value: object) -> None:
    with pytest.raises(VLLMUnsupportedError, match=name) as caught:
        config_of(folder, **{name: value})
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("distributed_executor_backend", "uni"),
        ("distributed_executor_backend", "mp"),
        ("structured_outputs_config", {"backend": "auto", "disable_fallback": False}),
        ("hf_overrides", {}),
        ("logits_processors", []),
        ("limit_mm_per_prompt", {"image": 0}),
        ("runner", "generate"),
        ("cpu_offload_gb", 0),
        ("compilation_config", {"level": 3}),
    ],
)
def test_a_value_that_asks_for_nothing_passes(folder: pathlib.Path, name: str, value: object) -> None:
    assert config_of(folder, **{name: value}) == config_of(folder)


@pytest.mark.parametrize(
    ("asked", "meant"), [("auto", "auto"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("bf16", "bfloat16")]
)
def test_the_kv_cache_may_hold_bfloat16(folder: pathlib.Path, asked: str, meant: str) -> None:
    assert config_of(folder, kv_cache_dtype=asked).cache_config.kv_cache_dtype == meant


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max_model_len": 257}, "from 1 to 256"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": "16q"}, "whole number"),
        ({"max_model_len": 1.5}, "whole number"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": -3}, "max_num_batched_tokens"),
        ({"max_logprobs": -2}, "max_logprobs"),
        ({"logprobs_mode": "cooked"}, "raw_logprobs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"load_format": "tensorizer"}, "safetensors"),
        ({"device": "tpu"}, "cuda"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode"),
        ({"scheduling_policy": "lifo"}, "fcfs"),
        ({"generation_config": "/nowhere"}, "generation_config"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"seed": "lucky"}, "seed"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, "at least max_model_len"),
    ],
)
def test_a_value_out_of_its_range_is_refused(folder: pathlib.Path, args: dict, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        config_of(folder, **args)
    assert caught.value.parameter in args


def test_batch_invariant_mode_is_asked_for_by_argument_or_by_environment(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert not config_of(folder).batch_invariant
    assert config_of(folder, batch_invariant=True).batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert not config_of(folder).batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert config_of(folder).batch_invariant
    assert not config_of(folder, batch_invariant=False).batch_invariant, "what is said here wins"


def test_numbers_may_be_written_as_people_write_them(folder: pathlib.Path) -> None:
    for text, number in (("0.1k", 100), ("128", 128), (200, 200)):
        assert config_of(folder, max_model_len=text).model_config.max_model_len == number
    for text, number in (("1K", 1024), ("1k", 1000), ("1.5M", 1536 * 1024), ("2G", 2**31)):
        assert config_of(folder, kv_cache_memory_bytes=text).cache_config.kv_cache_memory_bytes == number
    for value in (None, -1, "auto"):
        config = config_of(folder, max_model_len=value).model_config
        assert (config.max_model_len, config.max_model_len_is_given) == (256, False)


def test_dtypes_may_be_torch_s_own_or_have_other_names(folder: pathlib.Path) -> None:
    for value, name in ((torch.bfloat16, "bfloat16"), ("half", "float16"), ("float", "float32"), ("auto", "auto")):
        assert config_of(folder, dtype=value).model_config.dtype == name


def test_without_chunked_prefill_the_default_budget_holds_the_longest_prompt(tmp_path: pathlib.Path) -> None:
    write_tiny_model(tmp_path, max_position_embeddings=9000)
    config = config_of(tmp_path, enable_chunked_prefill=False)
    assert config.scheduler_config.max_num_batched_tokens == 9000
    assert config_of(tmp_path, device="cpu").scheduler_config.max_num_batched_tokens == 4096
    assert config_of(tmp_path, device="cuda:1").scheduler_config.max_num_batched_tokens == 8192


def test_sampling_defaults_come_from_the_generation_config(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [2, 7]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 3, "eos_token_id": 9}))
    try:
        config = config_of(folder).model_config
        assert (config.generation_config["temperature"], config.generation_eos_token_ids) == (0.5, (2, 7))
        plain = config_of(folder, generation_config="vllm").model_config
        assert "temperature" not in plain.generation_config
        assert plain.generation_eos_token_ids == (2, 7), "end tokens are the model's nature, no taste"
        other = config_of(folder, generation_config=str(tmp_path)).model_config
        assert (other.generation_config["top_k"], other.generation_eos_token_ids) == (3, (9,))
        laid_over = config_of(folder, override_generation_config={"temperature": 0.9}).model_config
        assert laid_over.generation_config["temperature"] == 0.9
    finally:
        (folder / "generation_config.json").unlink()


def test_a_model_that_is_not_there_is_said_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        config_of(tmp_path / "nowhere")
    with pytest.raises(VLLMValidationError, match="model"):
        EngineArgs().create_engine_config()


def test_arguments_can_be_copied_and_sent(folder: pathlib.Path) -> None:
    args = AsyncEngineArgs(str(folder), max_num_queued_reqs=3)
    assert copy.deepcopy(args) == args == pickle.loads(pickle.dumps(args))


def test_a_command_line_says_the_same(folder: pathlib.Path) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    line = (
        f"--model {folder} --max_model_len 0.1k --no-enable-prefix-caching --max-logprobs=-1 --trust-remote-code "
        "--tensor-parallel-size 1 --gpu-memory-utilization 0.5 --dtype float32"
    )
    namespace = parser.parse_args([*with_dashes(line.split()), "--override-generation-config", '{"top_k": 4}'])
    assert EngineArgs.from_cli_args(namespace) == EngineArgs(
        str(folder), max_model_len="0.1k", enable_prefix_caching=False, max_logprobs=-1, trust_remote_code=True,
        gpu_memory_utilization=0.5, dtype="float32", override_generation_config={"top_k": 4},
    )  # fmt: skip


def test_the_help_of_the_command_line_tells_what_is_served_and_hides_the_rest() -> None:
    text = EngineArgs.add_cli_args(argparse.ArgumentParser()).format_help()
    assert "--max-logprobs" in text and "--no-enable-prefix-caching" in text
    assert "--enable-lora" not in text and "--enforce-eager" not in text


def test_underscores_in_values_are_kept() -> None:
    line = ["--max_model_len", "a_b", "--logprobs_mode=raw_logprobs", "-x_y", "--", "--kept_so"]
    assert with_dashes(line) == ["--max-model-len", "a_b", "--logprobs-mode=raw_logprobs", "-x_y", "--", "--kept_so"]


class OwnExecutor:
    """Stands for a caller's executor."""


def test_one_worker_runs_unless_the_caller_names_an_executor(folder: pathlib.Path) -> None:
    for backend in (None, "uni", "mp", "external_launcher"):
        parallel = config_of(folder, distributed_executor_backend=backend).parallel_config
        assert parallel == ParallelConfig() and parallel.world_size == 1
    for backend in (OwnExecutor, f"{__name__}:OwnExecutor"):
        parallel = config_of(folder, distributed_executor_backend=backend).parallel_config
        assert parallel.distributed_executor_backend == f"{__name__}:OwnExecutor"


def test_ranks_of_a_tensor_parallel_group_follow_each_other() -> None:
    configs = [ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3, rank=rank) for rank in range(6)]
    assert [config.tensor_parallel_rank for config in configs] == [0, 1, 0, 1, 0, 1]
    assert configs[0].world_size == 6
