"""Finding checkpoints, and what is said when there is none."""

import pathlib
import subprocess
import sys

import pytest

from tests.checkpoints.test_gguf_file import make_file
from tests.tiny_models import write_tiny_model
from vllm.checkpoints import read_generation_eos_token_ids, resolve_checkpoint
from vllm.exceptions import ModelLoadError


def test_a_folder_a_gguf_file_and_a_folder_with_one_gguf_file_are_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    found = resolve_checkpoint(str(folder))
    assert (found.kind, found.path, found.config["vocab_size"]) == ("hf", str(folder), 512)
    assert found.generation_config["eos_token_id"] == 2
    (tmp_path / "one").mkdir()
    gguf = make_file(tmp_path / "one" / "m.gguf")
    assert (resolve_checkpoint(str(gguf)).kind, resolve_checkpoint(str(gguf)).path) == ("gguf", str(gguf))
    assert resolve_checkpoint(str(tmp_path / "one")).path == str(gguf)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("hf").kind == "hf", "a relative path is a path before it is a hub id"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/hf").kind == "hf"


@pytest.mark.parametrize("model", ["nobody/nothing-at-all", "nothing-at-all"])
def test_a_hub_id_without_a_network_says_what_was_tried(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        resolve_checkpoint(model, download_dir=str(tmp_path / "cache"))
    message = str(caught.value)
    for part in (repr(model), str(tmp_path / model), str(tmp_path / "cache"), "HF_HUB_OFFLINE", ".gguf file"):
        assert part in message, (part, message)


def test_a_hub_id_is_served_from_the_cache_without_a_network(tmp_path: pathlib.Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--tiny"
    write_tiny_model(repo / "snapshots" / commit, tokenizer=False)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    found = resolve_checkpoint("org/tiny", download_dir=str(tmp_path))
    assert found.path == str(repo / "snapshots" / commit)


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "../none/x", "none.gguf", "a/b/c", "", "a b"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(ModelLoadError, match=r"no such folder or \.gguf file|holds no config\.json"):
        resolve_checkpoint(model)


def test_a_folder_or_file_of_another_kind_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json \(no \.gguf file\)"):
        resolve_checkpoint(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        make_file(tmp_path / name)
    with pytest.raises(ModelLoadError, match=r"a\.gguf, b\.gguf"):
        resolve_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ModelLoadError, match="must be a .gguf file"):
        resolve_checkpoint(str(tmp_path / "model.safetensors"))
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="0 bytes are too few"):
        resolve_checkpoint(str(tmp_path / "empty.gguf"))


@pytest.mark.parametrize(
    "content", ["{", "[1]", "[" * 100000, "\udcff"], ids=["cut off", "a list", "deep", "not UTF-8"]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json_is_refused_by_file(tmp_path: pathlib.Path, name: str, content: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=name):
        resolve_checkpoint(str(tmp_path))


def test_end_tokens_of_the_generation_config() -> None:
    assert read_generation_eos_token_ids({}) == ()
    assert read_generation_eos_token_ids({"eos_token_id": 5}) == (5,)
    assert read_generation_eos_token_ids({"eos_token_id": [7, 5, 7]}) == (7, 5)
    for bad in ("</s>", [1.5], [True], -1):
        with pytest.raises(ModelLoadError, match="eos_token_id"):
            read_generation_eos_token_ids({"eos_token_id": bad})


def test_checkpoints_are_read_without_torch_and_transformers() -> None:
    code = (
        "import sys, vllm.checkpoints as c\n"
        "loaded = [m for m in ('torch', 'transformers', 'gguf', 'huggingface_hub') if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
