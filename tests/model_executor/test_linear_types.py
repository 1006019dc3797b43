"""Weights stored as float32, bfloat16 and int8: what is computed, and that new weights count from the next product."""

import pathlib

import pytest
import torch

from tests.model_executor.runner import PagedRunner, compute_reference_logits, load, make_config
from tests.tiny_models import load_tiny_reference, write_tiny_model
from vllm import platforms
from vllm.exceptions import ModelLoadError
from vllm.model_executor.dtypes import ModelDtypes, choose_dtypes
from vllm.model_executor.layers.linear import Linear, WeightMatrix
from vllm.model_executor.model_loader import load_model
from vllm.ops.stored_weights import take_int8_rows

IDS = [(7 * i + 3) % 500 for i in range(60)]  # several panels of rows
LOADS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"quantization": "int8"},
}


@pytest.fixture(autouse=True)
def cpu_without_bfloat16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "has_fast_dtype", lambda dtype, device: dtype == "float32" or device != "cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.05), ("int8", 0.05)])
def test_narrow_weights_stay_near_float32(tmp_path: pathlib.Path, kind: str, tolerance: float, tied: bool) -> None:
    folder = write_tiny_model(tmp_path, tokenizer=False, tie_word_embeddings=tied)
    wanted = compute_reference_logits(load_tiny_reference(folder), IDS)
    model = load(folder, **LOADS[kind])
    got = PagedRunner(model).run_in_chunks("a", IDS, 16)
    assert (got - wanted).abs().mean() < tolerance * wanted.std()
    assert {m.weight.dtype for m in model.modules() if isinstance(m, WeightMatrix)} == {getattr(torch, kind)}
    assert model.dtype == torch.float32, "activations and the cache are float32"


@pytest.mark.parametrize("kind", list(LOADS))
def test_a_handed_over_weight_counts_from_the_next_step_on(tmp_path: pathlib.Path, kind: str) -> None:
    """Both ways of multiplying, before and after, against a model that is loaded with the new weights."""
    (tmp_path / "old").mkdir(), (tmp_path / "new").mkdir()
    old = load(write_tiny_model(tmp_path / "old", tokenizer=False, seed=1), **LOADS[kind])
    folder = write_tiny_model(tmp_path / "new", tokenizer=False, seed=2)
    new, theirs = load(folder, **LOADS[kind]), load_tiny_reference(folder)
    for chunk in (5, 60):
        before, wanted = (PagedRunner(model).run_in_chunks("a", IDS, chunk) for model in (old, new))
        assert not torch.allclose(before, wanted, atol=0.1), "the two models must differ for this test to say anything"
    old.load_weights((name, tensor.detach()) for name, tensor in theirs.named_parameters())
    for chunk in (5, 60):
        got, wanted = (PagedRunner(model).run_in_chunks("a", IDS, chunk) for model in (old, new))
        assert torch.equal(got, wanted)
    # One part of a fused matrix alone, in place: what a trainer's step does.
    name = "model.layers.0.self_attn.k_proj.weight"
    halved = dict(theirs.named_parameters())[name].detach() / 2
    old.load_weights([(name, halved)])
    assert not torch.equal(PagedRunner(old).run_in_chunks("a", IDS, 60), wanted)
    new.load_weights([(name, halved)])
    got, wanted = (PagedRunner(model).run_in_chunks("a", IDS, 60) for model in (old, new))
    assert torch.equal(got, wanted)


def test_int8_rows_are_rounded_to_the_nearest_step_of_their_own() -> None:
    layer = Linear(64, {"a": 3, "b": 2}, dtypes=ModelDtypes(torch.int8, torch.float32))
    rows = torch.randn(3, 64)
    rows[1] *= 1e-6
    rows[2] = 0
    layer.write_rows(rows, 0)
    layer.write_rows(rows[:2] * 1000, 3)
    scale = layer.weight_scale
    assert scale is not None
    numbers = take_int8_rows(layer.weight, torch.arange(5))
    stored = numbers.float() * scale[:, None]
    wanted = torch.cat((rows, rows[:2] * 1000))
    assert ((stored - wanted).abs() <= scale[:, None] / 2 * 1.001).all()
    assert numbers[:2].abs().amax(dim=1).eq(127).all() and stored[2].eq(0).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_weights_do_not_come_out_finite_as_int8(broken: float) -> None:
    layer = Linear(16, 2, dtypes=ModelDtypes(torch.int8, torch.float32))
    rows = torch.randn(2, 16)
    rows[0, 5] = broken
    layer.write_rows(rows, 0)
    got = layer(torch.randn(3, 16))
    assert not got[:, 0].isfinite().any() and got[:, 1].isfinite().all()


def test_dummy_weights_of_int8_are_drawn_like_the_others(tmp_path: pathlib.Path) -> None:
    folder = write_tiny_model(tmp_path, tokenizer=False)
    wide = load(folder, load_format="dummy")
    narrow = load(folder, load_format="dummy", quantization="int8")
    got, wanted = (PagedRunner(model).run_in_chunks("a", IDS, 16) for model in (narrow, wide))
    assert (got - wanted).abs().mean() < 0.05 * wanted.std()


def test_int8_is_refused_off_the_cpu(tmp_path: pathlib.Path) -> None:
    config = make_config(write_tiny_model(tmp_path, tokenizer=False), quantization="int8")
    with pytest.raises(ModelLoadError, match="CPU only"):
        load_model(config, torch.float32, torch.device("cuda"))
    assert choose_dtypes(torch.bfloat16, None, "cuda") == (torch.bfloat16, torch.bfloat16)
