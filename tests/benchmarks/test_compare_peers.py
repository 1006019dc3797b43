"""The comparison with peers: what figures and shares mean, and engines that sleep, answer and fail."""

import json
import pathlib
import struct
import sys
import time

import pytest

from benchmarks.compare_peers import Slice, compare, make_warm_up
from benchmarks.peers.engine_process import EngineFailed, EngineProcess, EngineSpec
from benchmarks.peers.worker import make_prompts
from benchmarks.peers.workloads import WORKLOADS, ModelCosts

WORKLOAD = {workload.name: workload for workload in WORKLOADS}
# SmolLM2-135M: 106.2 M weights in the layers, 28.3 M in the head, which is the embedding too
COSTS = ModelCosts(106_200_000 + 28_311_552, 28_311_552, 30, 576, gguf_bytes=90_000_000)


def test_the_decode_share_is_the_weights_read_a_second_over_the_memory_probe() -> None:
    figure = WORKLOAD["stream"].compute_figure({"seconds": 63 / 30})
    assert figure == pytest.approx(30)
    probe = {"gb_per_s": 20.0, "gflop_per_s": 100.0}
    assert COSTS.compute_share(WORKLOAD["stream"], figure, "float32", probe) == pytest.approx(30 * 0.538 / 20, rel=1e-3)
    assert COSTS.compute_share(WORKLOAD["stream"], figure, "bfloat16", probe) == pytest.approx(
        15 * 0.538 / 20, rel=1e-3
    )
    assert COSTS.compute_share(WORKLOAD["stream"], figure, "gguf", probe) == pytest.approx(30 * 0.09 / 20)


def test_the_prefill_share_counts_layers_attention_and_scored_rows() -> None:
    probe = {"gb_per_s": 20.0, "gflop_per_s": 158.0}
    attention = 4 * 30 * 576 * 1025 / 2
    plain = 2 * 106.2e6 + attention + 2 * 28_311_552 / 1024
    scored = 2 * 106.2e6 + attention + 2 * 28_311_552
    share = COSTS.compute_share(WORKLOAD["prefill"], 600, "float32", probe)
    assert share == pytest.approx(600 * plain / 158e9)
    assert COSTS.compute_share(WORKLOAD["prefill-logprobs"], 600, "float32", probe) == pytest.approx(
        600 * scored / 158e9
    )
    assert COSTS.compute_share(WORKLOAD["batch"], 600, "float32", probe) is None


def test_weights_are_counted_from_the_headers_and_the_head_once(tmp_path: pathlib.Path) -> None:
    config = {"vocab_size": 10, "hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": [10, 4], "lm_head.weight": [10, 4], "model.norm.weight": [4], "a": [3, 5]}
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()} | {"__metadata__": {}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    costs = ModelCosts.read(tmp_path, None)
    assert (costs.num_weights, costs.head_weights, costs.attention_width) == (40 + 4 + 15, 40, 4)


def test_ratios_are_those_of_a_rounds_own_pairs() -> None:
    def make(*figures: float | None) -> list[Slice | None]:
        return [None if figure is None else Slice(figure, {}) for figure in figures]

    assert compare(make(2.0), make(4.0)) == "0.50"
    # The machine halves its speed between the rounds; the pairs don't see it.
    assert compare(make(8.0, 4.0, 2.0), make(4.0, 2.0, 1.0)) == "2.00 (2.00 – 2.00)"
    assert compare(make(8.0, None), make(4.0, 1.0)) == "2.00"
    assert compare(make(None), make(4.0)) == "–"


def test_engines_get_the_same_prompts_in_a_round_and_others_in_the_next() -> None:
    workload = WORKLOAD["batch"]
    first, again, other = (make_prompts(workload.make_command(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert [len(ids) for ids in first] == [128] * 32
    assert make_warm_up(workload).num_prompts == 2


def test_an_engine_that_ends_is_reported_with_its_last_words(tmp_path: pathlib.Path) -> None:
    with pytest.raises(EngineFailed, match=r"broken one ended: .*KeyError: 'no such engine'"):
        EngineProcess(EngineSpec("broken one", sys.executable, "no such engine", "", "float32"), tmp_path)


def test_an_engine_sleeps_except_while_it_is_asked(tmp_path: pathlib.Path) -> None:
    probe = EngineProcess(EngineSpec("probe", sys.executable, "probe", "", "float32"), tmp_path)
    status = pathlib.Path(f"/proc/{probe.pid}/stat")

    def wait_for_sleep() -> bool:  # a signal takes a moment
        return any(time.sleep(0.01) or status.read_text().rsplit(")", 1)[1].split()[0] == "T" for _ in range(500))

    try:
        assert wait_for_sleep(), "stopped after start-up"
        rates = probe.run({"do": "run"})
        assert rates is not None and rates["gb_per_s"] > 0 < rates["gflop_per_s"]
        assert wait_for_sleep(), "stopped after its answer"
    finally:
        probe.close()
    assert not status.exists()
