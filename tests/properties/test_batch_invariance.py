"""Batch-invariant mode: a request's values have the same bits however the engine happens to run it."""

import contextlib
import functools
import itertools
import pathlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import write_tiny_model
from vllm import LLM, RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs

VOCAB = 512
BUDGETS = (16, 50, 256, 2048)
BATCHES = (1, 4, 16, 64)
NARROW: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
NUM_BLOCKS = 12  # of 16 positions: a request of the largest length, and little beside it
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "biases": ("Qwen2ForCausalLM", {}),
    "norms on heads": ("Qwen3ForCausalLM", {}),
    "window": ("MistralForCausalLM", {"sliding_window": 20}),
}

Request = tuple[dict[str, list[int]], SamplingParams]


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Return models wide enough that a product is summed in several blocks, and of no round size."""

    @functools.cache
    def make(name: str) -> pathlib.Path:
        architecture, options = MODELS[name]
        sizes = {"hidden_size": 216, "intermediate_size": 404, "num_attention_heads": 6, "head_dim": 36}
        return write_tiny_model(tmp_path_factory.mktemp("model"), architecture, vocab_size=VOCAB, **(sizes | options))

    return make


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@contextlib.contextmanager
def start(model: pathlib.Path, num_threads: int = 1, **options: Any) -> Iterator[LLM]:
    settings: dict[str, Any] = {"max_model_len": 192, "max_num_seqs": 64, "kv_cache_memory_bytes": 64 << 20}
    settings |= {"max_logprobs": -1}
    with LLM(str(model), batch_invariant=True, **(settings | options)) as llm:
        torch.set_num_threads(num_threads)
        yield llm


def make_requests(count: int, *, vocab: int = VOCAB, longest: int = 120, most: int = 12) -> list[Request]:
    """Prompts that share beginnings of any length, and settings of every kind."""
    draw = random.Random(5)
    stem = draw.choices(range(3, vocab), k=longest)
    requests: list[Request] = []
    for i in range(count):
        shared = draw.choice([0, 7, 16, 37, 64])
        prompt = (stem[:shared] + draw.choices(range(3, vocab), k=draw.choice([1, 2, 9, 30, longest - 64])))[:longest]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.7, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 20]),
            presence_penalty=draw.choice([0.0, 0.5]),
            seed=i,
            max_tokens=draw.randint(1, most),
            ignore_eos=True,
            logprobs=draw.choice([0, 3, 30]),
            prompt_logprobs=draw.choice([None, 0, 3, 30]),
            logprobs_mode=draw.choice([None, None, "raw_logits", "processed_logprobs"]),
        )
        requests.append(({"prompt_token_ids": prompt}, params))
    return requests


def run(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)


def take_bits(positions: FlatLogprobs | None) -> list[tuple[bytes, ...]] | None:
    """Return of each position the bytes of its ids, values and ranks."""
    if positions is None:
        return None
    starts, *columns = positions.to_numpy()
    return [tuple(column[a:b].tobytes() for column in columns) for a, b in itertools.pairwise(starts.tolist())]


def assert_same_bits(got: Sequence[RequestOutput], wanted: Sequence[RequestOutput], where: object) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert take_bits(a.prompt_logprobs) == take_bits(b.prompt_logprobs), (where, i, "prompt")
        for one, other in zip(a.outputs, b.outputs, strict=True):
            assert list(one.token_ids) == list(other.token_ids), (where, i)
            assert take_bits(one.logprobs) == take_bits(other.logprobs), (where, i)
            assert one.cumulative_logprob == other.cumulative_logprob, (where, i)


def run_alone(model: pathlib.Path, requests: Sequence[Request], **options: Any) -> list[RequestOutput]:
    """Return the reference: one request at a time, each prompt in one step, no cache, one thread."""
    with start(model, enable_prefix_caching=False, max_num_batched_tokens=2048, **options) as llm:
        return [run(llm, [request])[0] for request in requests]


def check_family(llm: LLM, prompt: dict[str, list[int]]) -> None:
    """n children that share a prompt's blocks have the bits of single requests."""
    params = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=6, ignore_eos=True, logprobs=2)
    (family,) = run(llm, [(prompt, params)])
    for i, child in enumerate(family.outputs):
        single = params.clone()
        single.n, single.seed = 1, 9 + i
        alone = run(llm, [(prompt, single)])[0].outputs[0]
        assert list(alone.token_ids) == list(child.token_ids) and take_bits(alone.logprobs) == take_bits(child.logprobs)


def check_prefill_equals_decode(llm: LLM, prompt: list[int]) -> None:
    """A token that was sampled, scored as a token of a prompt."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=4)
    sampled = run(llm, [({"prompt_token_ids": prompt}, params)])[0].outputs[0]
    llm.reset_prefix_cache()
    whole = [*prompt, *sampled.token_ids]
    scored = run(llm, [({"prompt_token_ids": whole}, SamplingParams(max_tokens=0, prompt_logprobs=4))])[0]
    prefill, decode = take_bits(scored.prompt_logprobs), take_bits(sampled.logprobs)
    assert prefill is not None and prefill[len(prompt) :] == decode


def check_preemption(model: pathlib.Path, **options: Any) -> None:
    requests = [
        ({"prompt_token_ids": [5 + i] * 20}, SamplingParams(temperature=0.5, seed=i, max_tokens=60, logprobs=2))
        for i in range(6)
    ]
    wanted = run_alone(model, requests, **options)
    with start(model, num_gpu_blocks_override=NUM_BLOCKS, max_num_batched_tokens=50, **options) as llm:
        assert_same_bits(run(llm, requests), wanted, "a full pool")
        assert llm.llm_engine.get_stats().num_preemptions > 0


@pytest.mark.parametrize("narrow", NARROW)
def test_the_bits_are_those_of_a_request_alone(make_folder: Callable[[str], pathlib.Path], narrow: str) -> None:
    """A slice of the matrix below: in each engine several things differ at once, and the second run reads the cache."""
    model, options, requests = make_folder("llama"), NARROW[narrow], make_requests(14, most=6)
    wanted = run_alone(model, requests, **options)
    for batch, budget, num_threads in [(4, 50, 2), (16, 2048, 1)][: 2 if narrow == "float32" else 1]:
        how = {"max_num_seqs": batch, "max_num_batched_tokens": budget}
        with start(model, num_threads, **how, **options) as llm:
            for turn in ("first", "again"):
                assert_same_bits(run(llm, requests), wanted, (how, num_threads, turn))
            check_family(llm, requests[0][0])
            check_prefill_equals_decode(llm, requests[1][0]["prompt_token_ids"])


def test_the_bits_survive_preemption(make_folder: Callable[[str], pathlib.Path]) -> None:
    check_preemption(make_folder("llama"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "narrow"), [*itertools.product(["llama"], NARROW), *((m, "float32") for m in MODELS)])
def test_the_whole_matrix(make_folder: Callable[[str], pathlib.Path], name: str, narrow: str) -> None:
    model, options, requests = make_folder(name), NARROW[narrow], make_requests(64)
    wanted = run_alone(model, requests, **options)
    for batch, budget, is_cached in itertools.product(BATCHES, BUDGETS, (True, False)):
        how = {"max_num_seqs": batch, "max_num_batched_tokens": budget, "enable_prefix_caching": is_cached}
        with start(model, **how, **options) as llm:
            for num_threads in (1, 2):
                torch.set_num_threads(num_threads)
                assert_same_bits(run(llm, requests), wanted, (how, num_threads))
            check_family(llm, requests[0][0])
            check_prefill_equals_decode(llm, requests[1][0]["prompt_token_ids"])
    with start(model, 2, **options) as llm:
        for turn in range(5):
            assert_same_bits(run(llm, requests), wanted, turn)
    check_preemption(model, **options)


@pytest.mark.slow
@pytest.mark.parametrize("narrow", NARROW)
def test_a_real_model_s_bits(smollm2_folder: pathlib.Path, narrow: str) -> None:
    requests = make_requests(16, vocab=49_000, longest=150, most=6)
    options = {"dtype": "float32"} | NARROW[narrow]
    wanted = run_alone(smollm2_folder, requests, **options)
    for batch, budget, is_cached, num_threads in [
        (1, 50, True, 2), (4, 16, True, 1), (16, 64, False, 2), (16, 2048, True, 2),
    ]:  # fmt: skip
        how = {"max_num_seqs": batch, "max_num_batched_tokens": budget, "enable_prefix_caching": is_cached}
        with start(smollm2_folder, num_threads, **how, **options) as llm:
            for turn in ("first", "again"):
                assert_same_bits(run(llm, requests), wanted, (how, num_threads, turn))
            check_family(llm, requests[0][0])
            check_prefill_equals_decode(llm, requests[1][0]["prompt_token_ids"])


def test_a_scored_text_s_bits_do_not_depend_on_what_its_blocks_keep(make_folder: Callable[[str], pathlib.Path]) -> None:
    """Kept scores, kept hidden states, an earlier start, a larger k, and the first token behind a shared beginning."""
    stem = random.Random(1).choices(range(3, VOCAB), k=75)
    asks = [
        (stem[:40], {"prompt_logprobs": 2, "prompt_logprobs_start": 20}),
        (stem, {"prompt_logprobs": 1}),
        (stem, {"prompt_logprobs": 60}),
        ([*stem[:37], 7, 8, 9], {"prompt_logprobs": 0}),
        (stem, {"prompt_logprobs": 5, "logprobs_mode": "raw_logits"}),
        (stem, {"prompt_logprobs": 1}),
    ]
    requests = [({"prompt_token_ids": ids}, SamplingParams(max_tokens=0, **fields)) for ids, fields in asks]
    wanted = run_alone(make_folder("llama"), requests)
    with start(make_folder("llama"), max_num_batched_tokens=50) as llm:
        for i, request in enumerate(requests):
            assert_same_bits(run(llm, [request]), [wanted[i]], asks[i][1])
        assert np.isfinite(wanted[1].prompt_logprobs.to_numpy()[2]).all()
