"""A family of n children: one request to its caller, n sequences in the core."""

import pytest

from tests.v1.engine.steps import Bench, Move, params, token
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import Tokenizer
from vllm.v1.messages import FinishReason

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
A, B, C = (token(char) for char in "abc")


@pytest.fixture(params=[False, True], ids=["outputs", "table"])
def bench(request: pytest.FixtureRequest, tiny_config: VllmConfig, tiny_tokenizer: Tokenizer) -> Bench:
    return Bench(tiny_config, tiny_tokenizer, uses_table=request.param)


def test_final_only_is_one_output_ordered_by_index(bench: Bench) -> None:
    children = bench.add(params(FINAL_ONLY, n=3))
    assert bench.step(Move(children[2], [C], STOP)).request_outputs == []
    assert bench.step(Move(children[0], [A], LENGTH)).request_outputs == []
    (out,) = bench.step(Move(children[1], [B], LENGTH)).request_outputs
    assert out.finished
    assert [(c.index, c.text) for c in out.outputs] == [(0, "a"), (1, "b"), (2, "")]  # a stop token's text is hidden


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_only_the_children_that_advanced_are_told_and_none_after_its_end(bench: Bench, kind: RequestOutputKind) -> None:
    children = bench.add(params(kind, n=3))
    (out,) = bench.step(Move(children[0], [A]), Move(children[2], [C])).request_outputs
    assert [c.index for c in out.outputs] == [0, 2] and not out.finished
    (out,) = bench.step(Move(children[0], [A], LENGTH), Move(children[1], [B], LENGTH)).request_outputs
    assert [c.index for c in out.outputs] == [0, 1] and not out.finished
    (out,) = bench.step(Move(children[2], [C], LENGTH)).request_outputs
    assert [c.index for c in out.outputs] == [2] and out.finished


def test_prompt_logprobs_belong_to_the_family(bench: Bench) -> None:
    children = bench.add(params(DELTA, n=2, prompt_logprobs=0), prompt="abc")
    (first,) = bench.step(Move(children[1], [A], num_cached_tokens=2), prompt_rows=[B, C]).request_outputs
    (second,) = bench.step(Move(children[0], [A], LENGTH)).request_outputs
    assert len(first.prompt_logprobs) == 3
    assert second.prompt_logprobs == []  # the family's first output had them, whichever child it told of
    assert (first.num_cached_tokens, second.num_cached_tokens) == (2, 2)


def test_greedy_children_are_one_sequence_answered_n_times(bench: Bench) -> None:
    for kind in RequestOutputKind:
        (child,) = bench.add(params(kind, n=3, temperature=0))
        outs = [*bench.step(Move(child, [A])).request_outputs, *bench.step(Move(child, [B], LENGTH)).request_outputs]
        assert all([c.index for c in out.outputs] == [0, 1, 2] for out in outs)
        last = outs[-1]
        assert last.finished and all(c.finish_reason == "length" for c in last.outputs)
        assert len({c.text for c in last.outputs}) == 1
        assert len({id(c.token_ids) for c in last.outputs}) == 3, "one reader's list is another's"


def test_each_child_keeps_its_own_stop_string_and_the_family_goes_on(bench: Bench) -> None:
    children = bench.add(params(FINAL_ONLY, n=2, stop=["b"]))
    step = bench.step(Move(children[0], [B]), Move(children[1], [A]))
    assert (step.ids_to_abort, step.request_outputs) == ([children[0]], [])
    (out,) = bench.step(Move(children[1], [C], LENGTH)).request_outputs
    assert [(c.finish_reason, c.text) for c in out.outputs] == [("stop", ""), ("length", "ac")]
