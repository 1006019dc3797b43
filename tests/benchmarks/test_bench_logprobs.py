"""The measuring of logprobs: what is timed, and that it is put back."""

import contextlib
from collections import Counter
from typing import Any

from benchmarks.bench_logprobs import PAIR_COLUMNS, STAGES, Slice, measure_pairs, timing
from vllm.v1.core.sched.scheduler import Scheduler


def test_every_stage_is_there_and_is_put_back() -> None:
    """A stage is named by its function: one that is renamed must not drop out of the table in silence."""
    before = {name: vars(owner)[method] for name, (owner, method) in STAGES.items()}
    spent: Counter[str] = Counter()
    with timing(spent):
        assert all(vars(owner)[method] is not before[name] for name, (owner, method) in STAGES.items())
        with contextlib.suppress(TypeError):
            Scheduler.update_from_output(None)  # type: ignore[call-arg, arg-type]
    assert spent["packing"] > 0, "what raises was running too"
    assert {name: vars(owner)[method] for name, (owner, method) in STAGES.items()} == before


def test_a_pair_alternates_its_order_and_compares_speed() -> None:
    asked: list[bool] = []

    def run(options: dict[str, Any]) -> Slice:
        asked.append(bool(options))
        return Slice(wall=2.0 if options else 1.0, cpu=3.0 if options else 1.5, num_tokens=1_000_000)

    (row,) = measure_pairs(run, {"k": {"logprobs": 5}}, 4)
    assert asked == [True, False, False, True] * 2
    assert dict(zip(PAIR_COLUMNS, row, strict=True)) == {
        "against without": "k", "speed: lower quartile": 0.5, "median": 0.5, "upper quartile": 0.5,
        "CPU µs/token without": 1.5, "with": 3.0, "ratio": 2.0, "s a slice": 2.0, "pairs": 4,
    }  # fmt: skip
