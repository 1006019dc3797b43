"""Each format gives the same weights; what is missing, damaged or absurd is said by name before memory is taken."""

import itertools
import json
import logging
import os
import pathlib
import pickle
import random
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.runner import load
from tests.tiny_models import copy_model, edit_config, write_tiny_model
from vllm import platforms
from vllm.exceptions import ModelLoadError
from vllm.model_executor.model_loader import resolve_dtype


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture
def damaged(tiny: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return copy_model(tiny, tmp_path / "damaged")


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    wanted = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def test_weights_lie_in_one_block(tiny: pathlib.Path) -> None:
    """Large pages are for the whole block; each weight begins on a cache line, and none overlaps its neighbour."""
    model = load(tiny)
    parameters = sorted(model.parameters(), key=torch.Tensor.data_ptr)
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    assert all(parameter.data_ptr() % 64 == 0 for parameter in parameters)
    for one, following in itertools.pairwise(parameters):
        assert one.data_ptr() + one.nbytes <= following.data_ptr()


def test_shards_and_bin_files_give_the_same_weights_as_one_file(tiny: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = load(tiny)
    sharded = write_tiny_model(tmp_path / "sharded", shards=3, tokenizer=False)
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    assert_same_weights(load(sharded), model)
    weights = load_file(tiny / "model.safetensors")
    pickled = tmp_path / "bin"
    pickled.mkdir()
    shutil.copy(tiny / "config.json", pickled)
    torch.save(weights, pickled / "pytorch_model.bin")
    assert_same_weights(load(pickled), model)
    assert_same_weights(load(pickled, load_format="pt"), model)
    torch.save(weights, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same_weights(load(pickled), model)
    names = sorted(weights)
    for i, part in enumerate((names[:5], names[5:])):
        torch.save({name: weights[name] for name in part}, pickled / f"pytorch_model-{i}.bin")
    weight_map = {name: f"pytorch_model-{int(i >= 5)}.bin" for i, name in enumerate(names)}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (pickled / "pytorch_model.bin").unlink()
    assert_same_weights(load(pickled), model)


def test_a_checkpoint_of_the_bare_decoder_and_a_spare_head_are_taken(damaged: pathlib.Path) -> None:
    weights = load_file(damaged / "model.safetensors")
    wanted = load(damaged)
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(bare, damaged / "model.safetensors")
    assert_same_weights(load(damaged), wanted)
    edit_config(damaged, tie_word_embeddings=True)
    assert load(damaged).lm_head is None


def test_missing_unexpected_and_mis_shaped_weights_are_listed(damaged: pathlib.Path) -> None:
    weights = load_file(damaged / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    weights["model.layers.0.mlp.side_proj.weight"] = torch.zeros(2)
    weights["model.norm.weight"] = torch.zeros(47)
    save_file(weights, damaged / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load(damaged)
    message = str(caught.value)
    assert str(damaged) in message
    assert "missing weights: layers.0.mlp.up_proj.weight" in message
    assert "unexpected weights: layers.0.mlp.side_proj.weight" in message
    assert "norm.weight is [47], must be [48]" in message


def test_a_config_of_terabytes_is_refused_before_memory_is_taken(damaged: pathlib.Path) -> None:
    edit_config(damaged, hidden_size=1 << 22, intermediate_size=1 << 22, vocab_size=1 << 26)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match="mis-shaped weights"):
        load(damaged)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_many_missing_layers_make_a_short_message(damaged: pathlib.Path) -> None:
    edit_config(damaged, num_hidden_layers=500)
    with pytest.raises(ModelLoadError, match=r"and \d{4} more") as caught:
        load(damaged)
    assert len(str(caught.value)) < 2000


def test_folders_without_weights_are_refused(damaged: pathlib.Path) -> None:
    (damaged / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no weights \(\*\.safetensors or pytorch_model\*\.bin\)"):
        load(damaged)
    with pytest.raises(ModelLoadError, match="load_format 'gguf' does not read a Hugging Face folder"):
        load(damaged, load_format="gguf")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, "files that are not there: gone.safetensors"),
        ({"a": "../../etc/passwd"}, "must name files beside it"),
        ({"a": ".hidden"}, "must name files beside it"),
        ({"a": 5}, "weight_map must name a file"),
        ([], "weight_map must name a file"),
    ],
    ids=str,
)
def test_a_damaged_index_is_refused(damaged: pathlib.Path, weight_map: object, message: str) -> None:
    (damaged / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelLoadError, match=message):
        load(damaged)


def rewrite_header(path: pathlib.Path, change: dict[str, object]) -> None:
    """Change the first entries of a safetensors header; the data stays."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, entry in change.items():
        header[name] = header[name] | entry if isinstance(entry, dict) and name in header else entry
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: {"data_offsets": [0, 192]}}, "overlaps|leaves a gap"),
        ({NORM: {"data_offsets": [1 << 61, (1 << 61) + 192]}}, "beyond the data"),
        ({NORM: {"data_offsets": [-192, 0]}}, "whole numbers from 0"),
        ({NORM: {"data_offsets": [5]}}, "two data_offsets"),
        ({NORM: {"shape": [49]}}, r"takes 196 bytes; its offsets .* hold 192"),
        ({NORM: {"shape": [1 << 61, 1 << 61]}}, "its offsets"),
        ({NORM: {"shape": ["48"]}}, "whole numbers from 0"),
        ({NORM: {"dtype": "F7"}}, "'F7' is unknown"),
        ({"more": "text"}, "'more': must have dtype"),
        ({"more": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, "unexpected weights: more"),
    ],
    ids=str,
)
def test_a_damaged_safetensors_header_is_refused_by_file_and_tensor(
    damaged: pathlib.Path, change: dict[str, object], message: str
) -> None:
    rewrite_header(damaged / "model.safetensors", change)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(damaged)
    assert str(damaged) in str(caught.value)


def test_random_damage_to_safetensors_never_gives_another_error(damaged: pathlib.Path) -> None:
    path = damaged / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    rng, refused = random.Random(2), 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 2, 6])):
            content[rng.randrange(header_end)] = rng.choice([0, 34, 44, 57, 91, 125, 255, rng.randrange(256)])
        path.write_bytes(content[: rng.choice([len(content), len(content), rng.randrange(len(content))])])
        try:
            load(damaged)
        except ModelLoadError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, b"\xff" * 64, (9).to_bytes(8, "little") + b"[1, 2, 3]", b"PK\3\4" * 30]
)
def test_garbage_instead_of_weights_is_refused(damaged: pathlib.Path, content: bytes) -> None:
    (damaged / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load(damaged)
    (damaged / "model.safetensors").unlink()
    (damaged / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin"):
        load(damaged)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_code_in_a_bin_file_does_not_run(damaged: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(damaged)
    (damaged / "model.safetensors").unlink()
    for write in (lambda file: torch.save(_Bomb(), file), lambda file: pickle.dump(_Bomb(), file, protocol=2)):
        with (damaged / "pytorch_model.bin").open("wb") as file:
            write(file)
        with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin"):
            load(damaged)
    assert not (damaged / "exploded").exists()


def test_dummy_weights_are_random_repeatable_and_need_no_files(damaged: pathlib.Path) -> None:
    (damaged / "model.safetensors").unlink()
    one, other = load(damaged, load_format="dummy"), load(damaged, load_format="dummy")
    assert_same_weights(one, other)
    assert all(parameter.isfinite().all() and parameter.std() > 0.001 for parameter in one.parameters())
    assert one.model.norm.weight.mean() > 0.9


def test_auto_dtype_is_the_checkpoints_unless_the_device_is_slow_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_dtype("auto", "float32", "cpu") == torch.float32
    assert resolve_dtype("bfloat16", "float32", "cpu") == torch.bfloat16
    assert resolve_dtype("half", "float32", "cpu") == torch.float16
    assert resolve_dtype("auto", "bfloat16", "cuda:0") == torch.bfloat16
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(platforms, "get_cpu_flags", lambda: frozenset({"avx2"}))
    with caplog.at_level(logging.INFO, "vllm"):
        assert resolve_dtype("auto", "bfloat16", "cpu") == torch.float32
    assert "computing in float32" in caplog.text and "bfloat16" in caplog.text
    monkeypatch.setattr(platforms, "get_cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert resolve_dtype("auto", "bfloat16", "cpu") == torch.bfloat16
    with pytest.raises(ModelLoadError, match="dtype must be auto"):
        resolve_dtype("int8", "float32", "cpu")


def test_loading_and_running_never_imports_transformers(tiny: pathlib.Path) -> None:
    code = """
import sys, torch
from tests.model_executor.runner import PagedRunner, load
PagedRunner(load(sys.argv[1])).run_in_chunks("a", [1, 2, 3], 2)
print([name for name in ("transformers", "gguf", "sympy", "huggingface_hub") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code, str(tiny)], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
