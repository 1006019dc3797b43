"""Families and models from outside: registered by hand, by name, and by a plugin in each process."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.tiny_models import edit_config, load_tiny_reference, write_tiny_model
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.exceptions import ModelLoadError
from vllm.model_executor.families.llama import Llama
from vllm.model_executor.models import registry
from vllm.model_executor.models.decoder import DecoderForCausalLM

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=0)
IDS = [5, 9, 17, 33, 2, 8]


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A Llama under another name, with another name for its width."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    edit_config(folder, architectures=["OtherForCausalLM"], model_type="other", hidden_size=..., width=48)
    return folder


class Other(Llama):
    """Reads `width` where others read `hidden_size`."""

    model_type = "other"

    def read_hf_config(self, fields, folder):
        fields.values["hidden_size"] = fields.read_int("width", high=1 << 20)
        return super().read_hf_config(fields, folder)


class HalvedLogits(DecoderForCausalLM):
    """A model of one's own, which says what family's configuration it reads."""

    family = Other

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return super().compute_logits(hidden, out).mul_(0.5)


def score(folder: pathlib.Path) -> list[float]:
    with LLM(str(folder), max_model_len=64, kv_cache_memory_bytes=1 << 20, dtype="float32") as llm:
        scored = llm.generate({"prompt_token_ids": IDS}, SCORE)[0].prompt_logprobs
    return [entry[token].logprob for token, entry in zip(IDS[1:], scored[1:], strict=True)]


def compute_reference(folder: pathlib.Path, tmp_path: pathlib.Path, factor: float) -> list[float]:
    """What transformers says of the same weights under Llama's own name."""
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in folder.iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    edit_config(plain, architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=48)
    with torch.no_grad():
        logits = load_tiny_reference(plain)(torch.tensor([IDS])).logits[0] * factor
    return logits.log_softmax(-1)[torch.arange(len(IDS) - 1), IDS[1:]].tolist()


def test_a_family_is_served_under_the_name_it_was_registered_by(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="OtherForCausalLM"):
        score(folder)
    ModelRegistry.register_model("OtherForCausalLM", Other)
    assert "OtherForCausalLM" in ModelRegistry.get_supported_archs()
    assert score(folder) == pytest.approx(compute_reference(folder, tmp_path, 1.0), abs=1e-4)


def test_a_model_class_brings_its_family_with_it(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    ModelRegistry.register_model("OtherForCausalLM", f"{__name__}:HalvedLogits")
    assert score(folder) == pytest.approx(compute_reference(folder, tmp_path, 0.5), abs=1e-4)


@pytest.mark.parametrize(
    ("registered", "words"),
    [
        ("no.such.module:Family", "no.such.module:Family: can't be imported"),
        ("vllm.config:NoSuchClass", "vllm.config:NoSuchClass: can't be imported"),
        (dict, "must be a Family or a model class"),
    ],
)
def test_what_is_no_family_is_refused_when_its_model_is_loaded(folder: pathlib.Path, registered, words: str) -> None:
    ModelRegistry.register_model("OtherForCausalLM", registered)
    with pytest.raises(ModelLoadError, match=words):
        score(folder)


@pytest.mark.parametrize("name", ["module", "module:", ":Class"])
def test_a_name_without_a_class_is_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="'module:Class'"):
        ModelRegistry.register_model("OtherForCausalLM", name)


def write_plugin(folder: pathlib.Path) -> None:
    """An installed package, as far as entry points are concerned."""
    info = folder / "other_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbroken = other_plugin:fail\nother = other_plugin:register\n"
    )
    (folder / "other_plugin.py").write_text(
        textwrap.dedent(
            """
            import os, pathlib
            from vllm import ModelRegistry
            from tests.model_executor.test_registry import Other

            def fail():
                raise RuntimeError("a plugin that fails")

            def register():
                with pathlib.Path(os.environ["CALLS"]).open("a") as file:
                    file.write(f"{os.getpid()}\\n")
                ModelRegistry.register_model("OtherForCausalLM", Other)
            """
        )
    )


PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], max_model_len=64, kv_cache_memory_bytes=1 << 20, dtype="float32")
    ids = json.loads(sys.argv[2])
    scored = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=0, prompt_logprobs=0))[0].prompt_logprobs
    print(json.dumps([entry[token].logprob for token, entry in zip(ids[1:], scored[1:])]))
"""


@pytest.mark.parametrize("names", [None, "", "other"])
def test_plugins_are_called_once_in_each_process(
    folder: pathlib.Path, tmp_path: pathlib.Path, names: str | None
) -> None:
    write_plugin(tmp_path / "site")
    calls = tmp_path / "calls"
    root = pathlib.Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(tmp_path / "site"), str(root)])
    environment = os.environ | {"PYTHONPATH": path, "CALLS": str(calls), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment.pop("VLLM_PLUGINS", None)
    if names is not None:
        environment["VLLM_PLUGINS"] = names
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, str(program), str(folder), json.dumps(IDS)], env=environment, capture_output=True, text=True
    )
    if names == "":
        assert run.returncode != 0 and "OtherForCausalLM" in run.stderr and not calls.exists()
        return
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == pytest.approx(compute_reference(folder, tmp_path, 1.0), abs=1e-4)
    processes = calls.read_text().split()
    assert len(processes) == len(set(processes)) == 2, "the caller's process and the core's"
    assert ("a plugin that fails" in run.stderr) is (names is None)
