"""The executor and its worker: start-up, weights handed over, sleep."""

import pathlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.v1.worker.conftest import BLOCK_SIZE, Reference, make_config
from tests.v1.worker.steps import get_tokens, make_request, make_step
from vllm.exceptions import VLLMValidationError
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.memory import run_largest_step

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Workers set the process's threads; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def executor(tiny_folder: pathlib.Path) -> Iterator[UniProcExecutor]:
    made = UniProcExecutor(make_config(tiny_folder, max_model_len=32))
    made.start()
    yield made
    made.shutdown()


def run_greedy(executor: UniProcExecutor) -> int:
    step = make_step([make_request("a", PROMPT, block_ids=[0, 1])], left=["a"])
    return get_tokens(executor.execute_model(step))["a"][0]


KV_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 8 * 4  # keys and values, layers, tokens, heads, numbers, float32
BYTES_PER_BLOCK = KV_BYTES + BLOCK_SIZE * (48 * 4 + 21 * 12 + 4)  # hidden states, scores in two forms, ranks


def test_start_says_what_was_settled(tiny_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    executor = UniProcExecutor(make_config(tiny_folder, kv_cache_memory_bytes=40_000))
    ready = executor.start()
    assert ready.num_gpu_blocks == 40_000 // BYTES_PER_BLOCK == 14
    assert (ready.max_model_len, ready.dtype, ready.device, ready.num_threads) == (56, "float32", "cpu", 1)
    assert torch.get_num_threads() == 1
    assert ready.weights_bytes == executor.driver_worker.model_runner.model.weights_bytes() > 0
    executor.shutdown()
    executor.shutdown()


def test_the_default_pool_holds_what_the_sequences_can_use(tiny_folder: pathlib.Path) -> None:
    ready = UniProcExecutor(make_config(tiny_folder, kv_cache_memory_bytes=None, max_num_seqs=3)).start()
    assert ready.num_gpu_blocks == 3 * 64 // BLOCK_SIZE


def test_a_small_pool_lowers_the_model_length_unless_it_was_given(tiny_folder: pathlib.Path) -> None:
    five_blocks = 5 * BYTES_PER_BLOCK
    ready = UniProcExecutor(make_config(tiny_folder, kv_cache_memory_bytes=five_blocks)).start()
    assert (ready.num_gpu_blocks, ready.max_model_len) == (5, 20)
    with pytest.raises(VLLMValidationError, match="max_model_len must be at most 20"):
        UniProcExecutor(
            make_config(tiny_folder, kv_cache_memory_bytes=five_blocks, max_model_len_is_given=True)
        ).start()


def test_a_pool_that_keeps_no_scores_holds_more_blocks(tiny_folder: pathlib.Path) -> None:
    for option in ("enable_prompt_logprobs_cache", "enable_prefix_caching"):
        executor = UniProcExecutor(make_config(tiny_folder, kv_cache_memory_bytes=40_000, **{option: False}))
        assert executor.start().num_gpu_blocks == 40_000 // KV_BYTES == 39
        assert executor.driver_worker.model_runner.kv_cache.prompt_logprobs is None


def test_a_pool_that_cannot_be_allocated_is_a_clear_error(tiny_folder: pathlib.Path) -> None:
    with pytest.raises(VLLMValidationError, match="can't be allocated"):
        UniProcExecutor(make_config(tiny_folder, kv_cache_memory_bytes=1 << 60)).start()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_a_clear_error(tiny_folder: pathlib.Path) -> None:
    with pytest.raises(VLLMValidationError, match="no CUDA GPU"):
        UniProcExecutor(make_config(tiny_folder, device="cuda")).start()


def test_the_kv_cache_of_a_large_pool_touches_no_pages(tiny_folder: pathlib.Path) -> None:
    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    executor = UniProcExecutor(make_config(tiny_folder, kv_cache_memory_bytes=1 << 30, max_num_seqs=256))
    executor.start()
    assert resident() - before < 256 << 20
    executor.shutdown()


def test_weights_handed_over_change_the_next_step_and_are_told(executor: UniProcExecutor, reference: Reference) -> None:
    told: list[bool] = []
    executor.on_weights_changed.append(lambda: told.append(True))
    assert run_greedy(executor) == reference(PROMPT)[-1].argmax()
    model = executor.driver_worker.model_runner.model
    names = model.expected_weight_names()
    name = "model.embed_tokens.weight" if "lm_head.weight" not in names else "lm_head.weight"
    weight = torch.zeros(320, 48)
    model.load_weights([(name, weight)])
    assert told == [True]
    assert run_greedy(executor) == 0, "all logits are zero: the lowest id"


def test_rpc_calls_the_worker_by_name_or_a_function_with_it(executor: UniProcExecutor) -> None:
    assert executor.collective_rpc(lambda worker, a, b: (type(worker), a + b), args=(1,), kwargs={"b": 2}) == [
        (Worker, 3)
    ]
    assert executor.collective_rpc("sleep", args=(1,)) == [None]
    assert executor.is_sleeping


def test_the_step_that_measures_a_gpus_memory_runs_and_leaves_nothing(tiny_folder: pathlib.Path) -> None:
    executor = UniProcExecutor(make_config(tiny_folder, max_num_batched_tokens=150))
    executor.start()
    before = run_greedy(executor)
    run_largest_step(executor.driver_worker.model_runner)
    assert run_greedy(executor) == before
    assert executor.driver_worker.model_runner.batch.num_reqs == 1


class TestSleep:
    @pytest.mark.parametrize("level", [1, 2])
    def test_steps_after_waking_equal_those_before(self, executor: UniProcExecutor, level: int) -> None:
        before = run_greedy(executor)
        executor.collective_rpc("sleep", args=(level,))
        assert executor.is_sleeping
        with pytest.raises(RuntimeError, match="wake_up"):
            run_greedy(executor)
        executor.collective_rpc("wake_up")
        assert not executor.is_sleeping and run_greedy(executor) == before

    def test_a_trainer_wakes_the_weights_hands_them_over_and_wakes_the_cache(self, executor: UniProcExecutor) -> None:
        before = run_greedy(executor)
        model = executor.driver_worker.model_runner.model
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        embedding = weights["model.embed_tokens.weight"]
        executor.collective_rpc("sleep", args=(2,))
        assert executor.driver_worker.model_runner.kv_cache.layers == []
        executor.collective_rpc("wake_up", args=(["weights"],))
        assert executor.is_sleeping
        executor.driver_worker.model_runner.model.load_weights([("model.embed_tokens.weight", embedding)])
        executor.collective_rpc("wake_up", args=(["kv_cache"],))
        assert run_greedy(executor) == before

    def test_the_weights_of_level_2_are_given_back(self, executor: UniProcExecutor) -> None:
        model = weakref.ref(executor.driver_worker.model_runner.model)
        executor.collective_rpc("sleep", args=(1,))
        assert model() is not None
        executor.collective_rpc("wake_up")
        executor.collective_rpc("sleep", args=(2,))
        assert model() is None

    def test_the_listeners_stay_with_a_model_that_was_read_again(self, executor: UniProcExecutor) -> None:
        told: list[bool] = []
        executor.on_weights_changed.append(lambda: told.append(True))
        executor.collective_rpc("sleep", args=(2,))
        executor.collective_rpc("wake_up")
        told.clear()
        executor.driver_worker.model_runner.model.load_weights([])
        assert told == [True]

    @pytest.mark.parametrize("wrong", [{"level": 3}, {"level": 0}])
    def test_other_levels_are_refused(self, executor: UniProcExecutor, wrong: dict[str, Any]) -> None:
        with pytest.raises(VLLMValidationError, match="1 or 2"):
            executor.collective_rpc("sleep", kwargs=wrong)

    def test_other_tags_are_refused(self, executor: UniProcExecutor) -> None:
        executor.collective_rpc("sleep")
        with pytest.raises(VLLMValidationError, match="weights, kv_cache"):
            executor.collective_rpc("wake_up", args=(["wieghts"],))
