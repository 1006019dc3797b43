"""load_weights: what trainers hand over, one unfused Hugging Face name at a time."""

import pathlib
import random

import pytest
import torch

from tests.model_executor.runner import PagedRunner, compute_reference_logits, load
from tests.tiny_models import load_tiny_reference, write_tiny_model
from vllm.exceptions import ModelLoadError
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.ops import torch_reference

IDS = [5, 9, 300, 44, 501, 12, 7]
ARCHITECTURES = ["LlamaForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def make_pair(
    tmp_path: pathlib.Path, architecture: str = "LlamaForCausalLM", **overrides: object
) -> tuple[DecoderForCausalLM, torch.nn.Module]:
    """Return our model of one seed, and the reference of another: a step of training away."""
    old = write_tiny_model(tmp_path / "old", architecture, seed=1, tokenizer=False, **overrides)
    new = write_tiny_model(tmp_path / "new", architecture, seed=2, tokenizer=False, **overrides)
    return load(old), load_tiny_reference(new)


def compute_logits(model: DecoderForCausalLM) -> torch.Tensor:
    return PagedRunner(model).run_in_chunks("a", IDS, 4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_full_handover_in_any_order_gives_the_new_model(tmp_path: pathlib.Path, architecture: str) -> None:
    ours, theirs = make_pair(tmp_path, architecture)
    weights = list(theirs.named_parameters())
    random.Random(0).shuffle(weights)
    names = set()
    for name, tensor in weights:  # one call a tensor, gradients on, as a trainer does
        assert tensor.requires_grad
        names |= ours.load_weights([(name, tensor)])
    assert names == {name for name, _ in weights}
    assert (compute_logits(ours) - compute_reference_logits(theirs, IDS)).abs().max() < 1e-4
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_a_part_of_a_fused_weight_changes_its_own_rows_only(tmp_path: pathlib.Path) -> None:
    ours, theirs = make_pair(tmp_path)
    before = {name: parameter.clone() for name, parameter in ours.named_parameters()}
    new_weights = dict(theirs.named_parameters())
    for part, fused, rows in (
        ("self_attn.q_proj", "self_attn.qkv_proj", slice(0, 48)),
        ("self_attn.k_proj", "self_attn.qkv_proj", slice(48, 64)),
        ("self_attn.v_proj", "self_attn.qkv_proj", slice(64, 80)),
        ("mlp.gate_proj", "mlp.gate_up_proj", slice(0, 80)),
        ("mlp.up_proj", "mlp.gate_up_proj", slice(80, 160)),
    ):
        name = f"model.layers.1.{part}.weight"
        ours.load_weights([(name, new_weights[name])])
        before[f"model.layers.1.{fused}.weight"][rows] = new_weights[name].detach()
        for known, parameter in ours.named_parameters():
            assert torch.equal(parameter, before[known]), (part, known)


def test_names_without_model_narrow_types_and_strided_tensors_are_taken(tmp_path: pathlib.Path) -> None:
    ours, theirs = make_pair(tmp_path)
    weights = {name.removeprefix("model."): tensor.detach() for name, tensor in theirs.named_parameters()}
    strided = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in weights.items()}
    ours.load_weights(strided.items())
    assert (compute_logits(ours) - compute_reference_logits(theirs, IDS)).abs().max() < 1e-4
    ours.load_weights((name, tensor.bfloat16()) for name, tensor in weights.items())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.bfloat16())
    assert (compute_logits(ours) - compute_reference_logits(theirs, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("is_inference", [True, False])
def test_weights_may_change_inside_and_outside_inference_mode(tmp_path: pathlib.Path, is_inference: bool) -> None:
    folder = write_tiny_model(tmp_path, tokenizer=False)
    with torch.inference_mode():
        ours = load(folder)
    with torch.inference_mode(is_inference):
        ours.load_weights([("model.norm.weight", torch.full((48,), 3.0))])
    assert ours.model.norm.weight.eq(3).all()


def test_tied_models_take_the_embedding_for_both_and_pass_lm_head_over(tmp_path: pathlib.Path) -> None:
    ours, theirs = make_pair(tmp_path, tie_word_embeddings=True)
    weights = dict(theirs.named_parameters())
    assert "lm_head.weight" not in weights
    ours.load_weights([*weights.items(), ("lm_head.weight", torch.zeros(512, 48))])
    assert (compute_logits(ours) - compute_reference_logits(theirs, IDS)).abs().max() < 1e-4
    assert "lm_head.weight" not in ours.expected_weight_names()


def test_callbacks_run_after_success_and_after_failure(tmp_path: pathlib.Path) -> None:
    ours, theirs = make_pair(tmp_path)
    calls: list[bool] = []
    wanted = dict(theirs.named_parameters())["model.norm.weight"]
    ours.on_weights_changed.append(lambda: calls.append(torch.equal(ours.model.norm.weight, wanted)))
    ours.load_weights([("model.norm.weight", wanted)])
    assert calls == [True], "a callback must see the new weights"
    with pytest.raises(ModelLoadError):
        ours.load_weights([("model.norm.weight", torch.zeros(47))])
    assert len(calls) == 2

    def break_off():
        yield "model.norm.weight", torch.zeros(48)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        ours.load_weights(break_off())
    assert calls == [True, True, False]


def test_unknown_names_and_wrong_shapes_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    ours, _ = make_pair(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no weights named model\.layers\.9\.mlp\.up_proj\.weight, x"):
        ours.load_weights([("model.layers.9.mlp.up_proj.weight", torch.zeros(1)), ("x", torch.zeros(1))])
    with pytest.raises(
        ModelLoadError, match=r"'model\.layers\.0\.self_attn\.k_proj\.weight'.*\[16, 48\]; got \[48, 16\]"
    ):
        ours.load_weights([("model.layers.0.self_attn.k_proj.weight", torch.zeros(48, 16))])
    with pytest.raises(ModelLoadError, match="floating-point.*int8"):
        ours.load_weights([("model.norm.weight", torch.zeros(48, dtype=torch.int8))])
    assert ours.load_weights([("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))])


def test_logits_go_into_the_given_workspace(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_reference, "_MAX_WIDENED_ELEMENTS", 48 * 100)  # several pieces of vocabulary
    folder = write_tiny_model(tmp_path, tokenizer=False)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load(folder, dtype=dtype)
        hidden = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
        workspace = torch.full((10, 512), float("nan"))
        got = model.compute_logits(hidden, out=workspace[:7])
        assert got.data_ptr() == workspace.data_ptr()
        assert workspace[7:].isnan().all()
        wanted = hidden.double() @ model.lm_head.weight.double().t()  # type: ignore[union-attr]
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-5)
        assert torch.equal(model.compute_logits(hidden), got)
        assert model.compute_logits(hidden[:0]).shape == (0, 512)


def test_the_registry_names_what_is_served() -> None:
    assert ModelRegistry.get_supported_archs() == [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    ]
    assert ModelRegistry.resolve("Qwen2ForCausalLM").model_type == "qwen2"
    with pytest.raises(ModelLoadError, match="'GPT2LMHeadModel' is not served.*LlamaForCausalLM"):
        ModelRegistry.resolve("GPT2LMHeadModel")
