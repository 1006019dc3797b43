"""A decoder in one call gives the bits of its modules one by one, and stands aside where somebody changed a module."""

import copy
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.model_executor.runner import PagedRunner, load
from tests.tiny_models import load_tiny_reference, write_tiny_model
from vllm import LLM, SamplingParams, platforms
from vllm.model_executor.layers.norm import RMSNorm
from vllm.model_executor.models.decoder import DecoderForCausalLM
from vllm.v1.attention import make_attention_metadata

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": True, "mlp_bias": True},
    "MistralForCausalLM": {"sliding_window": 7},
    "Phi3ForCausalLM": {"partial_rotary_factor": 0.5, "sliding_window": 7},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 16},
}
LOADS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"quantization": "int8"},
}
# Prompts alone and together, a chunk beside decodes, decodes alone; few rows and more than the MLP takes at a time.
STEPS = [{"a": 60}, {"a": 1}, {"a": 1, "b": 13, "c": 3}, {"a": 1, "b": 1, "c": 1}, {"d": 1030, "b": 1}, {"d": 1}]


@pytest.fixture(autouse=True)
def cpu_without_bfloat16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "has_fast_dtype", lambda dtype, device: dtype == "float32" or device != "cpu")


@pytest.fixture(autouse=True)
def restore_threads() -> Any:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def run(
    model: DecoderForCausalLM,
    *,
    one_call: bool,
    steps: list[dict[str, int]] = STEPS,
    kv_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return the logits of each step; at the end of each the way that was asked for must have been taken."""
    model.program.is_enabled = one_call
    runner = PagedRunner(model, num_blocks=320, kv_dtype=kv_dtype)
    outputs = []
    for number, lengths in enumerate(steps):
        tokens = {name: [(31 * i + 7 * number) % 500 for i in range(length)] for name, length in lengths.items()}
        outputs.append(torch.cat([*runner.step(tokens).values()]))
        assert is_one_call(model) == one_call
    model.program.is_enabled = True
    return outputs


def is_one_call(model: DecoderForCausalLM) -> bool:
    return model.program.count_scratch_bytes(1) > 0


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", list(LOADS))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_one_call_gives_the_bits_of_the_modules(tmp_path: pathlib.Path, family: str, kind: str) -> None:
    settings = {"max_position_embeddings": 2048} | FAMILIES[family]
    model = load(write_tiny_model(tmp_path, family, tokenizer=False, **settings), **LOADS[kind])
    assert are_equal(run(model, one_call=True), run(model, one_call=False))


def test_one_call_gives_the_bits_of_the_modules_over_a_bfloat16_cache(tmp_path: pathlib.Path) -> None:
    model = load(write_tiny_model(tmp_path, tokenizer=False, max_position_embeddings=2048))
    narrow = run(model, one_call=True, kv_dtype=torch.bfloat16)
    assert are_equal(narrow, run(model, one_call=False, kv_dtype=torch.bfloat16))
    assert not are_equal(narrow, run(model, one_call=True)), "the cache was not rounded"


@pytest.mark.parametrize("kind", list(LOADS))
def test_gates_may_end_in_the_middle_of_a_group(tmp_path: pathlib.Path, kind: str) -> None:
    """Of many rows the columns that meet gates are read from where the gates end: within 8 columns, for int8."""
    model = load(write_tiny_model(tmp_path, tokenizer=False, intermediate_size=92), **LOADS[kind])
    steps = [{"a": 200}, {"a": 1}]
    assert are_equal(run(model, one_call=True, steps=steps), run(model, one_call=False, steps=steps))


@pytest.mark.parametrize("kind", list(LOADS))
def test_a_team_of_any_size_gives_the_same_bits(tmp_path: pathlib.Path, kind: str) -> None:
    """Wide enough that every op is split; more threads than cores, so that some sleep while the work is done."""
    folder = write_tiny_model(
        tmp_path, tokenizer=False, hidden_size=256, intermediate_size=512, head_dim=32, num_attention_heads=8
    )
    model = load(folder, **LOADS[kind])
    steps = [{"a": 60}, *[{"a": 1, "b": 1}] * 4, {"a": 1}, {"c": 200}]
    torch.set_num_threads(1)
    alone = run(model, one_call=False, steps=steps)
    for num_threads in (1, 2, 3, 8):
        torch.set_num_threads(num_threads)
        assert are_equal(run(model, one_call=True, steps=steps), alone)


@pytest.fixture
def model(tmp_path: pathlib.Path) -> DecoderForCausalLM:
    return load(write_tiny_model(tmp_path, tokenizer=False))


SHORT = [{"a": 5}, {"a": 1}]


def test_hooks_on_any_module_are_called(model: DecoderForCausalLM) -> None:
    before = run(model, one_call=True, steps=SHORT)
    heard: list[str] = []
    for name, module in model.model.named_modules():
        if not name or name.endswith("_norm") or isinstance(module, nn.ModuleList):
            continue
        handle = module.register_forward_hook(lambda *_, name=name: heard.append(name))
        assert are_equal(run(model, one_call=False, steps=SHORT), before)
        model.program.is_enabled = True
        PagedRunner(model).step({"a": [1]})
        assert name in heard
        handle.remove()
        assert is_one_call(model)
    handle = model.model.norm.register_forward_pre_hook(lambda _, arguments: tuple(2 * x for x in arguments))
    assert not is_one_call(model)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: heard.append("any"))
    assert not is_one_call(model)
    handle.remove()


class HalvedNorm(RMSNorm):
    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, residual) / 2


@pytest.mark.parametrize("path", ["layers.1.post_attention_layernorm", "norm"])
def test_a_replaced_module_is_what_runs(model: DecoderForCausalLM, path: str) -> None:
    before = run(model, one_call=True, steps=SHORT)
    original = model.model.get_submodule(path)
    halved = HalvedNorm(48, original.eps, torch.float32)
    halved.load_state_dict(original.state_dict())
    model.model.set_submodule(path, halved)
    assert not is_one_call(model)
    assert not are_equal(run(model, one_call=False, steps=SHORT), before)
    model.model.set_submodule(path, original)
    assert are_equal(run(model, one_call=True, steps=SHORT), before)


def test_a_forward_put_on_one_module_is_what_runs(model: DecoderForCausalLM) -> None:
    run(model, one_call=True, steps=SHORT)
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda hidden: torch.zeros_like(hidden)
    assert not is_one_call(model)
    del mlp.forward
    assert is_one_call(model)


def test_weights_count_from_the_next_step_however_they_come(tmp_path: pathlib.Path, model: DecoderForCausalLM) -> None:
    before = run(model, one_call=True, steps=SHORT)
    other = load(write_tiny_model(tmp_path / "other", tokenizer=False, seed=1))
    wanted = run(other, one_call=False, steps=SHORT)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = theirs.data.clone()  # other memory
    assert are_equal(run(model, one_call=True, steps=SHORT), wanted)
    theirs = load_tiny_reference(tmp_path)
    model.load_weights((name, tensor.detach()) for name, tensor in theirs.named_parameters())
    assert are_equal(run(model, one_call=True, steps=SHORT), before)
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 2, requires_grad=False)
    assert are_equal(run(model, one_call=True, steps=SHORT), run(model, one_call=False, steps=SHORT))
    assert not are_equal(run(model, one_call=True, steps=SHORT), before)


def test_a_copy_of_a_model_has_its_own_weights(model: DecoderForCausalLM) -> None:
    before = run(model, one_call=True, steps=SHORT)
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert are_equal(run(copied, one_call=True, steps=SHORT), before)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_every_activation_is_part_of_the_one_call(tmp_path: pathlib.Path, activation: str) -> None:
    model = load(write_tiny_model(tmp_path, tokenizer=False, hidden_act=activation))
    steps = [{"a": 230}, {"a": 1}]
    assert are_equal(run(model, one_call=True, steps=steps), run(model, one_call=False, steps=steps))


def test_a_torch_function_among_the_ops_runs_by_modules(model: DecoderForCausalLM) -> None:
    """A module of a known type, whose work is changed by an attribute to what no op stands for."""
    before = run(model, one_call=True, steps=SHORT)
    model.model.layers[0].mlp.activation = "sigmoid"
    assert not is_one_call(model)
    model.model.layers[0].mlp.activation = "silu"
    assert are_equal(run(model, one_call=True, steps=SHORT), before)


@pytest.mark.parametrize("what", ["token", "slot", "block"])
def test_what_lies_outside_its_table_is_refused(model: DecoderForCausalLM, what: str) -> None:
    runner = PagedRunner(model)
    runner.step({"a": [1, 2, 3]})
    tables = torch.tensor([runner.tables["a"]], dtype=torch.int32)
    attn = make_attention_metadata([1], [3], tables.numpy(), runner.block_size, "cpu")
    token_ids, positions = torch.tensor([512 if what == "token" else 5]), torch.tensor([2])
    if what == "slot":
        attn.slot_mapping = torch.tensor([128 * 4])
    if what == "block":
        attn.block_tables = torch.tensor([[-1]], dtype=torch.int32)
    with pytest.raises(IndexError):
        model(token_ids, positions, runner.kv_caches, attn)
    assert is_one_call(model)


def test_rotations_from_the_table_are_those_of_the_modules(tmp_path: pathlib.Path) -> None:
    rotary = load(write_tiny_model(tmp_path, tokenizer=False, head_dim=16)).rotaries[0]
    for num_positions in (1, 1025, 3000):  # the table grows
        table = rotary.get_table(num_positions)
        assert len(table) >= num_positions
    for positions in (torch.tensor([2999]), torch.tensor([0, 1023, 1024, 7]), torch.arange(3000)):
        rotation = rotary.make_rotation(positions)
        assert torch.equal(torch.cat(rotation, -1)[:, 0], table[positions])


def test_scratch_grows_with_the_step_but_not_its_widest_part(model: DecoderForCausalLM) -> None:
    count = model.program.count_scratch_bytes
    assert 0 < count(1) < count(512) < count(1024) < count(2048)
    # From 192 rows on gates are not written: each further row takes what the first 192 took, less 160 gates and more.
    assert count(512) - count(192) <= (count(192) - 192 * 160 * 4) * 320 // 192 + 4096
    # Past 1,024 rows the feed-forward part is computed in turns: only the narrow rows grow.
    assert count(2048) - count(1024) <= count(1024) - (1024 * 80 + 192 * 160) * 4 + 4096


def test_an_engine_sees_its_callers_changes_at_the_next_step(tmp_path: pathlib.Path) -> None:
    """Between two calls, between two steps, and within a call by collective_rpc."""
    llm = LLM(str(write_tiny_model(tmp_path)), max_model_len=128, kv_cache_memory_bytes=1 << 20)
    prompt, params = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    heard: list[int] = []

    def listen(worker: Any) -> Any:
        return worker.model_runner.model.model.layers[0].mlp.register_forward_hook(lambda *_: heard.append(1))

    llm.generate(prompt, params, use_tqdm=False)
    handle = listen(llm.llm_engine.model_executor.driver_worker)
    llm.generate(prompt, params, use_tqdm=False)
    assert len(heard) == 4
    handle.remove()
    llm.generate(prompt, params, use_tqdm=False)
    assert len(heard) == 4
    llm.llm_engine.add_request("a", prompt, params)
    llm.llm_engine.step()
    llm.collective_rpc(listen)
    llm.llm_engine.step()
    listen(llm.llm_engine.model_executor.driver_worker)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert len(heard) == 4 + 1 + 2 * 2
    llm.shutdown()


def test_what_no_module_sees_counts_after_invalidate(model: DecoderForCausalLM) -> None:
    before = run(model, one_call=True, steps=SHORT)
    weight = model.model.layers[1].mlp.down_proj.weight
    kept = weight.detach().clone()
    weight.set_(2 * kept)  # other memory, and nobody was told
    model.invalidate()
    assert are_equal(run(model, one_call=True, steps=SHORT), run(model, one_call=False, steps=SHORT))
    weight.set_(kept)
    model.invalidate()
    assert are_equal(run(model, one_call=True, steps=SHORT), before)


def test_fewer_threads_than_asked_for_leave_nothing_out(tmp_path: pathlib.Path) -> None:
    """OpenMP may give a team one thread where two were asked for: the columns of the other one are computed too."""
    folder = write_tiny_model(tmp_path, tokenizer=False, hidden_size=96, intermediate_size=256, head_dim=16)
    code = f"""
import pathlib, torch
from tests.model_executor.runner import PagedRunner, load
torch.set_num_threads(2)
model = load(pathlib.Path({str(folder)!r}))
at_once = PagedRunner(model).run_in_chunks("a", [5, 9, 300, 44], 1)
model.program.is_enabled = False
assert torch.equal(PagedRunner(model).run_in_chunks("a", [5, 9, 300, 44], 1), at_once)
"""
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
