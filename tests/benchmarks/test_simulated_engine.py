"""What a token leaves behind in memory is counted, not timed: the front end's budget of objects.

A streaming server makes millions of tokens an hour; each object that the garbage collector tracks is visited again and
again, by a collector that stops everything else.
"""

import pytest

from benchmarks.simulated_engine import SimulatedEngine, Workload
from tests.tiny_tokenizers import write_tiny_tokenizer
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import load_tokenizer

DELTA, FINAL_ONLY, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SimulatedEngine:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return SimulatedEngine(load_tokenizer(folder))


@pytest.mark.parametrize("num_top", [None, 0, 5])
def test_a_token_of_a_final_answer_leaves_less_than_an_object(engine: SimulatedEngine, num_top: int | None) -> None:
    cost, outputs = engine.run(Workload(16, FINAL_ONLY, num_top, max_tokens=32))
    assert len(outputs) == 16
    assert cost.objects < 0.5, "the answers themselves are a handful of objects each"


@pytest.mark.parametrize(("num_top", "most"), [(None, 5.0), (0, 6.0), (5, 6.0)])
def test_a_token_of_a_stream_leaves_no_more_than_six_objects(
    engine: SimulatedEngine, num_top: int | None, most: float
) -> None:
    cost, outputs = engine.run(Workload(16, DELTA, num_top, max_tokens=32))
    assert len(outputs) == 16 * 32
    assert cost.objects <= most


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY, CUMULATIVE])
def test_the_simulated_engine_answers_what_was_asked(engine: SimulatedEngine, kind: RequestOutputKind) -> None:
    _, outputs = engine.run(Workload(3, kind, 5, max_tokens=7))
    joined: dict[str, list[int]] = {}
    for output in outputs:
        (completion,) = output.outputs
        assert len(completion.logprobs) == len(completion.token_ids)
        joined.setdefault(output.request_id, []).extend(completion.token_ids)
    last = [output for output in outputs if output.finished]
    assert len(last) == 3 and {output.outputs[0].finish_reason for output in last} == {"length"}
    assert {len(ids) for ids in joined.values()} == {sum(range(8)) if kind is CUMULATIVE else 7}


def test_a_core_of_its_own_process_says_the_same(engine: SimulatedEngine) -> None:
    over_wire = SimulatedEngine(engine.tokenizer, has_wire=True)
    workload = Workload(3, FINAL_ONLY, 5, max_tokens=7)
    (_, here), (cost, there) = engine.run(workload), over_wire.run(workload)
    assert cost.wire > 0
    for output, other in zip(here, there, strict=True):
        mine, others = output.outputs[0], other.outputs[0]
        assert (mine.text, mine.token_ids, mine.cumulative_logprob) == (
            others.text, others.token_ids, others.cumulative_logprob,
        )  # fmt: skip
        assert mine.logprobs == others.logprobs
