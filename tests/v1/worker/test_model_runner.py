"""The runner on hand-made steps, against transformers."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.sample.reference import falling_order, log_softmax, ranks_of
from tests.v1.worker.conftest import VOCAB, Reference
from tests.v1.worker.steps import get_sample_rows, get_tokens, make_request, make_step
from vllm.logprobs.rows import Row, read_arrays, read_entries
from vllm.v1.messages import ModelRunnerOutput, RowRange
from vllm.v1.outputs import Scores, WideRows
from vllm.v1.sample.ops.logprobs import RowKind
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.scored_rows import OwnedRows
from vllm.v1.worker.step_results import StepResults, pack, unpack

PROMPT = [5, 9, 200, 31, 7, 7, 120, 300, 2, 64, 11]
OTHER = [17, 250, 3, 3, 90, 41]
TOLERANCE = 1e-4


def read_rows(output: ModelRunnerOutput, rows: RowRange) -> list[tuple[list[int], list[float], list[int]]]:
    assert output.logprobs is not None
    return [tuple(map(list, read_entries(row))) for row in output.logprobs.split()[rows.first : rows.end]]  # type: ignore[misc]


def check_row(row: tuple[list[int], list[float], list[int]], logits: np.ndarray, chosen: int, num_top: int) -> None:
    """A row against the reference's logits; the tiny model's logits lie further apart than rounding."""
    ids, values, ranks = row
    top = [token_id for token_id in falling_order(logits)[:num_top].tolist() if token_id != chosen]
    assert ids == [chosen, *top]
    np.testing.assert_allclose(values, log_softmax(logits)[ids], atol=TOLERANCE)
    assert ranks == ranks_of(logits)[ids].tolist()


def test_greedy_steps_equal_the_reference(runner: GPUModelRunner, reference: Reference) -> None:
    sequence = list(PROMPT)
    output = runner.execute_model(make_step([make_request("a", PROMPT, block_ids=[9, 3, 5], logprobs=2)]))
    for step in range(6):
        logits = reference(sequence)[-1]
        assert get_tokens(output) == {"a": [int(logits.argmax())]}
        check_row(read_rows(output, get_sample_rows(output)["a"])[0], logits, int(logits.argmax()), 2)
        sequence.append(int(logits.argmax()))
        new_blocks = [20 + step] if len(sequence) % 4 == 1 else []
        output = runner.execute_model(make_step(running={"a": (len(sequence) - 1, new_blocks)}))
    assert output.prompt_rows == {} and output.errors == {}


def test_a_batch_of_three_in_mixed_phases_is_as_each_alone(runner: GPUModelRunner, reference: Reference) -> None:
    first = get_tokens(runner.execute_model(make_step([make_request("a", PROMPT, block_ids=[0, 1, 2])])))["a"]
    output = runner.execute_model(
        make_step(
            [make_request("b", OTHER, block_ids=[3, 4], logprobs=1), make_request("c", PROMPT, block_ids=[5, 6, 7])],
            running={"a": (len(PROMPT), [])},
            num_scheduled={"c": 5},
        )
    )
    assert set(get_tokens(output)) == {"a", "b"}, "c has not reached its end"
    assert get_tokens(output)["a"] == [int(reference([*PROMPT, *first])[-1].argmax())]
    logits = reference(OTHER)[-1]
    check_row(read_rows(output, get_sample_rows(output)["b"])[0], logits, get_tokens(output)["b"][0], 1)
    output = runner.execute_model(make_step(running={"c": (5, [])}, num_scheduled={"c": 6}))
    assert get_tokens(output) == {"c": first}


@pytest.mark.parametrize("chunks", [[11], [1, 10], [4, 4, 3], [5, 1, 1, 4]])
@pytest.mark.parametrize("workspace_rows", [256, 3])
def test_prompt_scores_do_not_depend_on_chunks_or_workspace(
    runner: GPUModelRunner, reference: Reference, chunks: list[int], workspace_rows: int
) -> None:
    runner.workspace_rows = workspace_rows
    rows = []
    computed = 0
    for chunk in chunks:
        # Row i − 1 scores token i: the last row of a chunk scores the first token of the next one.
        bounds = (computed + 1, min(computed + chunk + 1, len(PROMPT)))
        ranges = {"a": bounds} if bounds[0] < bounds[1] else {}
        if computed == 0:
            request = make_request("a", PROMPT, block_ids=[0, 1, 2], prompt_logprobs=3)
            step = make_step([request], num_scheduled={"a": chunk}, prompt_ranges=ranges)
        else:
            step = make_step(running={"a": (computed, [])}, num_scheduled={"a": chunk}, prompt_ranges=ranges)
        output = runner.execute_model(step)
        rows += read_rows(output, output.prompt_rows.get("a", RowRange(0, 0)))
        computed += chunk
    logits = reference(PROMPT)
    assert len(rows) == len(PROMPT) - 1
    for i, row in enumerate(rows):
        check_row(row, logits[i], PROMPT[i + 1], 3)
    assert get_tokens(output)["a"] == [int(logits[-1].argmax())]
    assert runner.num_scored_prompt_rows == len(PROMPT) - 1


@pytest.mark.parametrize("num_top", [150, VOCAB])
@pytest.mark.parametrize("workspace_rows", [256, 8])
def test_wide_rows_follow_the_rectangles_and_whole_ones_leave_on_their_own(
    runner: GPUModelRunner, reference: Reference, num_top: int, workspace_rows: int
) -> None:
    runner.workspace_rows = workspace_rows
    wide = make_request("wide", PROMPT, block_ids=[0, 1, 2], prompt_logprobs=num_top, logprobs=num_top)
    small = make_request("small", OTHER, block_ids=[3, 4], prompt_logprobs=1, logprobs=0)
    output = runner.execute_model(
        make_step([wide, small], prompt_ranges={"wide": (1, len(PROMPT)), "small": (1, len(OTHER))})
    )
    assert output.logprobs is not None
    is_whole = num_top == VOCAB
    assert set(get_sample_rows(output)) == set(output.prompt_rows) == ({"small"} if is_whole else {"small", "wide"})
    assert set(output.full_sample_rows) == set(output.full_prompt_rows) == ({"wide"} if is_whole else set())
    num_small = 2 * len(OTHER) - 1
    assert len(output.logprobs.entries) <= num_small if is_whole else output.logprobs.sizes is not None
    for i, row in enumerate(read_rows(output, output.prompt_rows["small"])):
        check_row(row, reference(OTHER)[i], OTHER[i + 1], 1)
    logits = reference(PROMPT)
    chosen = [*PROMPT[1:], get_tokens(output)["wide"][0]]
    pieces = [*output.full_prompt_rows.get("wide", ()), *output.full_sample_rows.get("wide", ())]
    rows: list[Row] = [row for piece in pieces for row in piece.split()]
    if not is_whole:
        everything = output.logprobs.split()
        rows += [everything[i] for i in (*range(*output.prompt_rows["wide"]), *range(*get_sample_rows(output)["wide"]))]
    assert len(rows) == len(PROMPT)
    for i, token_id in enumerate(chosen):
        ids, values, ranks = read_arrays(rows[i])
        top = [other for other in falling_order(logits[i])[:num_top].tolist() if other != token_id]
        assert ids[0] == token_id and len(ids) == 1 + len(top)
        np.testing.assert_allclose(values, log_softmax(logits[i])[ids], atol=TOLERANCE)
        assert set(ids[1:]) == set(top)
        assert ranks[0] == ranks_of(logits[i])[token_id]
        assert (np.diff(ranks[1:]) > 0).all()


def test_more_sampled_rows_than_the_workspace_holds_go_through_in_chunks(runner: GPUModelRunner) -> None:
    asked: list[dict[str, Any]] = [
        {"logprobs": 2},
        {},
        {"logprob_token_ids": [4, 5], "temperature": 0.8, "seeds": [3]},
        {"logprobs": VOCAB},
        {"logprobs": 1, "temperature": 1.0, "seeds": [1, 2, 3]},
        {"logprobs": 0, "logprobs_mode": "raw_logits"},
        {"temperature": 1.5, "top_p": 0.7},
    ]

    def run(workspace_rows: int) -> tuple[dict[str, Any], list[float]]:
        """Return all that is exact, by request, and all values."""
        runner.workspace_rows = workspace_rows
        requests = [
            make_request(f"r{i}", [*OTHER, i], block_ids=[2 * i, 2 * i + 1], **params) for i, params in enumerate(asked)
        ]
        output = runner.execute_model(make_step(requests))
        rows = {name: read_rows(output, rows) for name, rows in get_sample_rows(output).items()}
        rows |= {name: [read_arrays(piece.split()[0])] for name, (piece,) in output.full_sample_rows.items()}  # type: ignore[list-item]
        names = sorted(get_tokens(output))
        exact = {
            name: (get_tokens(output)[name], [(list(r[0]), list(r[2])) for r in rows.get(name, [])]) for name in names
        }
        return exact, [value for name in names for row in rows.get(name, []) for value in row[1]]

    whole, values = run(256)
    assert set(whole) == {f"r{i}" for i in range(7)}
    for workspace_rows in (2, 3):
        exact, other_values = run(workspace_rows)
        assert exact == whole
        np.testing.assert_allclose(other_values, values, atol=TOLERANCE)


def test_prompt_scores_of_several_kinds_side_by_side(runner: GPUModelRunner, reference: Reference) -> None:
    modes: list[dict[str, Any]] = [
        {"prompt_logprobs": 2},
        {"prompt_logprobs": 0, "logprobs_mode": "raw_logits"},
        {"prompt_logprobs": VOCAB, "logprobs_mode": "processed_logits", "repetition_penalty": 2.0},
        {"prompt_logprobs": 5, "logprobs_mode": "processed_logprobs", "temperature": 0.3},
    ]
    requests = [make_request(f"r{i}", OTHER, block_ids=[2 * i, 2 * i + 1], **mode) for i, mode in enumerate(modes)]
    output = runner.execute_model(make_step(requests, prompt_ranges={f"r{i}": (1, len(OTHER)) for i in range(4)}))
    logits = reference(OTHER)
    for i in range(len(OTHER) - 1):
        check_row(read_rows(output, output.prompt_rows["r0"])[i], logits[i], OTHER[i + 1], 2)
        check_row(read_rows(output, output.prompt_rows["r3"])[i], logits[i], OTHER[i + 1], 5)
        ids, values, _ = read_rows(output, output.prompt_rows["r1"])[i]
        assert ids == [OTHER[i + 1]]
        np.testing.assert_allclose(values, logits[i][ids], atol=TOLERANCE)
        (piece,) = output.full_prompt_rows["r2"]
        ids_full, values_full, _ = read_arrays(piece.split()[i])
        np.testing.assert_allclose(values_full, logits[i][ids_full], atol=TOLERANCE)


def test_only_asked_rows_pass_the_head_and_nothing_is_scored_when_nobody_asks(
    runner: GPUModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []
    compute_logits = runner.model.compute_logits

    def count(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        passed.append(len(hidden))
        return compute_logits(hidden, out)

    monkeypatch.setattr(runner.model, "compute_logits", count)
    runner.execute_model(make_step([make_request("a", PROMPT, block_ids=[0, 1, 2])], num_scheduled={"a": 4}))
    assert passed == [], "a prompt that goes on needs no logits"
    output = runner.execute_model(make_step(running={"a": (4, [])}, num_scheduled={"a": 7}))
    assert passed == [1]
    assert output.logprobs is None and get_sample_rows(output) == output.full_sample_rows == {}
    runner.execute_model(
        make_step([make_request("b", OTHER, block_ids=[3, 4], prompt_logprobs=0)], prompt_ranges={"b": (4, 6)})
    )
    assert passed == [1, 1, 2]
    assert (runner.num_scored_sample_rows, runner.num_scored_prompt_rows) == (0, 2)


def test_a_request_that_only_scores_is_not_sampled(runner: GPUModelRunner) -> None:
    request = make_request("a", OTHER, block_ids=[0, 1], max_tokens=0, prompt_logprobs=0)
    output = runner.execute_model(make_step([request], prompt_ranges={"a": (1, len(OTHER))}))
    assert get_tokens(output) == {} and output.prompt_rows["a"] == RowRange(0, len(OTHER) - 1)


def test_children_equal_the_familys_draws_and_copied_blocks_do_not_touch_the_original(
    runner: GPUModelRunner, reference: Reference
) -> None:
    seeds = [11, 12, 13]
    family = make_request("f", OTHER, block_ids=[0, 1], seeds=seeds, temperature=1.0, logprobs=0)
    draws = get_tokens(runner.execute_model(make_step([family])))["f"]
    for child, seed in enumerate(seeds):
        single = make_request("s", OTHER, block_ids=[10 + child, 20], seeds=[seed], temperature=1.0)
        assert get_tokens(runner.execute_model(make_step([single])))["s"] == [draws[child]]
    # The prompt ends in the middle of block 1: two children copy it, the last owner writes in place.
    children = [
        make_request(
            f"{i}_f",
            [*OTHER, token_id],
            num_prompt_tokens=len(OTHER),
            num_computed_tokens=len(OTHER),
            block_ids=[0, block],
            seeds=[seeds[i]],
            logprobs=1,
        )
        for i, (token_id, block) in enumerate(zip(draws, (30, 31, 1), strict=True))
    ]
    output = runner.execute_model(make_step(children, left=["f", "s"], copies=[(1, 30), (1, 31)]))
    for i, token_id in enumerate(draws):
        logits = reference([*OTHER, token_id])[-1]
        row = read_rows(output, get_sample_rows(output)[f"{i}_f"])[0]
        check_row(row, logits, get_tokens(output)[f"{i}_f"][0], 1)


def test_a_request_back_from_preemption_goes_on_as_undisturbed(runner: GPUModelRunner) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seeds": [5], "repetition_penalty": 1.3, "presence_penalty": 0.5}
    ids = list(PROMPT)
    ids += get_tokens(runner.execute_model(make_step([make_request("a", PROMPT, block_ids=[0, 1, 2], **settings)])))[
        "a"
    ]
    ids += get_tokens(runner.execute_model(make_step(running={"a": (11, [])})))["a"]
    undisturbed = get_tokens(runner.execute_model(make_step(running={"a": (12, [3])})))["a"]
    back = make_request("a", ids, num_prompt_tokens=len(PROMPT), block_ids=[40, 41, 42, 43], **settings)
    runner.execute_model(make_step([back], left=["a"], num_scheduled={"a": 6}))
    output = runner.execute_model(make_step(running={"a": (6, [])}, num_scheduled={"a": 7}))
    assert get_tokens(output)["a"] == undisturbed


class TestBrokenLogits:
    @pytest.fixture
    def poisoned(self, runner: GPUModelRunner, monkeypatch: pytest.MonkeyPatch) -> GPUModelRunner:
        """Every position whose token is 300 yields NaN hidden states."""
        forward = runner.model.forward

        def poison(input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
            hidden: torch.Tensor = forward(input_ids, *args)
            hidden[input_ids == 300] = torch.nan
            return hidden

        monkeypatch.setattr(runner.model, "forward", poison)
        return runner

    @pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seeds": [1]}, {"logprobs": 2}], ids=str)
    def test_a_sampled_row_fails_its_request_and_no_other(
        self, poisoned: GPUModelRunner, reference: Reference, params: dict[str, Any]
    ) -> None:
        bad = make_request("bad", [4, 300], block_ids=[0], **params)
        good = make_request("good", OTHER, block_ids=[1, 2], logprobs=1)
        output = poisoned.execute_model(make_step([bad, good]))
        assert set(get_tokens(output)) == set(get_sample_rows(output)) == {"good"}
        assert "NaN" in output.errors["bad"] and set(output.errors) == {"bad"}
        assert output.num_nan_rows == 1
        logits = reference(OTHER)[-1]
        check_row(read_rows(output, get_sample_rows(output)["good"])[0], logits, int(logits.argmax()), 1)
        output = poisoned.execute_model(make_step(running={"good": (len(OTHER), [])}, left=["bad"]))
        assert set(get_tokens(output)) == {"good"}

    @pytest.mark.parametrize("num_top", [1, VOCAB])
    def test_a_scored_prompt_row_fails_its_request(self, poisoned: GPUModelRunner, num_top: int) -> None:
        bad = make_request("bad", PROMPT, block_ids=[0, 1, 2], prompt_logprobs=num_top)
        good = make_request("good", OTHER, block_ids=[3, 4], prompt_logprobs=num_top)
        output = poisoned.execute_model(
            make_step([bad, good], prompt_ranges={"bad": (1, len(PROMPT)), "good": (1, len(OTHER))})
        )
        assert set(get_tokens(output)) == {"good"} and set(output.errors) == {"bad"}
        assert set(output.prompt_rows) | set(output.full_prompt_rows) == {"good"}

    def test_masks_that_leave_nothing_fail_with_their_own_message(self, runner: GPUModelRunner) -> None:
        request = make_request("a", OTHER, block_ids=[0, 1], allowed_token_ids=[5], bad_words=[[5]])
        output = runner.execute_model(make_step([request]))
        assert "allowed_token_ids" in output.errors["a"] and output.num_nan_rows == 0


def test_a_step_that_only_lets_requests_leave_runs_nothing(runner: GPUModelRunner) -> None:
    runner.execute_model(make_step([make_request("a", OTHER, block_ids=[0, 1])]))
    output = runner.execute_model(make_step(left=["a", "never seen"]))
    assert output == ModelRunnerOutput()
    assert runner.batch.num_reqs == 0


def test_after_a_step_that_raised_the_batch_starts_afresh(
    runner: GPUModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner.model, "forward", interrupt)
        runner.execute_model(make_step([make_request("a", OTHER, block_ids=[0, 1])]))
    output = runner.execute_model(make_step([make_request("b", OTHER, block_ids=[0, 1])], left=["a"]))
    assert set(get_tokens(output)) == {"b"} and runner.batch.num_reqs == 1


def test_tensors_of_a_device_travel_to_the_host_as_one_buffer() -> None:
    tensors = [
        torch.arange(3, dtype=torch.int32),
        torch.tensor([[True, False, True]]),
        torch.randn(2, 5),
        torch.empty(0, 4, dtype=torch.int32),
        torch.arange(12, dtype=torch.int64).view(3, 4)[:, 1:],
        torch.tensor([True]),
    ]
    for tensor, array in zip(tensors, unpack(pack(tensors), tensors), strict=True):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_whole_rows_of_one_request_do_not_keep_its_neighbours_alive() -> None:
    values, ranks = torch.zeros(3, VOCAB), torch.ones(3, VOCAB, dtype=torch.int32)
    block = WideRows(0, torch.zeros(3, dtype=torch.int32), None, values, ranks)
    results = StepResults()
    scores = Scores(None, [block], torch.ones(3, dtype=torch.bool))
    results.add_prompts(scores, [OwnedRows("a", 2, RowKind.FULL), OwnedRows("b", 1, RowKind.FULL)])
    full_rows = results.finish().full_prompt_rows
    assert [len(piece.values) for name in "ab" for piece in full_rows[name]] == [2, 1]
    for (piece,) in full_rows.values():
        for column, shared in zip(piece[1:], (values, ranks), strict=True):
            assert not np.shares_memory(column, shared.numpy())
