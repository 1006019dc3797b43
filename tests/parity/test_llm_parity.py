"""LLM.generate on the real model against a float32 transformers forward pass."""

import pathlib

import numpy as np
import pytest

from tests.parity import texts
from tests.parity.reference import (
    assert_row_matches,
    compute_reference_logprobs,
    generate_reference_greedily,
)
from vllm import LLM, SamplingParams


@pytest.mark.parametrize("name", list(texts.ALL))
def test_prompt_and_greedy_sample_logprobs_equal_transformers(
    smollm2_llm: LLM, smollm2_folder: pathlib.Path, name: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    out = smollm2_llm.generate(texts.ALL[name], params)[0]
    prompt, completion = out.prompt_token_ids, out.outputs[0]
    if name == "700 tokens":
        assert 600 <= len(prompt) <= 900, len(prompt)
    assert list(completion.token_ids) == generate_reference_greedily(smollm2_folder, prompt, 12)

    rows = compute_reference_logprobs(smollm2_folder, [*prompt, *completion.token_ids])
    assert len(out.prompt_logprobs) == len(prompt)
    assert out.prompt_logprobs[0] is None
    for i in range(1, len(prompt)):
        assert_row_matches(out.prompt_logprobs[i], rows[i - 1], prompt[i], 5, f"prompt position {i}")
    assert len(completion.logprobs) == 12
    for i, token in enumerate(completion.token_ids):
        assert_row_matches(completion.logprobs[i], rows[len(prompt) + i - 1], token, 5, f"token {i}")
    chosen = [completion.logprobs[i][token].logprob for i, token in enumerate(completion.token_ids)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen), abs=1e-4)


def test_values_do_not_move_with_sampling_settings(smollm2_llm: LLM, smollm2_folder: pathlib.Path) -> None:
    params = SamplingParams(
        temperature=1.7, top_p=0.9, top_k=40, min_p=0.02, seed=3, max_tokens=10, logprobs=2, prompt_logprobs=2,
        presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={504: 3.0}, ignore_eos=True,
    )  # fmt: skip
    out = smollm2_llm.generate(texts.ENGLISH, params)[0]
    prompt, completion = out.prompt_token_ids, out.outputs[0]
    rows = compute_reference_logprobs(smollm2_folder, [*prompt, *completion.token_ids])
    for i in range(1, len(prompt)):
        assert_row_matches(out.prompt_logprobs[i], rows[i - 1], prompt[i], 2, f"prompt position {i}")
    for i, token in enumerate(completion.token_ids):
        assert_row_matches(completion.logprobs[i], rows[len(prompt) + i - 1], token, 2, f"token {i}")


def test_the_whole_vocabulary_is_the_reference_row(smollm2_llm: LLM, smollm2_folder: pathlib.Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    out = smollm2_llm.generate("The capital of France is", params)[0]
    prompt, completion = out.prompt_token_ids, out.outputs[0]
    rows = compute_reference_logprobs(smollm2_folder, [*prompt, *completion.token_ids])
    positions = [(out.prompt_logprobs[i], rows[i - 1]) for i in range(1, len(prompt))]
    positions += [(completion.logprobs[i], rows[len(prompt) + i - 1]) for i in range(2)]
    for position, row in positions:
        assert len(position) == rows.shape[1]
        values = np.array([position[token].logprob for token in range(rows.shape[1])])
        np.testing.assert_allclose(values, row, atol=2e-3)
        np.testing.assert_allclose(values[row >= -15], row[row >= -15], atol=1e-4)
        assert np.exp(values).sum() == pytest.approx(1.0, abs=1e-4)
        ranks = sorted(entry.rank for entry in position.values())
        assert ranks == list(range(1, rows.shape[1] + 1))


def test_the_facts_of_the_anchor_run_hold(smollm2_llm: LLM) -> None:
    """Values that vLLM 0.32 gave for this prompt and model (float32), from a recorded run."""
    out = smollm2_llm.generate({"prompt_token_ids": [504, 3575, 282, 4649, 314]}, SamplingParams(
        temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2))[0]  # fmt: skip
    assert [out.prompt_logprobs[i][t].logprob for i, t in enumerate([3575, 282, 4649, 314], 1)] == pytest.approx(
        [-11.539271, -0.337594, -2.438647, -0.450914], abs=2e-4
    )
    assert out.prompt_logprobs[1][3575].rank == 2923
    assert out.outputs[0].text == " Paris.\n\n"
    assert [next(iter(p.values())).logprob for p in out.outputs[0].logprobs] == pytest.approx(
        [-0.258063, -0.380113, -1.009332, -0.879256], abs=2e-4
    )
    assert [e.decoded_token for e in out.prompt_logprobs[1].values()] == [" capital", "-", ","]


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        ({"temperature": 1.0}, lambda p: p),
        ({"temperature": 0.6}, lambda p: p ** (1 / 0.6)),
        ({"temperature": 1.0, "top_k": 8}, lambda p: np.where(p >= np.sort(p)[-8], p, 0)),
        ({"temperature": 1.0, "top_p": 0.7}, lambda p: _keep_top_p(p, 0.7)),
        ({"temperature": 1.0, "min_p": 0.1}, lambda p: np.where(p >= 0.1 * p.max(), p, 0)),
    ],
    ids=["temperature 1", "temperature 0.6", "top-k", "top-p", "min-p"],
)
def test_first_token_frequencies_follow_the_reference(
    smollm2_llm: LLM, smollm2_folder: pathlib.Path, settings, keep
) -> None:
    """Chi-square of 40 × n=50 draws against the reference's probabilities."""
    from scipy.stats import chisquare

    prompt = smollm2_llm.llm_engine.tokenizer.encode("My favourite animal is the")
    wanted = keep(np.exp(compute_reference_logprobs(smollm2_folder, prompt)[-1].astype(np.float64)))
    wanted = wanted / wanted.sum()
    params = [SamplingParams(n=50, max_tokens=1, seed=1000 * i, **settings) for i in range(40)]
    outs = smollm2_llm.generate([{"prompt_token_ids": prompt}] * 40, params)
    counts = np.bincount([o.token_ids[0] for out in outs for o in out.outputs], minlength=len(wanted))
    assert counts.sum() == 2000
    assert counts[wanted == 0].sum() == 0, "a removed token was drawn"
    # Bins of at least five expected draws; the rest in one.
    big = wanted * 2000 >= 5
    observed, expected = [*counts[big], counts[~big].sum()], [*(wanted[big] * 2000), wanted[~big].sum() * 2000]
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
        expected = list(np.array(expected) * (sum(observed) / sum(expected)))
    assert chisquare(observed, expected).pvalue > 1e-4


def _keep_top_p(p: np.ndarray, top_p: float) -> np.ndarray:
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = np.zeros_like(p)
    kept[order[before < top_p]] = p[order[before < top_p]]
    return kept
