"""What SamplingParams accepts, refuses and turns into: tables, then the promises of admission."""

import copy
import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

HUGE = 10**5000  # Python refuses to print it
MODEL: dict[str, Any] = {"vocab_size": 100, "max_model_len": 64, "prompt_len": 10}


class LetterTokenizer:
    """One token a letter; a space has none of its own but moves the next letter's id by 30."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) - ord("a") + 30 * (i > 0 and text[i - 1] == " ") for i, c in enumerate(text) if c != " "]


# ---------------------------------------------------------------- construction


def test_the_fields_are_vllms_in_vllms_order_and_then_ours() -> None:
    public = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    assert " ".join(public) == (
        "n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed stop "
        "stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids "
        "prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens "
        "spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone "
        "output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words "
        "skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start "
        "trace_decode_token_ids logprobs_mode prompt_logprobs_start"
    )
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert params.logprobs is None and params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("field", "given_value", "kept"),
    [
        ("stop", "ab", ["ab"]),
        ("stop", None, []),
        ("stop", ("a", "b"), ["a", "b"]),
        ("stop_token_ids", None, []),
        ("stop_token_ids", np.array([5, 2, 5]), [5, 2]),
        ("bad_words", ["x", "y", "x"], ["x", "y"]),
        ("seed", -1, None),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", -(2**63), -(2**63)),
        ("logprobs", True, 1),
        ("logprobs", False, None),
        ("logprobs", 0, 0),
        ("logprobs", -1, -1),
        ("logprobs", np.int64(3), 3),
        ("prompt_logprobs", True, 1),
        ("prompt_logprobs", False, None),
        ("thinking_token_budget", -1, None),
        ("temperature", 0.001, 0.01),
        ("temperature", 1, 1.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_k", -1, -1),
        ("max_tokens", None, None),
        ("max_tokens", 0, 0),
        ("output_kind", 2, RequestOutputKind.FINAL_ONLY),
        ("ignore_eos", np.True_, True),
        ("logit_bias", {np.int64(3): 1}, {3: 1.0}),
        ("logit_bias", {3: -math.inf}, {3: -math.inf}),
    ],
)
def test_a_value_is_brought_to_its_one_form(field: str, given_value: Any, kept: Any) -> None:
    value = getattr(SamplingParams(**{field: given_value}), field)
    assert value == kept and type(value) is type(kept)


NO_WHOLE_NUMBERS = (1.5, "5", math.nan, [1], {})
NO_NUMBERS = ("1", None, math.nan, [1.0], True, HUGE)
REFUSED: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 16385, HUGE, None, True, *NO_WHOLE_NUMBERS)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, math.inf, *NO_NUMBERS)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, -math.inf, *NO_NUMBERS)),
    *(("repetition_penalty", value) for value in (0, -1.0, math.inf, *NO_NUMBERS)),
    *(("temperature", value) for value in (-0.1, 2.1, math.inf, *NO_NUMBERS)),
    *(("top_p", value) for value in (0, -0.5, 1.1, *NO_NUMBERS)),
    *(("min_p", value) for value in (-0.1, 1.1, *NO_NUMBERS)),
    *(("top_k", value) for value in (-2, None, HUGE, *NO_WHOLE_NUMBERS)),
    *(("seed", value) for value in (2**64, -(2**63) - 1, HUGE, *NO_WHOLE_NUMBERS)),
    *(("max_tokens", value) for value in (-1, True, HUGE, *NO_WHOLE_NUMBERS)),
    *(("min_tokens", value) for value in (-1, 17, None, *NO_WHOLE_NUMBERS)),
    *(("stream_interval", value) for value in (0, -1, *NO_WHOLE_NUMBERS)),
    *(("logprobs", value) for value in (-2, -HUGE, *NO_WHOLE_NUMBERS)),
    *(("prompt_logprobs", value) for value in (-2, -HUGE, *NO_WHOLE_NUMBERS)),
    *(("stop", value) for value in ([""], "", 5, ["a", 5], {"a": 1}, b"a")),
    *(("bad_words", value) for value in ([""], "word", [5], 5)),
    *(("stop_token_ids", value) for value in ([1.5], ["1"], [True], 5, "12", {1: 2})),
    *(("allowed_token_ids", value) for value in ([1.5], ["1"], 5)),
    *(("logprob_token_ids", value) for value in ([1.5], ["1"], 5)),
    *(("logit_bias", value) for value in ([1], {"a": 1}, {"5": 1}, {1.5: 1}, {1: "a"}, {1: math.nan}, {1: math.inf})),
    *(("output_kind", value) for value in (3, "DELTA", None, HUGE)),
    *(("logprobs_mode", value) for value in ("raw", "", 1)),
    *(("ignore_eos", value) for value in (None, 1, "yes")),
    *(("detokenize", value) for value in (None, 0)),
    *(("extra_args", value) for value in ([1], {"a": {"b": [2**64]}})),
    ("prompt_logprobs_start", 0),  # without prompt_logprobs
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=[f"{f}-{i}" for i, (f, _) in enumerate(REFUSED)])
def test_a_wrong_value_is_refused_by_name_at_construction_and_when_set_later(field: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError) as at_construction:
        SamplingParams(**{field: value})
    params = SamplingParams()
    setattr(params, field, value)
    with pytest.raises(VLLMValidationError) as at_admission:
        params.resolve(**MODEL)
    for refusal in (at_construction, at_admission):
        assert refusal.value.parameter == field
        assert field in str(refusal.value) and len(str(refusal.value)) < 800


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2."),
        ({"prompt_logprobs": -5}, "prompt_logprobs must be non-negative or -1, got -5."),
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1."),
        ({"n": 4, "max_tokens": 0}, "n must be 1; got 4"),
        ({"stop": ["a"], "detokenize": False}, "detokenize=True"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens=4; got 5"),
    ],
)
def test_a_refusal_says_field_value_and_limit(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**fields)
    assert text in str(refusal.value) and "(parameter=" in str(refusal.value)


def test_a_misspelt_keyword_or_attribute_is_told_what_was_meant() -> None:
    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'best_of'"):
        SamplingParams(best_of=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(5)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        SamplingParams().max_token = 5  # type: ignore[attr-defined]


def test_greedy_switches_the_filters_off_and_allows_several_choices() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1, n=4)
    assert (params.top_p, params.top_k, params.min_p, params.n) == (1.0, 0, 0.0, 4)
    assert params.sampling_type is SamplingType.GREEDY


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": 0, "seed": 1}, SamplingType.GREEDY),
        ({"temperature": 0.5}, SamplingType.RANDOM),
        ({"temperature": 0.5, "seed": 0}, SamplingType.RANDOM_SEED),
    ],
)
def test_the_sampling_type(fields: dict[str, Any], kind: SamplingType) -> None:
    assert SamplingParams(**fields).sampling_type is kind


@pytest.mark.parametrize(
    ("fields", "held_back"),
    [
        ({}, 0),
        ({"stop": ["ab", "wxyz"]}, 3),
        ({"stop": ["ab", "wxyz"], "include_stop_str_in_output": True}, 0),
        ({"output_text_buffer_length": 9}, 0),
    ],
)
def test_as_much_text_is_held_back_as_a_stop_string_may_still_swallow(fields: dict[str, Any], held_back: int) -> None:
    assert SamplingParams(**fields).output_text_buffer_length == held_back


def test_from_optional_reads_none_as_the_default_and_clamps_the_bias() -> None:
    names = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name != "max_tokens"]
    assert SamplingParams.from_optional(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    params = SamplingParams.from_optional(logit_bias={"5": 250, 6: -300.0, "7": 1}, temperature=None)
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 1.0}
    with pytest.raises(VLLMValidationError, match=r"\['x', 'y'\]"):
        SamplingParams.from_optional(logit_bias={"x": 1, "5": 1, "y": 1})
    with pytest.raises(TypeError, match="'temperature'"):
        SamplingParams.from_optional(temperatur=1)


VALID = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 16384),
        "temperature": st.just(0.0) | st.floats(0.01, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 1000),
        "min_p": st.floats(0, 1),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "stop": st.none() | st.lists(st.text(min_size=1), max_size=3),
        "stop_token_ids": st.none() | st.lists(st.integers(0, 99), max_size=5),
        "max_tokens": st.none() | st.integers(20, 2**63 - 1),
        "min_tokens": st.integers(0, 20).filter(lambda x: x <= 16),
        "logprobs": st.none() | st.integers(-1, 10**6),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 99), st.floats(-100, 100)),
        "bad_words": st.none() | st.lists(st.text(min_size=1)),
        "output_kind": st.sampled_from(RequestOutputKind),
    },
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(VALID)
def test_params_survive_the_wire_a_pickle_and_a_copy(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    twins = (
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams),
        pickle.loads(pickle.dumps(params)),
        copy.deepcopy(params),
        params.clone(),
    )
    assert all(twin == params and repr(twin) == repr(params) for twin in twins)


def test_what_is_left_at_its_default_is_not_sent() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams(temperature=0.5, logprobs=2)))
    assert sent.keys() <= {"temperature", "logprobs", "stop", "stop_token_ids", "bad_words"}


def test_a_clone_shares_no_list_unless_the_caller_promised_not_to_reuse_it() -> None:
    params = SamplingParams(stop_token_ids=[1], logit_bias={1: 1.0})
    twin = params.clone()
    assert twin == params and twin is not params
    twin.stop_token_ids.append(2)  # type: ignore[union-attr]
    twin.logit_bias[2] = 0.0  # type: ignore[index]
    assert params == SamplingParams(stop_token_ids=[1], logit_bias={1: 1.0})
    promised = SamplingParams(skip_clone=True)
    assert promised.clone() is promised
    assert promised.resolve(**MODEL) is not promised


# ---------------------------------------------------------------- admission


@settings(max_examples=60, deadline=None, derandomize=True)
@given(VALID, st.integers(1, 63))
def test_admission_never_changes_the_callers_object(fields: dict[str, Any], prompt_len: int) -> None:
    params = SamplingParams(**fields)
    before = copy.deepcopy(params)
    model = {"vocab_size": 100, "max_model_len": 64, "prompt_len": prompt_len, "max_logprobs": -1}
    try:
        resolved = params.resolve(**model, tokenizer=LetterTokenizer(), extra_eos_token_ids=[7])
    except VLLMValidationError:
        assert params == before
        return
    assert params == before
    for mine, theirs in ((params.stop, resolved.stop), (params.stop_token_ids, resolved.stop_token_ids)):
        assert mine is not theirs
    assert resolved.max_tokens is not None and 0 <= resolved.min_tokens <= resolved.max_tokens <= 64 - prompt_len
    assert resolved.logprobs is None or 0 <= resolved.logprobs <= 100
    assert 0 <= resolved.top_k < 100
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(resolved), type=SamplingParams)
    assert again == resolved and again.resolve(**model, tokenizer=LetterTokenizer()).logprobs == resolved.logprobs


@pytest.mark.parametrize(
    ("field", "asked", "served"),
    [
        ("logprobs", None, None),
        ("logprobs", 0, 0),
        ("logprobs", 20, 20),
        ("logprobs", -1, 100),
        ("logprobs", 101, 100),
        ("prompt_logprobs", -1, 100),
        ("prompt_logprobs", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 99, 99),
        ("top_k", 100, 0),
        ("max_tokens", None, 54),
        ("max_tokens", 54, 54),
        ("max_tokens", 2**62, 54),
        ("max_tokens", 0, 0),
        ("logprobs_mode", None, "raw_logprobs"),
        ("logprobs_mode", "raw_logits", "raw_logits"),
        ("logprob_token_ids", [], None),
        ("logprob_token_ids", [4, 2, 4], [4, 2]),
        ("prompt_logprobs_start", None, None),
        ("skip_reading_prefix_cache", None, False),
        ("skip_reading_prefix_cache", True, True),
    ],
)
def test_what_is_asked_becomes_what_the_engine_reads(field: str, asked: Any, served: Any) -> None:
    for params in (SamplingParams(**{field: asked}), SamplingParams()):
        setattr(params, field, asked)
        assert getattr(params.resolve(**MODEL, max_logprobs=-1), field) == served
        assert getattr(params, field) == asked


@pytest.mark.parametrize("given_flag", [None, False, True])
def test_prompt_logprobs_read_the_cache_unless_told_not_to(given_flag: bool | None) -> None:
    params = SamplingParams(skip_reading_prefix_cache=given_flag, prompt_logprobs=1)
    assert params.resolve(**MODEL).skip_reading_prefix_cache is bool(given_flag)


@pytest.mark.parametrize(
    ("field", "kind"), [("logprobs", "sample"), ("prompt_logprobs", "prompt")], ids=["sample", "prompt"]
)
@pytest.mark.parametrize(
    ("k", "cap", "is_served"),
    [
        (20, 20, True),
        (21, 20, False),
        (-1, 20, False),
        (-1, 99, False),
        (-1, 100, True),
        (-1, -1, True),
        (500, -1, True),
    ],
)
def test_the_cap_counts_the_whole_vocabulary_as_its_size(
    field: str, kind: str, k: int, cap: int, is_served: bool
) -> None:
    params = SamplingParams(**{field: k})
    if is_served:
        params.verify(vocab_size=100, max_logprobs=cap)
        return
    asked = 100 if k == -1 else k
    with pytest.raises(VLLMValidationError, match=f"{kind} logprobs of {asked}.*max allowed: {cap}") as refusal:
        params.verify(vocab_size=100, max_logprobs=cap)
    assert refusal.value.parameter == field and refusal.value.value == k


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"])
@pytest.mark.parametrize("token_id", [-1, 100, HUGE], ids=["negative", "beyond", "huge"])
def test_ids_outside_the_vocabulary_are_refused_by_field(field: str, token_id: int) -> None:
    ids: Any = [5, token_id] if field != "logit_bias" else {5: 1.0, token_id: 1.0}
    params = SamplingParams(**{field: ids})
    with pytest.raises(VLLMValidationError, match=f"{field} must hold token ids from 0 to 99") as refusal:
        params.resolve(**MODEL)
    assert refusal.value.parameter == field


def test_given_ids_have_a_limit_of_their_own_and_an_empty_allow_list_is_refused() -> None:
    SamplingParams(logprob_token_ids=list(range(100)) + list(range(28))).verify(vocab_size=100, max_logprobs=0)
    with pytest.raises(VLLMValidationError, match="at most 128 ids; got 129"):
        SamplingParams(logprob_token_ids=[1] * 129).verify(vocab_size=100)
    with pytest.raises(VLLMValidationError, match="allowed_token_ids must not be empty"):
        SamplingParams(allowed_token_ids=[]).verify(vocab_size=100)


UNSERVED: list[tuple[str, Any, list[Any]]] = [
    ("structured_outputs", StructuredOutputsParams(regex="a"), [None]),
    ("watermarking", True, [None, False]),
    ("thinking_token_budget", 5, [None, -1]),
    ("repetition_detection", RepetitionDetectionParams(3, 1, 2), [None, RepetitionDetectionParams()]),
    ("routed_experts_prompt_start", 2, [0]),
    ("trace_decode_token_ids", [1], [None, []]),
    ("prompt_logprob_token_ids", [[1]], [None, []]),
    ("prompt_logprob_token_ids", np.zeros((2, 1), int), [np.zeros((0, 0))]),
    ("prompt_logprob_start", 0, [None]),
    ("extra_args", {"a": 1}, [None, {}]),
]


@pytest.mark.parametrize(("field", "effective", "neutral"), UNSERVED)
def test_what_is_not_served_is_refused_by_name_when_it_would_have_an_effect(
    field: str, effective: Any, neutral: list[Any]
) -> None:
    with pytest.raises(VLLMUnsupportedError, match=field) as refusal:
        SamplingParams(**{field: effective}).resolve(**MODEL)
    assert refusal.value.parameter == field
    for value in neutral:
        SamplingParams(**{field: value}).resolve(**MODEL)


def test_the_refusal_of_vllm_s_start_names_the_start_of_prompt_logprobs() -> None:
    with pytest.raises(
        VLLMUnsupportedError, match="prompt_logprobs_start is the first token that prompt_logprobs scores"
    ):
        SamplingParams(prompt_logprob_start=2, prompt_logprobs=1).resolve(**MODEL)
    with pytest.raises(TypeError, match="'prompt_logprobs_strat'; did you mean 'prompt_logprobs_start'"):
        SamplingParams(prompt_logprobs_strat=2)  # type: ignore[call-arg]


def test_a_start_of_prompt_logprobs_may_stand_anywhere_in_the_prompt_and_right_behind_it() -> None:
    for start, first in ((None, 1), (0, 1), (1, 1), (2, 2), (9, 9), (10, 10)):
        params = SamplingParams(prompt_logprobs=1, prompt_logprobs_start=start).resolve(**MODEL)
        assert params.first_scored(10) == first
    assert SamplingParams(prompt_logprobs=1).first_scored(1) == 1  # a prompt of one token has none to score
    with pytest.raises(VLLMValidationError, match="at most the prompt's length 10; got 11") as refusal:
        SamplingParams(prompt_logprobs=1, prompt_logprobs_start=11).resolve(**MODEL)
    assert refusal.value.parameter == "prompt_logprobs_start"


def test_only_the_rows_from_the_start_on_count_against_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_LOGPROB_ENTRIES", "10")
    SamplingParams(prompt_logprobs=1, prompt_logprobs_start=6, max_tokens=0).resolve(**MODEL)
    with pytest.raises(VLLMValidationError, match="12 logprob entries"):
        SamplingParams(prompt_logprobs=1, prompt_logprobs_start=5, max_tokens=0).resolve(**MODEL)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "text"),
    [
        (65, 0, r"The decoder prompt \(length 65\) is longer than the maximum model length of 64"),
        (65, 5, r"The decoder prompt \(length 65\) is longer than the maximum model length of 64"),
        (64, 1, r"plus the number of requested output tokens \(at least 1\) is longer than the maximum model length"),
        (
            64,
            None,
            r"plus the number of requested output tokens \(at least 1\) is longer than the maximum model length",
        ),
        (64, 0, None),
        (63, 5, None),
    ],
)
def test_a_prompt_must_leave_room_for_a_token_unless_it_is_only_scored(
    prompt_len: int, max_tokens: int | None, text: str | None
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    model = {"vocab_size": 100, "max_model_len": 64, "prompt_len": prompt_len}
    if text is None:
        assert params.resolve(**model).max_tokens == min(max_tokens or 0, 64 - prompt_len)
        return
    with pytest.raises(VLLMValidationError, match=text):
        params.resolve(**model)


@pytest.mark.parametrize(
    ("fields", "num_entries"),
    [
        ({"prompt_logprobs": 4, "max_tokens": 1}, 10 * 5),
        ({"prompt_logprobs": -1, "max_tokens": 0}, 10 * 100),
        ({"logprobs": 4, "n": 3, "max_tokens": 7}, 3 * 7 * 5),
        ({"logprobs": -1, "max_tokens": 7}, 7 * 100),
        ({"logprob_token_ids": [1, 2], "logprobs": 50, "max_tokens": 7}, 7 * 3),
        ({"prompt_logprobs": 0, "logprobs": 0, "max_tokens": None}, 64),
    ],
)
def test_an_answer_larger_than_the_limit_is_refused_and_one_that_fills_it_is_served(
    fields: dict[str, Any], num_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(**fields)
    monkeypatch.setenv("VLLM_MAX_LOGPROB_ENTRIES", str(num_entries))
    params.resolve(**MODEL, max_logprobs=-1)
    monkeypatch.setenv("VLLM_MAX_LOGPROB_ENTRIES", str(num_entries - 1))
    with pytest.raises(VLLMValidationError, match=f"at most {num_entries - 1} are allowed"):
        params.resolve(**MODEL, max_logprobs=-1)


def test_the_limits_of_n_and_bad_words_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "2")
    with pytest.raises(VLLMValidationError, match="n must be at most 2"):
        SamplingParams(n=3)
    monkeypatch.setenv("VLLM_MAX_NUM_BAD_WORDS", "3")
    with pytest.raises(VLLMValidationError, match="at most 3 token sequences; got 4"):
        SamplingParams(bad_words=["a", "b"]).resolve(**MODEL, tokenizer=LetterTokenizer())


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_further_end_tokens_stop_unless_ignored_and_are_masked_either_way(ignore_eos: bool) -> None:
    params = SamplingParams(stop_token_ids=[9], ignore_eos=ignore_eos)
    resolved = params.resolve(**MODEL, eos_token_id=2, extra_eos_token_ids=[2, 3, 9, 500])
    assert resolved.stop_token_ids == ([9] if ignore_eos else [9, 3])
    assert resolved.all_stop_token_ids == {2, 3, 9} and resolved.eos_token_id == 2
    assert params.all_stop_token_ids == {9} and params.eos_token_id is None
    in_place = SamplingParams(stop_token_ids=[9], ignore_eos=ignore_eos)
    in_place.update_from_generation_config({"eos_token_id": [2, 3]}, 2)
    assert in_place.all_stop_token_ids == {2, 3, 9} and in_place.stop_token_ids == resolved.stop_token_ids


def test_bad_words_become_ids_with_and_without_a_space_and_only_where_a_tokenizer_is() -> None:
    resolved = SamplingParams(bad_words=["ab", " c"]).resolve(**MODEL, tokenizer=LetterTokenizer())
    assert resolved.bad_words_token_ids == [[0, 1], [30, 1], [32]]
    assert SamplingParams().resolve(**MODEL, tokenizer=LetterTokenizer()).bad_words_token_ids is None
    out_of_reach = SamplingParams(bad_words=["ab"]).resolve(**{**MODEL, "vocab_size": 20}, tokenizer=LetterTokenizer())
    assert out_of_reach.bad_words_token_ids == [[0, 1]], "a sequence with an id that can't be drawn needs no mask"
    with pytest.raises(VLLMValidationError, match="bad_words: ' ' has no tokens"):
        SamplingParams(bad_words=[" "]).resolve(**MODEL, tokenizer=LetterTokenizer())
    for field in ("stop", "bad_words"):
        with pytest.raises(VLLMValidationError, match=f"{field} needs a tokenizer"):
            SamplingParams(**{field: ["a"]}).resolve(**MODEL)


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({}, None),
        ({"logprobs": 0}, 0),
        ({"logprobs": 3, "logprob_token_ids": [1]}, 3),
        ({"logprob_token_ids": [1, 2]}, 2),
        ({"logprob_token_ids": []}, None),
    ],
)
def test_the_number_of_logprobs(fields: dict[str, Any], num_logprobs: int | None) -> None:
    assert SamplingParams(**fields).num_logprobs == num_logprobs


# ---------------------------------------------------------------- the classes beside it


def test_structured_outputs_take_exactly_one_kind() -> None:
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ["a", "b"]
    for fields in ({}, {"json": {}, "regex": "a"}, {"whitespace_pattern": "x"}):
        with pytest.raises(VLLMValidationError, match="exactly one"):
            StructuredOutputsParams(**fields)  # type: ignore[arg-type]


def test_beam_search_params_take_width_and_length() -> None:
    params = BeamSearchParams(4, max_tokens=8)
    assert (params.beam_width, params.max_tokens, params.temperature, params.length_penalty) == (4, 8, 0.0, 1.0)
