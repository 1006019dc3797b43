"""Every served architecture's logits against transformers' in float32, through the paged cache."""

import pathlib
import random

import pytest
import torch

from tests.model_executor.runner import PagedRunner, compute_reference_logits, load
from tests.tiny_models import load_tiny_reference, write_tiny_model

TOLERANCE = 1e-4
TAIL_TOLERANCE = 2e-3  # of log-probabilities below −15

VARIANTS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, one kv head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, no grouping": ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    "llama, head_dim derived": ("LlamaForCausalLM", {"head_dim": None}),
    "llama, head_dim beyond hidden": ("LlamaForCausalLM", {"head_dim": 32}),
    "llama, gelu": ("LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama, eps": ("LlamaForCausalLM", {"rms_norm_eps": 0.1}),
    "mistral": ("MistralForCausalLM", {}),
    "mistral, window": ("MistralForCausalLM", {"sliding_window": 9}),
    "mistral, window of one": ("MistralForCausalLM", {"sliding_window": 1}),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3, half of each head rotated, tied": (
        "Phi3ForCausalLM",
        {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "phi3, window": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.75, "sliding_window": 9}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, tied, window on a layer": (
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3, window by layer": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "rope theta": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "rope linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "rope dynamic, within": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "rope llama3": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope yarn": (
        "Qwen2ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e3,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "rope yarn, all options": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e3,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 8,
                "beta_slow": 2,
                "mscale": 1.5,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "rope yarn, attention factor": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e3,
                "factor": 4.0,
                "attention_factor": 0.7,
                "original_max_position_embeddings": 128,
            }
        },
    ),
}


def make_ids(num: int, seed: int = 0, vocab_size: int = 512) -> list[int]:
    return random.Random(seed).choices(range(3, vocab_size), k=num)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_equal_transformers_whatever_the_chunks_and_blocks(tmp_path: pathlib.Path, variant: str) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = write_tiny_model(tmp_path, architecture, tokenizer=False, **overrides)
    ids = make_ids(60)
    wanted = compute_reference_logits(load_tiny_reference(folder), ids)
    assert wanted.std() > 1, "flat logits would prove nothing"
    model = load(folder)
    for block_size, chunk in ((16, 60), (4, 7)) + (((1, 33), (8, 1)) if "window" in variant else ()):
        got = PagedRunner(model, block_size).run_in_chunks("a", ids, chunk)
        difference = (got - wanted).abs().max().item()
        assert difference <= TOLERANCE, f"block_size {block_size}, chunk {chunk}: {difference}"


def test_dynamic_rope_beyond_the_trained_length_equals_transformers_at_the_models_length(
    tmp_path: pathlib.Path,
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = write_tiny_model(tmp_path, rope_parameters=rope, max_position_embeddings=32, tokenizer=False)
    ids = make_ids(90)
    wanted = compute_reference_logits(load_tiny_reference(folder), ids)
    got = PagedRunner(load(folder, max_model_len=90)).run_in_chunks("a", ids, 90)
    assert (got - wanted).abs().max() <= TOLERANCE


def test_requests_of_one_step_do_not_see_each_other(tmp_path: pathlib.Path) -> None:
    """Prefills, chunks with context and decodes of very different lengths, mixed in one step, in any order."""
    folder = write_tiny_model(tmp_path, "MistralForCausalLM", sliding_window=20, tokenizer=False)
    reference, model = load_tiny_reference(folder), load(folder)
    prompts = {
        name: make_ids(length, seed) for seed, (name, length) in enumerate({"a": 70, "b": 3, "c": 41, "d": 1}.items())
    }
    wanted = {name: compute_reference_logits(reference, ids) for name, ids in prompts.items()}
    runner = PagedRunner(model, block_size=4)
    done = dict.fromkeys(prompts, 0)
    got: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    rng = random.Random(5)
    while any(done[name] < len(ids) for name, ids in prompts.items()):
        names = [name for name, ids in prompts.items() if done[name] < len(ids) and rng.random() < 0.8]
        rng.shuffle(names)
        step = {name: prompts[name][done[name] : done[name] + rng.choice([1, 1, 7])] for name in names}
        if not step:
            continue
        for name, logits in runner.step(step).items():
            got[name].append(logits)
            done[name] += len(logits)
    for name in prompts:
        assert (torch.cat(got[name]) - wanted[name]).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_stay_near_float32_and_their_logits_are_not_rounded(
    tmp_path: pathlib.Path, dtype: torch.dtype
) -> None:
    folder = write_tiny_model(tmp_path, dtype=str(dtype).removeprefix("torch."), tokenizer=False)
    ids = make_ids(40)
    wanted = compute_reference_logits(load_tiny_reference(folder), ids)
    model = load(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters() if parameter.dim() == 2} == {dtype}
    got = PagedRunner(model).run_in_chunks("a", ids, 16)
    assert (got - wanted).abs().mean() < (0.05 if dtype == torch.bfloat16 else 0.01)
    assert (got.to(dtype).float() != got).float().mean() > 0.9, "logits were rounded to the narrow type"
    # The same weights computed in float32 are exact.
    got = PagedRunner(load(folder)).run_in_chunks("a", ids, 16)
    assert (got - wanted).abs().max() <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_on_cuda_equal_transformers(tmp_path: pathlib.Path, variant: str) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = write_tiny_model(tmp_path, architecture, tokenizer=False, **overrides)
    ids = make_ids(75)
    wanted = compute_reference_logits(load_tiny_reference(folder), ids)
    model = load(folder, device="cuda")
    for chunk in (75, 10, 1):
        got = PagedRunner(model).run_in_chunks("a", ids, chunk)
        assert (got - wanted).abs().max() <= TOLERANCE


def test_smollm2_equals_transformers(smollm2_folder: pathlib.Path, smollm2_gguf: pathlib.Path) -> None:
    """The real model: the folder and the .gguf file give the reference's logits, bit for bit the same as each other."""
    model = load(smollm2_folder)
    ids = make_ids(96, vocab_size=49152)
    wanted = compute_reference_logits(load_tiny_reference(smollm2_folder), ids)
    got = PagedRunner(model, block_size=16).run_in_chunks("a", ids, 40)
    logprobs, wanted_logprobs = got.log_softmax(-1), wanted.log_softmax(-1)
    tolerance = torch.where(wanted_logprobs >= -15, TOLERANCE, TAIL_TOLERANCE)
    assert ((logprobs - wanted_logprobs).abs() <= tolerance).all()
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    from_gguf = load(smollm2_gguf)
    weights = dict(model.named_parameters())
    for name, parameter in from_gguf.named_parameters():
        assert torch.equal(parameter, weights[name]), name
