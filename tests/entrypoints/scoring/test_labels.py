"""`LLM.label_logprobs`: raw and normalised values of single tokens."""

import math

import numpy as np
import pytest
import torch

from tests.entrypoints.scoring.conftest import Reference, assert_idle
from vllm import LLM
from vllm.exceptions import VLLMValidationError


def test_raw_and_normalised_values_are_the_reference_s(llm: LLM, reference: Reference) -> None:
    tokenizer = llm.llm_engine.tokenizer
    prompts = ["the way", "all of the people that", [5, 6, 7]]
    labels = [" the", " one", 77]
    ids = [*(tokenizer.encode(label)[0] for label in labels[:2]), 77]
    for prompt, scores in zip(prompts, llm.label_logprobs(prompts, labels), strict=True):
        prompt_ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
        row = reference(prompt_ids)[-1]
        want = row[torch.tensor(ids)]
        assert scores.token_ids == ids and scores.num_prompt_tokens == len(prompt_ids)
        assert np.abs(np.array(scores.logprobs) - want.numpy()).max() < 1e-4
        normalised = torch.log_softmax(want, -1).numpy()
        assert np.abs(np.array(scores.normalized_logprobs) - normalised).max() < 1e-4
        assert math.fsum(scores.normalized_probabilities) == pytest.approx(1)
        assert scores.probabilities == pytest.approx([math.exp(value) for value in scores.logprobs])
        assert scores.ranks == [1 + int((row > row[token]).sum()) for token in ids]
    assert_idle(llm)


def test_one_label_and_one_prompt(llm: LLM, reference: Reference) -> None:
    (scores,) = llm.label_logprobs([5, 6], [9])
    assert scores.logprobs[0] == pytest.approx(reference([5, 6])[-1][9].item(), abs=1e-4)
    assert scores.normalized_logprobs == [0.0]


def test_labels_of_several_tokens_are_all_named(llm: LLM) -> None:
    with pytest.raises(VLLMValidationError, match=r"single token.*' xyzzy' \(\d+ tokens.*'qqq'") as caught:
        llm.label_logprobs("the way", [" the", " xyzzy", "qqq"])
    assert caught.value.parameter == "labels" and "' the'" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "labels", "parameter", "message"),
    [
        ("a", [], "labels", "at least one"),
        ("a", "yes", "labels", "must be a list"),
        ("a", [5, 512], "labels", r"labels\[1\].*512.*from 0 to 511"),
        ("a", [5, True], "labels", r"labels\[1\].*bool"),
        ("a", [5, 6, 5], "labels", r"labels\[2\] is the same token as labels\[0\]"),
        ([[5], []], [7], "prompts", r"prompts\[1\] has 0 tokens"),
        ([[5] * 256], [7], "prompts", r"prompts\[0\] has 256 tokens.*from 1 to 255"),
        ([[5], [600]], [7], "prompts", r"prompts\[1\].*out of vocabulary"),
    ],
)
def test_what_can_t_be_compared_is_refused(llm: LLM, prompts, labels, parameter, message) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        llm.label_logprobs(prompts, labels)
    assert caught.value.parameter == parameter


def test_labels_cost_no_position(llm: LLM) -> None:
    llm.reset_prefix_cache()
    before = llm.llm_engine.get_stats().num_computed_positions
    llm.label_logprobs([[5, *range(30, 50)]], list(range(60, 90)))
    assert llm.llm_engine.get_stats().num_computed_positions - before == 21
