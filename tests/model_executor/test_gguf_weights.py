"""Weights out of .gguf files: equal to the folder they were made from, and to the gguf package's numbers."""

import os
import pathlib
import random
import resource
import struct

import gguf
import gguf.quants
import numpy as np
import pytest
import torch

from tests.checkpoints.tiny_gguf import write_tiny_gguf
from tests.model_executor.runner import PagedRunner, compute_reference_logits, load
from tests.tiny_models import load_tiny_reference, write_tiny_model
from vllm.checkpoints.gguf_file import BLOCK_SIZES, GgmlType, GgufTensor
from vllm.exceptions import ModelLoadError
from vllm.model_executor.layers.linear import WeightMatrix
from vllm.model_executor.model_loader import dequantize as dequantize_module
from vllm.model_executor.model_loader.dequantize import UnservedTypeError, dequantize

IDS = [5, 9, 300, 44, 501, 12, 7]
# Widths that blocks of 32 divide.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_float_file_computes_what_its_folder_computes(
    tmp_path: pathlib.Path, architecture: str, is_tied: bool
) -> None:
    folder = write_tiny_model(tmp_path / "hf", architecture, tie_word_embeddings=is_tied, tokenizer=False)
    ours = load(write_tiny_gguf(folder, tmp_path / "m.gguf"))
    wanted = dict(load(folder).named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    logits = PagedRunner(ours).run_in_chunks("a", IDS, 4)
    assert (logits - compute_reference_logits(load_tiny_reference(folder), IDS)).abs().max() < 1e-4


def test_biases_of_llama_files_are_put_in_order_too(tmp_path: pathlib.Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", attention_bias=True, mlp_bias=True, tokenizer=False)
    logits = PagedRunner(load(write_tiny_gguf(folder, tmp_path / "m.gguf"))).run_in_chunks("a", IDS, 7)
    assert (logits - compute_reference_logits(load_tiny_reference(folder), IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_quantised_file_computes_with_the_numbers_it_stores(tmp_path: pathlib.Path, quantization: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", "Qwen3ForCausalLM", tokenizer=False, **SIZES)
    reference = load_tiny_reference(folder)
    kind = gguf.GGMLQuantizationType[quantization]
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                stored = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    logits = PagedRunner(load(write_tiny_gguf(folder, tmp_path / "m.gguf", quantization))).run_in_chunks("a", IDS, 7)
    assert (logits - compute_reference_logits(reference, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_q8_0_file_is_kept_as_it_is_with_int8_weights(
    tmp_path: pathlib.Path, architecture: str, is_tied: bool
) -> None:
    """A quarter of the memory, and the bits of the same file widened to float32: one by one and many at a time."""
    folder = write_tiny_model(tmp_path / "hf", architecture, tie_word_embeddings=is_tied, tokenizer=False, **SIZES)
    path = write_tiny_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    narrow, wide = load(path, quantization="int8"), load(path)
    for name, matrix in narrow.named_modules():
        if isinstance(matrix, WeightMatrix):
            assert matrix.has_group_scales and matrix.weight.dtype == torch.int8, name
    assert narrow.weights_bytes() < 0.3 * wide.weights_bytes()
    ids = IDS * 8
    for chunk in (1, 7, 56):
        got, wanted = (PagedRunner(model).run_in_chunks("a", ids, chunk) for model in (narrow, wide))
        assert torch.equal(got, wanted)
    for module in narrow.modules():  # the modules one by one, as where somebody hooks them
        module.register_forward_hook(lambda *_: None)
    assert torch.equal(PagedRunner(narrow).run_in_chunks("a", ids, 7), PagedRunner(wide).run_in_chunks("a", ids, 7))


def test_weights_handed_over_to_a_kept_q8_0_file_are_rounded_in_its_blocks(tmp_path: pathlib.Path) -> None:
    old = write_tiny_model(tmp_path / "old", tokenizer=False, seed=1, **SIZES)
    new = write_tiny_model(tmp_path / "new", tokenizer=False, seed=2, **SIZES)
    model = load(write_tiny_gguf(old, tmp_path / "old.gguf", "Q8_0"), quantization="int8")
    model.load_weights((name, tensor.detach()) for name, tensor in load_tiny_reference(new).named_parameters())
    got = PagedRunner(model).run_in_chunks("a", IDS, 7)
    wanted = PagedRunner(load(new)).run_in_chunks("a", IDS, 7)
    assert 0 < (got - wanted).abs().mean() < 0.05 * wanted.std()


def test_a_matrix_of_mixed_types_gets_a_factor_a_row(tmp_path: pathlib.Path) -> None:
    """A fused matrix is of one form: one of its three parts is stored otherwise."""
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False, **SIZES)
    path = write_tiny_gguf(folder, tmp_path / "m.gguf", "Q8_0", others={"v_proj": "F16"})
    model = load(path, quantization="int8")
    attention = model.model.layers[0].self_attn
    assert not attention.qkv_proj.has_group_scales and attention.o_proj.has_group_scales
    got, wanted = (PagedRunner(m).run_in_chunks("a", IDS, 7) for m in (model, load(path)))
    assert 0 < (got - wanted).abs().mean() < 0.05 * wanted.std()


@pytest.mark.parametrize("kind", [kind for kind in GgmlType if kind not in (GgmlType.F64,)], ids=lambda kind: kind.name)
def test_blocks_become_the_numbers_of_the_gguf_package(kind: GgmlType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize_module, "_BLOCKS_AT_ONCE", 5)
    monkeypatch.setattr(dequantize_module, "_MAX_ELEMENTS_AT_ONCE", 600)
    block, block_bytes = BLOCK_SIZES[kind]
    data = np.random.default_rng(int(kind)).integers(0, 256, (8 * 3, block_bytes), dtype=np.uint8)
    tensor = GgufTensor("x", (8, 3 * block), kind, 0, data.size)
    with np.errstate(all="ignore"):
        try:
            wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(kind))).astype(np.float32)
        except NotImplementedError:
            with pytest.raises(UnservedTypeError, match=f"'x': type {kind.name} can't be turned into numbers"):
                dequantize(tensor, data.reshape(-1))
            return
    memory = np.full(tensor.shape[0] * tensor.shape[1] + 9, 7, np.float32)
    got = dequantize(tensor, data.reshape(-1), memory)
    assert (memory[-9:] == 7).all()
    assert got.shape == (8, 3 * block)
    np.testing.assert_array_equal(got.float().numpy().reshape(-1), wanted.reshape(-1))


def test_frequency_factors_in_a_file_are_llama3_scaling(tmp_path: pathlib.Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = write_tiny_model(tmp_path / "hf", rope_parameters=scaling, tokenizer=False)
    reference = load_tiny_reference(folder)
    plain = 1.0 / 500.0 ** (np.arange(0, 8, 2) / 8)
    factors = (plain / reference.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7
    path = write_tiny_gguf(folder, tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    ids = IDS * 8
    logits = PagedRunner(load(path)).run_in_chunks("a", ids, 56)
    assert (logits - compute_reference_logits(reference, ids)).abs().max() < 1e-4


def test_yarn_and_linear_scaling_are_read_from_metadata(tmp_path: pathlib.Path) -> None:
    for kind, numbers in {
        "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    }.items():
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
        folder = write_tiny_model(tmp_path / kind, rope_parameters=rope, tokenizer=False)
        path = write_tiny_gguf(folder, tmp_path / f"{kind}.gguf", numbers=numbers)
        logits = PagedRunner(load(path)).run_in_chunks("a", IDS, 7)
        assert (logits - compute_reference_logits(load_tiny_reference(folder), IDS)).abs().max() < 1e-4


def test_unknown_and_missing_tensors_are_listed(tmp_path: pathlib.Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    path = write_tiny_gguf(folder, tmp_path / "m.gguf", extra={"blk.0.ssm_a.weight": np.zeros(3, np.float32)})
    with pytest.raises(ModelLoadError, match=r"unexpected weights: blk\.0\.ssm_a\.weight"):
        load(path)
    content = path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight")
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"missing weights: layers\.1\.mlp\.up_proj\.weight; unexpected"):
        load(path)


def test_a_tensor_of_integers_is_no_weight(tmp_path: pathlib.Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    path = write_tiny_gguf(folder, tmp_path / "m.gguf")
    name = b"output_norm.weight"
    content = bytearray(path.read_bytes())
    place = content.index(name) + len(name) + 4 + 8  # after the name: dimensions, then the type
    assert content[place : place + 4] == struct.pack("<I", 0)
    content[place : place + 4] = struct.pack("<I", int(GgmlType.I32))
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor .*type I32 can't be turned into numbers"):
        load(path)


def test_random_damage_gives_a_model_or_a_clear_error_and_takes_no_memory(tmp_path: pathlib.Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", vocab_size=64, num_hidden_layers=1, tokenizer=False)
    path = write_tiny_gguf(
        folder, tmp_path / "m.gguf", numbers={"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    )
    whole = path.read_bytes()
    header_end = len(whole) - sum(parameter.nbytes for parameter in load(folder).parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng, refused = random.Random(4), 0
    for step in range(300):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            content[rng.randrange(header_end)] = rng.choice([0, 1, 2, 127, 128, 255, rng.randrange(256)])
        path.write_bytes(content[: rng.choice([len(content)] * 4 + [rng.randrange(len(content))])])
        os.utime(path, ns=(step, step))  # two writes within one tick of the clock would be taken for one file
        try:
            load(path)
        except ModelLoadError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
