"""The sampler's pipeline, driven from the persistent batch on hand-made logits."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.sample.reference import falling_order, filtered_probabilities, log_softmax, penalise, ranks_of
from tests.v1.worker.steps import make_request
from vllm.v1.messages import NewRequest
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import sampler as sampler_module
from vllm.v1.sample.ops.logprobs import RowKind
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.sampled_rows import order_sampled_rows
from vllm.v1.worker.sampling_inputs import make_sampling_metadata

VOCAB = 200
CPU = torch.device("cpu")


def make_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(num_rows)) * 3


def make_batch(requests: list[NewRequest]) -> InputBatch:
    batch = InputBatch(max_num_reqs=16, max_model_len=32, block_size=4, vocab_size=VOCAB)
    for request in requests:
        batch.add(request)
    return batch


def run_sampler(requests: list[NewRequest], logits: torch.Tensor) -> SamplerOutput:
    """Sample row i of `logits` as request i asks; the caller's logits are not changed."""
    batch = make_batch(requests)
    return Sampler()(logits.clone(), make_sampling_metadata(batch, np.arange(len(requests)), CPU))


def get_row(output: SamplerOutput, i: int) -> tuple[list[int], np.ndarray, list[int]]:
    assert output.scores is not None and output.scores.rectangle is not None
    rectangle = output.scores.rectangle
    end = int((rectangle.token_ids[i] >= 0).sum())
    return rectangle.token_ids[i, :end].tolist(), rectangle.values[i, :end].numpy(), rectangle.ranks[i, :end].tolist()


def ask(i: int, **params: Any) -> NewRequest:
    return make_request(f"r{i}", [i, i + 1, i + 2], **params)


def test_greedy_is_the_argmax_and_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [150, 20]] = 4.0
    logits[1, 199] = 1.0
    assert run_sampler([ask(0), ask(1)], logits).token_ids.tolist() == [20, 199]


def test_plain_greedy_rows_read_the_logits_in_place_and_score_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(3)
    before = logits.clone()
    monkeypatch.setattr(sampler_module, "score", None)  # a call would fail
    batch = make_batch([ask(0), ask(1), ask(2)])
    metadata = make_sampling_metadata(batch, np.arange(3), CPU)
    output = Sampler()(logits, metadata)
    assert output.scores is None and metadata.kept_rows is None
    assert torch.equal(logits, before)


def test_top_k_1_and_temperature_0_and_argmax_agree_on_ties() -> None:
    logits = make_logits(40)
    logits = (logits * 2).round() / 2
    logits[:, 60:] = logits.max()  # a tie for the first place in every row
    greedy = run_sampler([ask(i) for i in range(10)], logits[:10]).token_ids
    top_1 = run_sampler([ask(i, temperature=1.7, top_k=1, seeds=[i]) for i in range(10)], logits[:10]).token_ids
    assert greedy.tolist() == top_1.tolist() == logits[:10].argmax(dim=1).tolist()


def test_rows_of_a_mixed_batch_sample_as_if_alone() -> None:
    requests = [
        ask(0),
        ask(1, temperature=0.8, seeds=[1]),
        ask(2, temperature=1.0, top_k=3, seeds=[2]),
        ask(3, temperature=1.2, top_p=0.5, seeds=[3], logprobs=2),
        ask(4, allowed_token_ids=[5, 6, 7]),
        ask(5, temperature=1.0, min_p=0.2, seeds=[2**64 - 1], repetition_penalty=1.5),
        ask(6, logit_bias={9: 100.0}, logprob_token_ids=[9, 1]),
        ask(7, presence_penalty=1.0, logprobs=VOCAB),
    ]
    logits = make_logits(len(requests))
    together = run_sampler(requests, logits)
    alone = [run_sampler([request], logits[[i]]) for i, request in enumerate(requests)]
    assert together.token_ids.tolist() == [output.token_ids.item() for output in alone]
    for row, i in enumerate((3, 6)):
        ids, values, ranks = get_row(together, row)
        alone_ids, alone_values, alone_ranks = get_row(alone[i], 0)
        assert (ids, values.tolist(), ranks) == (alone_ids, alone_values.tolist(), alone_ranks)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_scores_are_of_the_models_logits_or_of_what_was_sampled_from(mode: str) -> None:
    settings = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "seeds": [7], "repetition_penalty": 1.2}
    logits = make_logits(1)
    output = run_sampler([ask(0, logprobs=6, logprobs_mode=mode, **settings)], logits)
    ids, values, ranks = get_row(output, 0)
    raw = logits[0].numpy()
    penalised = penalise(raw, [0, 1, 2], [], repetition=1.2).astype(np.float32)
    if mode.startswith("raw"):
        expected = log_softmax(raw) if mode == "raw_logprobs" else raw
    else:
        probabilities = filtered_probabilities(penalised, 0.5, top_k=4, top_p=0.9)
        with np.errstate(divide="ignore"):
            expected = np.log(probabilities)
        if mode == "processed_logits":
            expected = np.where(probabilities > 0, penalised / np.float32(0.5), -np.inf)
    assert ids[0] == output.token_ids.item()
    np.testing.assert_allclose(values, expected[ids], rtol=1e-5, atol=1e-5)
    assert ranks == ranks_of(expected.astype(np.float32))[ids].tolist()
    assert ids[1:] == [i for i in falling_order(expected.astype(np.float32))[:6] if i != ids[0]]


def test_processed_scores_of_a_greedy_row_have_penalties_and_masks_but_no_filters() -> None:
    logits = make_logits(1)
    output = run_sampler(
        [ask(0, logprobs=3, logprobs_mode="processed_logprobs", logit_bias={8: 20.0}, top_k=1, top_p=0.1)], logits
    )
    ids, values, _ = get_row(output, 0)
    biased = logits[0].numpy().copy()
    biased[8] += 20
    assert ids[0] == 8 and len(ids) == 3
    np.testing.assert_allclose(values, log_softmax(biased)[ids], atol=1e-5)


def test_raw_logits_are_set_aside_only_for_rows_that_are_changed_and_want_them() -> None:
    requests = [
        ask(0, logprobs=1),
        ask(1, logprobs=1, temperature=1.0, seeds=[1]),
        ask(2, logprobs=1, temperature=0.7, seeds=[1]),
        ask(3, temperature=0.7, seeds=[1]),
        ask(4, logprobs=1, temperature=0.7, seeds=[1], logprobs_mode="processed_logprobs"),
        ask(5, logprobs=1, repetition_penalty=1.1),
    ]
    metadata = make_sampling_metadata(make_batch(requests), np.arange(6), CPU)
    assert metadata.kept_rows is not None and metadata.kept_rows.tolist() == [2, 5]
    output = run_sampler(requests, logits := make_logits(6))
    for row, i in enumerate((0, 1, 2)):
        ids, values, _ = get_row(output, row)
        np.testing.assert_allclose(values, log_softmax(logits[i].numpy())[ids], atol=1e-5)
    ids, values, _ = get_row(output, 4)
    np.testing.assert_allclose(values, log_softmax(logits[5].numpy())[ids], atol=1e-5)


def test_rows_are_ordered_so_that_equal_kinds_share_one_span() -> None:
    kinds: list[dict[str, Any]] = [{"logprobs": 3}, {}, {"logprob_token_ids": [1]}]
    requests = [ask(i, **kinds[i % 3]) for i in range(12)]
    batch = make_batch(requests)
    rows = np.arange(12)
    order = order_sampled_rows(batch, rows)
    assert sorted(order.tolist()) == rows.tolist()
    metadata = make_sampling_metadata(batch, rows[order], CPU)
    assert len(metadata.spans) == 1 and metadata.score_table is not None
    assert len(metadata.score_table.take_rows(slice(metadata.spans[0].first, metadata.spans[0].end)).find_runs()) == 2


class TestSeveralDrawsFromOneRow:
    SEEDS = [3, 4, 5, 2**64 - 1, 3]

    @pytest.mark.parametrize("asked", [{"logprobs": 2}, {"logprob_token_ids": [7, 9]}], ids=str)
    def test_each_draw_is_that_of_a_single_request_with_its_seed(self, asked: dict[str, Any]) -> None:
        family = ask(0, temperature=1.3, seeds=self.SEEDS, **asked)
        logits = make_logits(3)
        output = run_sampler([ask(5, logprobs=1), family, ask(6)], logits)
        assert len(output.token_ids) == 7
        for draw, seed in enumerate(self.SEEDS):
            single = run_sampler([ask(0, temperature=1.3, seeds=[seed], **asked)], logits[[1]])
            assert output.token_ids[1 + draw] == single.token_ids[0]
            ids, values, ranks = get_row(output, 1 + draw)
            single_ids, single_values, single_ranks = get_row(single, 0)
            assert (ids, values.tolist(), ranks) == (single_ids, single_values.tolist(), single_ranks)

    @pytest.mark.parametrize("num_top", [150, VOCAB])
    def test_wide_rows_come_once_a_draw(self, num_top: int) -> None:
        output = run_sampler([ask(0, temperature=1.3, seeds=self.SEEDS, logprobs=num_top)], make_logits(1))
        assert output.scores is not None and output.scores.rectangle is None
        (block,) = output.scores.wide
        assert block.chosen_token_ids.tolist() == output.token_ids.tolist()
        assert len(block.values) == len(block.ranks) == len(self.SEEDS)
        if block.token_ids is not None:
            assert block.token_ids[:, 0].tolist() == output.token_ids.tolist()

    def test_greedy_draws_are_one_token(self) -> None:
        logits = make_logits(2)
        output = run_sampler([ask(0, seeds=[1, 2, 3], logprobs=0), ask(1)], logits)
        best = logits.argmax(dim=1).tolist()
        assert output.token_ids.tolist() == [best[0]] * 3 + [best[1]]
        assert output.scores is not None and output.scores.rectangle is not None
        assert output.scores.rectangle.num_rows == 3

    def test_many_draws_repeat_no_row_of_logits(self) -> None:
        """16,384 repeated rows of a real vocabulary would be 3.2 GB; here the kernels see one row."""
        seeds = list(range(2000))
        output = run_sampler([ask(0, temperature=1.0, seeds=seeds, logprobs=1)], make_logits(1))
        assert len(output.token_ids) == 2000
        assert output.scores is not None and output.scores.rectangle is not None
        assert output.scores.rectangle.num_rows == 2000
        assert output.scores.rectangle.token_ids[:, 0].tolist() == output.token_ids.tolist()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seeds": [1]},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seeds": [1], "logprobs": 3},
        {"repetition_penalty": 1.2, "logprobs": VOCAB},
    ],
    ids=str,
)
def test_a_poisoned_row_is_flagged_and_its_mates_do_not_notice(params: dict[str, Any], poison: float) -> None:
    requests = [ask(0, logprobs=2), ask(1, **params), ask(2, temperature=0.9, top_p=0.8, seeds=[4])]
    logits = make_logits(3)
    healthy = run_sampler(requests, logits)
    logits[1, 17] = poison
    output = run_sampler(requests, logits)
    assert output.is_finite.tolist() == [True, False, True]
    assert output.token_ids[[0, 2]].tolist() == healthy.token_ids[[0, 2]].tolist()
    assert get_row(output, 0)[0] == get_row(healthy, 0)[0]


def test_rules_that_leave_no_token_are_flagged() -> None:
    requests = [
        ask(0, allowed_token_ids=[5], bad_words=[[5]]),
        ask(1, allowed_token_ids=[5], temperature=1.0, seeds=[1]),
    ]
    output = run_sampler(requests, make_logits(2))
    assert output.is_finite.tolist() == [True, True]
    assert output.has_candidates is not None and output.has_candidates.tolist() == [False, True]
    assert output.token_ids[1] == 5


def test_given_ids_of_different_lengths_do_not_leak_padding() -> None:
    requests = [ask(0, logprob_token_ids=[1]), ask(1, logprob_token_ids=[4, 3, 2], logprobs=3)]
    output = run_sampler(requests, make_logits(2))
    assert get_row(output, 0)[0] == [output.token_ids[0].item(), 1]
    assert get_row(output, 1)[0] == [output.token_ids[1].item(), 4, 3, 2]
    assert RowKind.GIVEN.is_rectangular
