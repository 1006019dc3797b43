"""Texts longer than the model: each token once, as transformers' rolling perplexity has it."""

import math
import pathlib

import pytest
import torch

from tests.tiny_models import load_tiny_reference
from vllm import LLM
from vllm.entrypoints.scoring.windows import EncodedText, check_window, make_windows, score_texts
from vllm.exceptions import VLLMValidationError


@torch.inference_mode()
def compute_rolling_loss(model: torch.nn.Module, token_ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """The loop of transformers' guide to the perplexity of fixed-length models: (sum of losses, tokens)."""
    ids = torch.tensor([token_ids])
    previous_end, total, count = 0, 0.0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        target_length = end - previous_end
        inputs = ids[:, begin:end]
        targets = inputs.clone()
        targets[:, :-target_length] = -100
        loss = model(inputs, labels=targets).loss
        num_valid = int((targets != -100).sum())
        num_loss = num_valid - targets.shape[0] if target_length == inputs.shape[1] else num_valid
        total += float(loss) * num_loss
        count += num_loss
        previous_end = end
        if end == ids.shape[1]:
            break
    return total, count


@pytest.mark.parametrize(("window", "stride"), [(32, 16), (32, 31), (20, 1), (64, 7), (256, 128)])
@pytest.mark.parametrize("num_tokens", [2, 31, 32, 33, 100])
def test_the_sum_is_that_of_transformers_rolling_perplexity(
    llm: LLM, folder: pathlib.Path, window: int, stride: int, num_tokens: int
) -> None:
    token_ids = [3 + (i * i) % 500 for i in range(num_tokens)]
    (score,) = score_texts(llm, [EncodedText(0, token_ids)], window, stride)
    values = [value for value in score.logprobs if value is not None]
    total, count = compute_rolling_loss(load_tiny_reference(folder), token_ids, window, stride)
    assert len(values) == count == num_tokens - 1
    assert math.fsum(values) == pytest.approx(-total, abs=1e-4 * count)
    assert score.token_ids == token_ids and score.logprobs[0] is None and len(score.ranks) == num_tokens


@pytest.mark.parametrize("num_unscored", [0, 1, 2])
@pytest.mark.parametrize(("window", "stride"), [(2, 1), (5, 2), (8, 7)])
def test_each_token_is_scored_once_behind_as_much_as_the_overlap(num_unscored: int, window: int, stride: int) -> None:
    for num_tokens in range(40):
        windows = list(make_windows(num_tokens, num_unscored, window, stride))
        scored = [position for place in windows for position in range(place.first, place.end)]
        assert scored == list(range(max(1, num_unscored), num_tokens))
        for begin, end, first in windows:
            assert end - begin <= window
            assert first - begin >= min(window - stride, max(1, num_unscored)) and (begin == 0 or first > begin)
            assert begin == 0 or first - begin >= window - stride


def test_special_tokens_in_front_are_context_and_no_part_of_the_text(llm: LLM, reference) -> None:
    token_ids = [1, *range(40, 60)]
    (score,) = score_texts(llm, [EncodedText(1, token_ids)], 64, 32)
    rows = reference(token_ids)
    assert score.token_ids == token_ids[1:]
    want = [rows[i, token].item() for i, token in enumerate(token_ids[1:])]
    assert score.logprobs == pytest.approx(want, abs=1e-4)


def test_alternatives_are_the_most_likely_in_order(llm: LLM, reference) -> None:
    token_ids = list(range(40, 60))
    (score,) = score_texts(llm, [EncodedText(0, token_ids)], 64, 32, top_k=3)
    rows = reference(token_ids)
    assert score.top_logprobs[0] is None
    for position, row in enumerate(score.top_logprobs[1:]):
        values, ids = rows[position].topk(3)
        assert [token for token, _, _ in row] == ids.tolist()
        assert [value for _, value, _ in row] == pytest.approx(values.tolist(), abs=1e-4)
        assert [rank for _, _, rank in row] == [1, 2, 3]


def test_a_text_without_a_token_to_score(llm: LLM) -> None:
    (one, none) = score_texts(llm, [EncodedText(0, [7]), EncodedText(1, [1])], 64, 32)
    assert (one.logprobs, none.logprobs) == ([None], [])


@pytest.mark.parametrize(
    ("window", "stride", "name"), [(1, None, "window"), (257, None, "window"), (32, 32, "stride"), (32, 0, "stride")]
)
def test_windows_out_of_range_are_refused(window, stride, name) -> None:
    with pytest.raises(VLLMValidationError, match=name):
        check_window(window, stride, 256)


def test_by_default_windows_are_as_long_as_the_model_and_overlap_by_half() -> None:
    assert check_window(None, None, 256) == (256, 128)
