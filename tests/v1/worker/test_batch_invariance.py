"""Batch-invariant mode: what it refuses, and the look at the products at start-up."""

import pathlib

import pytest
import torch

from tests.tiny_models import edit_config, write_tiny_model
from vllm import LLM
from vllm.exceptions import VLLMUnsupportedError
from vllm.model_executor.dtypes import choose_dtypes
from vllm.model_executor.layers.rotary import RotaryEmbedding
from vllm.ops import api as ops
from vllm.v1.worker import batch_invariance


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", num_hidden_layers=1)


def start(folder: pathlib.Path, **options: object) -> LLM:
    return LLM(str(folder), batch_invariant=True, max_model_len=64, kv_cache_memory_bytes=1 << 20, **options)


def assert_refused(folder: pathlib.Path, words: str, **options: object) -> None:
    with pytest.raises(VLLMUnsupportedError, match=words) as caught:
        start(folder, **options)
    assert caught.value.parameter == "batch_invariant"


def test_what_leaves_the_kernels_is_refused_by_name(folder: pathlib.Path) -> None:
    assert_refused(folder, "dtype='float32' or 'bfloat16'", dtype="float16")
    with start(folder) as llm:
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        with pytest.raises(VLLMUnsupportedError, match="needs the CPU"):
            batch_invariance.check_batch_invariant(model, torch.device("cuda"))


def test_every_activation_has_a_kernel(tmp_path: pathlib.Path) -> None:
    gelu = write_tiny_model(tmp_path, "LlamaForCausalLM", num_hidden_layers=1)
    edit_config(gelu, hidden_act="gelu")
    start(gelu).shutdown()


def test_an_installation_without_kernels_is_refused(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "is_compiled", lambda: False)
    assert_refused(folder, "needs the compiled kernels")


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_products_that_depend_on_the_number_of_rows_are_found_at_start_up(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: dict
) -> None:
    real = ops.linear

    def sum_few_rows_in_another_order(x, weight, bias=None, scale=None, out=None):
        if len(x) > 4:
            return real(x, weight, bias, scale, out)
        return real(x.flip(1).contiguous(), weight.flip(1).contiguous(), bias, scale, out)

    with start(folder, **options):
        pass
    monkeypatch.setattr(ops, "linear", sum_few_rows_in_another_order)
    assert_refused(folder, "differ between 1 and 260 rows", **options)


def test_bfloat16_weights_are_computed_with_in_float32_even_where_there_are_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm.platforms.has_fast_dtype", lambda dtype, device: True)
    assert choose_dtypes(torch.bfloat16, None, "cpu") == (torch.bfloat16, torch.bfloat16)
    assert choose_dtypes(torch.bfloat16, None, "cpu", batch_invariant=True) == (torch.bfloat16, torch.float32)
    assert choose_dtypes(torch.float32, None, "cpu", batch_invariant=True) == (torch.float32, torch.float32)


def test_a_position_s_rotation_does_not_depend_on_the_positions_beside_it(folder: pathlib.Path) -> None:
    with start(folder) as llm:
        config = llm.model_config.transformer
    rotary = RotaryEmbedding(config.ropes[0], config.max_position_embeddings, 4000)
    whole = rotary.make_rotation(torch.arange(4000))
    for first, end in [(0, 1), (5, 6), (100, 103), (1023, 3001)]:
        part = rotary.make_rotation(torch.arange(first, end))
        assert torch.equal(part.cos, whole.cos[first:end]) and torch.equal(part.sin, whole.sin[first:end])
