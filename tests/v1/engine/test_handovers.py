"""Weights handed over between generations, and memory given back between them, as trainers do it."""

import gc
import multiprocessing
import pathlib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from tests.memory import MIB, read_memory
from tests.tiny_models import load_tiny_reference, write_tiny_model
from vllm import LLM, SamplingParams

PROMPT = [5, 9, 300, 44, 501, 12, 7] * 6
SCORED = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2, ignore_eos=True)
PLAIN = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
TYPES = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}}


def make_llm(folder: pathlib.Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"kv_cache_memory_bytes": 8 << 20, "max_model_len": 256} | options)


def train_one_step(folder: pathlib.Path) -> torch.nn.Module:
    """Return transformers' model of the folder after a step of AdamW on its own loss."""
    model = load_tiny_reference(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return model.eval()


def hand_over(llm: LLM, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give the weights one at a time, by the path that trainers know, then forget what was cached."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, tensor in weights:
        model.load_weights([(name, tensor)])
    llm.reset_prefix_cache()


def read_values(llm: LLM, params: SamplingParams = SCORED) -> list[tuple[int, float]]:
    """Return ids and values of all scored positions of a generation."""
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    positions = list(output.prompt_logprobs or [])[1:] + list(output.outputs[0].logprobs)
    return [(token_id, entry.logprob) for position in positions for token_id, entry in position.items()]


def assert_close(values: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [token_id for token_id, _ in values] == [token_id for token_id, _ in expected]
    for (_, one), (_, other) in zip(values, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_after_a_training_step_the_engine_is_that_of_the_new_weights(tmp_path: pathlib.Path, name: str) -> None:
    """Every stored type: values equal those of an engine that was started on the new weights."""
    folder = write_tiny_model(tmp_path / "old")
    with make_llm(folder, **TYPES[name]) as llm:
        before = read_values(llm)
        assert llm.generate([PROMPT], PLAIN, use_tqdm=False)[0].num_cached_tokens, "the prompt's blocks are kept"
        trained = train_one_step(folder)
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        for weight_name, tensor in trained.named_parameters():
            assert model.load_weights([(weight_name, tensor)])
        (after,) = llm.generate([PROMPT], PLAIN, use_tqdm=False)
        assert after.num_cached_tokens == 0, "what the old weights computed was used, even before reset_prefix_cache"
        llm.reset_prefix_cache()
        values = read_values(llm)
    new = write_tiny_model(tmp_path / "new")
    trained.save_pretrained(new)
    with make_llm(new, **TYPES[name]) as fresh:
        assert_close(values, read_values(fresh))
    assert max(abs(one - other) for (_, one), (_, other) in zip(values, before, strict=True)) > 0.1


def test_values_after_a_training_step_are_transformers_own(tmp_path: pathlib.Path) -> None:
    folder = write_tiny_model(tmp_path)
    trained = train_one_step(folder)
    with torch.inference_mode():
        expected = trained(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    with make_llm(folder, dtype="float32") as llm:
        hand_over(llm, trained.named_parameters())
        (output,) = llm.generate([PROMPT], SCORED, use_tqdm=False)
    for i in range(1, len(PROMPT)):
        assert output.prompt_logprobs[i][PROMPT[i]].logprob == pytest.approx(
            float(expected[i - 1, PROMPT[i]]), abs=1e-4
        )


@pytest.mark.parametrize(
    "name", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "int8"))]
)
def test_a_hundred_handovers_take_no_more_memory_than_fifty(tmp_path: pathlib.Path, name: str) -> None:
    """Two sets of weights in turn: each generation is that of the last set handed over."""
    folders = [write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    # A process of its own: what tests before this one left behind comes and goes.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        sizes = process.submit(measure_a_hundred_handovers, folders, name).result()
    assert sizes[1] - sizes[0] < 4 * MIB, [size / MIB for size in sizes]


def measure_a_hundred_handovers(folders: list[pathlib.Path], name: str) -> list[int]:
    """Return this process's memory after fifty hand-overs and after a hundred, in bytes."""
    weights = [list(load_tiny_reference(folder).named_parameters()) for folder in folders]
    expected = []
    for folder in folders:
        with make_llm(folder, **TYPES[name]) as llm:
            expected.append(read_values(llm, PLAIN))
    with make_llm(folders[0], **TYPES[name]) as llm:
        sizes = []
        for turn in range(100):
            hand_over(llm, weights[turn % 2])
            assert_close(read_values(llm, PLAIN), expected[turn % 2])
            if turn in (49, 99):
                gc.collect()
                sizes.append(read_memory())
    return sizes


def test_sleep_gives_memory_back_and_a_trainer_wakes_the_engine_in_parts(tmp_path: pathlib.Path) -> None:
    """Level 1 gives the KV cache back, level 2 the weights too; awake, the values are what they were."""
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64}
    folder = write_tiny_model(tmp_path, **size, num_attention_heads=4, num_key_value_heads=4)
    weights = 8 * (4 * 256 * 256 + 3 * 256 * 1024) * 4  # bytes, without embeddings
    num_tokens = 512
    cache = 8 * 2 * 4 * 64 * 4 * num_tokens
    with make_llm(folder, dtype="float32", kv_cache_memory_bytes=64 << 20) as llm:
        before = read_values(llm)
        llm.generate([[token] * 128 for token in range(3, 3 + num_tokens // 128)], PLAIN, use_tqdm=False)
        awake = read_memory()
        llm.sleep(level=1)
        assert awake - read_memory() > 0.8 * cache
        llm.wake_up()
        assert_close(read_values(llm), before)
        llm.sleep(level=2)
        asleep = read_memory()
        assert awake - asleep > 0.9 * weights
        llm.wake_up(tags=["weights"])
        assert read_memory() - asleep > 0.9 * weights
        reference = load_tiny_reference(folder)
        hand_over(llm, reference.named_parameters())
        llm.wake_up(tags=["kv_cache"])
        assert_close(read_values(llm), before)
