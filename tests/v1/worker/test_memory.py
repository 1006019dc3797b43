"""How much the KV cache gets, and what then fits."""

import pathlib
from typing import Any

import pytest

from tests.v1.worker.conftest import BLOCK_SIZE, make_config
from vllm import platforms
from vllm.config import CacheConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.memory import GIB, Memory, choose_kv_bytes, get_usable_blocks, size_kv_cache

MEMORY = Memory(total=100 * GIB, available=8 * GIB, taken=10 * GIB)


def choose(memory: Memory = MEMORY, usable: int = 1000 * GIB, is_cpu: bool = True, **settings: Any) -> float:
    return choose_kv_bytes(CacheConfig(**settings), memory, is_cpu=is_cpu, usable_bytes=usable) / GIB


def test_kv_cache_memory_bytes_wins_over_everything() -> None:
    both = {"cpu_kv_cache_space_gib": 2.0, "gpu_memory_utilization": 0.5}
    assert choose(kv_cache_memory_bytes=3 * GIB, **both) == 3
    assert choose(kv_cache_memory_bytes=3 * GIB, is_cpu=False, **both) == 3


def test_the_default_on_a_cpu_is_the_least_of_three() -> None:
    assert choose() == 2, "a quarter of what is available"
    assert choose(MEMORY._replace(available=90 * GIB)) == 4
    assert choose(usable=GIB) == 1


def test_the_environment_and_utilization_count_on_a_cpu_only_when_given() -> None:
    assert choose(cpu_kv_cache_space_gib=0.5, gpu_memory_utilization=0.9) == 0.5
    assert choose(gpu_memory_utilization=0.15) == pytest.approx(5)
    assert choose(gpu_memory_utilization=0.9) == 8, "no more than is available"
    assert choose(gpu_memory_utilization=0.9, usable=GIB) == 1
    assert choose(gpu_memory_utilization=0.05) == 0


def test_a_gpu_takes_its_share_less_what_is_taken() -> None:
    assert choose(is_cpu=False) == pytest.approx(82)
    assert choose(is_cpu=False, gpu_memory_utilization=0.3, cpu_kv_cache_space_gib=1.0) == pytest.approx(20)


def test_this_process_takes_some_of_the_memory_that_it_may_have() -> None:
    assert 0 < platforms.get_resident_memory() < platforms.get_total_memory()
    assert 0 < platforms.get_available_memory() <= platforms.get_total_memory()


class TestPlan:
    @pytest.mark.parametrize("kv_bytes", [0, 999])
    def test_no_room_for_a_block_is_an_error_that_says_what_to_do(
        self, tiny_folder: pathlib.Path, kv_bytes: int
    ) -> None:
        with pytest.raises(VLLMValidationError, match="VLLM_CPU_KVCACHE_SPACE") as error:
            size_kv_cache(make_config(tiny_folder), kv_bytes, 1000)
        assert error.value.parameter == "kv_cache_memory_bytes"

    def test_the_model_length_is_lowered_to_what_fits(self, tiny_folder: pathlib.Path) -> None:
        assert size_kv_cache(make_config(tiny_folder), 5500, 1000) == (5, 5 * BLOCK_SIZE)
        assert size_kv_cache(make_config(tiny_folder), 100_000, 1000) == (100, 64)

    def test_a_model_length_that_the_user_gave_is_not_lowered(self, tiny_folder: pathlib.Path) -> None:
        config = make_config(tiny_folder, max_model_len_is_given=True)
        with pytest.raises(VLLMValidationError, match="at most 20") as error:
            size_kv_cache(config, 5500, 1000)
        assert (error.value.parameter, error.value.value) == ("max_model_len", 64)
        assert size_kv_cache(config, 16_000, 1000) == (16, 64)

    def test_an_override_of_the_number_of_blocks_counts(self, tiny_folder: pathlib.Path) -> None:
        assert size_kv_cache(make_config(tiny_folder, num_gpu_blocks_override=7), 10**9, 1000).num_blocks == 7

    def test_usable_blocks_round_each_sequence_up(self, tiny_folder: pathlib.Path) -> None:
        assert get_usable_blocks(make_config(tiny_folder, max_model_len=63, max_num_seqs=3)) == 3 * 16
