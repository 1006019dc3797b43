import dataclasses

import pytest

from vllm.config import VllmConfig
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.inputs import parse_prompts
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.input_processor import InputProcessor


@pytest.fixture
def processor(tiny_config: VllmConfig, tiny_tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(tiny_config, tiny_tokenizer)


def seeds_of(processor: InputProcessor, params: SamplingParams, times: int = 1) -> list[list[int]]:
    return [processor.process("r", [5], params).core_request.seeds for _ in range(times)]


def test_child_i_has_the_seed_plus_i_modulo_two_to_the_64(processor: InputProcessor) -> None:
    assert seeds_of(processor, SamplingParams(n=3, seed=7)) == [[7, 8, 9]]
    assert seeds_of(processor, SamplingParams(n=3, seed=2**64 - 2)) == [[2**64 - 2, 2**64 - 1, 0]]
    assert seeds_of(processor, SamplingParams(seed=-5)) == [[2**64 - 5]]


def test_unseeded_calls_differ_and_a_fresh_engine_repeats_them(
    tiny_config: VllmConfig, tiny_tokenizer: Tokenizer
) -> None:
    params = SamplingParams(n=3)
    first = seeds_of(InputProcessor(tiny_config, tiny_tokenizer), params, times=3)
    assert first == seeds_of(InputProcessor(tiny_config, tiny_tokenizer), params, times=3)
    assert len({seed for seeds in first for seed in seeds}) == 9

    other_model = dataclasses.replace(tiny_config.model_config, seed=1)
    other_engine = dataclasses.replace(tiny_config, model_config=other_model)
    assert first != seeds_of(InputProcessor(other_engine, tiny_tokenizer), params, times=3)


def test_a_greedy_family_is_sent_as_one_request(processor: InputProcessor) -> None:
    processed = processor.process("r", [5], SamplingParams(n=4, temperature=0))
    assert (len(processed.core_request.seeds), processed.num_copies) == (1, 4)
    assert processed.core_request.sampling_params.n == 1
    processed = processor.process("r", [5], SamplingParams(n=4, temperature=0.5))
    assert (len(processed.core_request.seeds), processed.num_copies) == (4, 1)


def test_what_the_caller_passes_is_never_changed(processor: InputProcessor) -> None:
    params = SamplingParams(n=2, temperature=0, stop="x", logprobs=-1, max_tokens=None, bad_words=["bad"])
    before, prompt = params.clone(), [5, 6, 7]
    request = processor.process("r", prompt, params).core_request
    assert params == before
    assert request.sampling_params is not params and request.prompt_token_ids is not prompt


def test_an_attribute_set_after_construction_counts_and_is_checked(processor: InputProcessor) -> None:
    params = SamplingParams()
    params.logprobs = 3
    assert processor.process("r", [5], params).core_request.sampling_params.logprobs == 3
    params.temperature = -1.0
    with pytest.raises(VLLMValidationError, match="temperature"):
        processor.process("r", [5], params)


def test_params_are_resolved_for_the_core(processor: InputProcessor, tiny_config: VllmConfig) -> None:
    asked = SamplingParams(max_tokens=None, logprobs=-1, prompt_logprobs=2, min_tokens=3, stop_token_ids=[9])
    request = processor.process("r", [5] * 10, asked).core_request
    params = request.sampling_params
    assert (params.max_tokens, params.logprobs) == (54, tiny_config.model_config.vocab_size)
    assert params.logprobs_mode == "raw_logprobs"
    assert request.eos_token_id == 2
    assert request.min_tokens_stop_ids == [2, 9]
    assert processor.process("r", [5], SamplingParams()).core_request.min_tokens_stop_ids == []


def test_bad_words_are_masked_with_and_without_the_space_before_them(
    processor: InputProcessor, tiny_tokenizer: Tokenizer
) -> None:
    found = processor.process("r", [5], SamplingParams(bad_words=["you"])).core_request.bad_words_token_ids
    for text in ("you", " you"):
        assert tiny_tokenizer.encode(text, add_special_tokens=False) in found


def test_further_end_tokens_of_the_generation_config_stop_and_the_first_is_eos(
    tiny_config: VllmConfig, tiny_tokenizer: Tokenizer
) -> None:
    model_config = dataclasses.replace(tiny_config.model_config, generation_eos_token_ids=(2, 7))
    processor = InputProcessor(dataclasses.replace(tiny_config, model_config=model_config), tiny_tokenizer)
    request = processor.process("r", [5], SamplingParams()).core_request
    assert (request.eos_token_id, request.sampling_params.stop_token_ids) == (2, [7])
    request = processor.process("r", [5], SamplingParams(ignore_eos=True)).core_request
    assert request.sampling_params.stop_token_ids == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "cannot be empty"),
        ([], "cannot be empty"),
        ([5, 512], "512 is out of vocabulary"),
        ([5, -1], "-1 is out of vocabulary"),
        ([5] * 65, r"length 65.*longer than the maximum model length of 64"),
        ([5] * 64, "plus the number of requested output tokens"),
    ],
)
def test_a_prompt_that_can_not_run_is_refused(processor: InputProcessor, prompt: object, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as caught:
        processor.process("r", prompt, SamplingParams())
    assert caught.value.parameter in ("prompt", "prompt_token_ids")


def test_a_prompt_of_the_model_length_is_scored(processor: InputProcessor) -> None:
    request = processor.process("r", [5] * 64, SamplingParams(max_tokens=0, prompt_logprobs=0)).core_request
    assert request.sampling_params.max_tokens == 0


@pytest.mark.parametrize(
    ("params", "largest"),
    [
        (SamplingParams(logprobs=4, max_tokens=10, n=3), 3 * 10 * 5),
        (SamplingParams(prompt_logprobs=4, max_tokens=0), 9 * 5),
        (SamplingParams(logprob_token_ids=[1, 2], max_tokens=10), 10 * 3),
    ],
)
def test_an_answer_of_too_many_entries_is_refused_at_the_door(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch, params: SamplingParams, largest: int
) -> None:
    monkeypatch.setenv("VLLM_MAX_LOGPROB_ENTRIES", str(largest - 1))
    with pytest.raises(VLLMValidationError, match="VLLM_MAX_LOGPROB_ENTRIES"):
        processor.process("r", [5] * 10, params)
    monkeypatch.setenv("VLLM_MAX_LOGPROB_ENTRIES", str(largest + 5))  # the prompt's first position has no row
    processor.process("r", [5] * 10, params)


def test_no_id_in_the_core_is_given_twice(processor: InputProcessor) -> None:
    """A caller's id may look like a child's, and may be live twice."""
    family = processor.process("5", [5], SamplingParams(n=2, seed=1)).core_request
    others = [processor.process(name, [5], SamplingParams()).core_request for name in ("0_5", "5", "5")]
    ids = [family.request_id, *family.child_ids, *(request.request_id for request in others)]
    assert len(set(ids)) == len(ids)


def test_texts_tokenised_together_equal_texts_alone(processor: InputProcessor, tiny_tokenizer: Tokenizer) -> None:
    prompts = ["one", {"prompt_token_ids": [5, 6]}, {"prompt": "three", "cache_salt": "s"}]
    together = processor.tokenize(parse_prompts(prompts))
    assert [prompt.token_ids for prompt in together] == [
        tiny_tokenizer.encode("one"),
        [5, 6],
        tiny_tokenizer.encode("three"),
    ]
    assert [prompt.cache_salt for prompt in together] == [None, None, "s"]


def test_tokenization_arguments_are_served_or_refused_by_name(processor: InputProcessor) -> None:
    request = processor.process("r", "a", SamplingParams(), tokenization_kwargs={"add_special_tokens": False})
    assert len(request.core_request.prompt_token_ids) == 1
    with pytest.raises(VLLMUnsupportedError, match="truncation"):
        processor.process("r", "a", SamplingParams(), tokenization_kwargs={"truncation": True})


def test_without_a_tokenizer_only_token_ids_are_taken(tiny_config: VllmConfig) -> None:
    processor = InputProcessor(tiny_config, None)
    request = processor.process("r", [5], SamplingParams()).core_request
    assert request.eos_token_id == 2  # then the checkpoint's own says it
    with pytest.raises(VLLMValidationError, match="needs a tokenizer"):
        processor.process("r", "text", SamplingParams())


def test_params_of_a_wrong_type_are_a_type_error(processor: InputProcessor) -> None:
    with pytest.raises(TypeError, match="SamplingParams"):
        processor.process("r", [5], {"n": 1})  # type: ignore[arg-type]
