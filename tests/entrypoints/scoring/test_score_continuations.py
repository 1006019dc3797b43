"""`LLM.score_continuations`: values, texts as lm-eval reads them, what is computed, what is refused."""

import os
import signal
import threading

import numpy as np
import pytest

from tests.entrypoints.scoring.conftest import Reference, assert_idle
from vllm import LLM
from vllm.entrypoints.scoring.results import ContinuationScore
from vllm.exceptions import VLLMValidationError


def read_like_lm_eval(llm: LLM, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """lm-eval's rule: trailing spaces move, and the whole's tokens behind as many as the context alone has."""
    encode = llm.llm_engine.tokenizer.encode
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    context_ids = encode(context, add_special_tokens=False)
    return context_ids, encode(context + continuation, add_special_tokens=False)[len(context_ids) :]


def check_score(reference: Reference, score: ContinuationScore, context: list[int], continuation: list[int]) -> None:
    rows = reference([*context, *continuation])[len(context) - 1 : -1]
    want = [rows[i, token].item() for i, token in enumerate(continuation)]
    assert score.token_ids == continuation
    assert np.abs(np.array(score.logprobs) - want).max() < 1e-4
    assert score.logprob == pytest.approx(sum(want), abs=1e-4 * len(want))
    assert score.ranks == [1 + int((row > row[token]).sum()) for row, token in zip(rows, continuation, strict=True)]
    assert score.is_greedy == (rows.argmax(-1).tolist() == continuation)
    assert score.num_context_tokens == len(context)


def take_greedy(reference: Reference, context: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(int(reference([*context, *made])[-1].argmax()))
    return made


def test_texts_are_read_as_lm_eval_does_and_valued_as_transformers_does(llm: LLM, reference: Reference) -> None:
    contexts = ["the way they look at ", "the way they look at you and all", "so many\n\n", "the way they look at "]
    continuations = [["the word", "one", " two"], [" and more", " of"], ["people"], ["he", "the word"]]
    scores = llm.score_continuations(contexts, continuations)
    assert [len(row) for row in scores] == [3, 2, 1, 2]
    for context, row, scored in zip(contexts, continuations, scores, strict=True):
        for continuation, score in zip(row, scored, strict=True):
            check_score(reference, score, *read_like_lm_eval(llm, context, continuation))
            assert score.num_bytes == len(continuation.encode())
            assert score.logprob_per_byte == pytest.approx(score.logprob / len(continuation))
    assert scores[0][0] == scores[3][1]
    assert_idle(llm)


def test_token_ids_one_token_many_tokens_and_what_greedy_decoding_writes(llm: LLM, reference: Reference) -> None:
    context = [5, 6, 7, 8] * 10
    greedy = take_greedy(reference, context, 4)
    row = [[9], [10], greedy[:1], [11, 12, 13], [9, 30], greedy, [*greedy[:3], greedy[3] ^ 1]]
    (scores,) = llm.score_continuations(context, row)
    for continuation, score in zip(row, scores, strict=True):
        check_score(reference, score, context, continuation)
    assert [score.is_greedy for score in scores] == [False, False, True, False, False, True, False]


def test_tokenised_apart_keeps_the_space_where_it_stands(llm: LLM, reference: Reference) -> None:
    encode = llm.llm_engine.tokenizer.encode
    ((score,),) = llm.score_continuations(["the way "], [["they look"]], tokenization="separate")
    check_score(reference, score, encode("the way "), encode("they look"))
    ((joint,),) = llm.score_continuations(["the way "], [["they look"]])
    assert joint.token_ids != score.token_ids


def test_a_pair_with_token_ids_in_it_is_tokenised_apart(llm: LLM, reference: Reference) -> None:
    encode = llm.llm_engine.tokenizer.encode
    ((one, two),) = llm.score_continuations("the way ", [[9, 10], "they"])
    check_score(reference, one, encode("the way "), [9, 10])
    check_score(reference, two, *read_like_lm_eval(llm, "the way ", "they"))
    assert one.num_bytes == len(llm.llm_engine.tokenizer.token_bytes[9] + llm.llm_engine.tokenizer.token_bytes[10])


def test_an_empty_context_is_the_model_s_own_start(llm: LLM, reference: Reference) -> None:
    tokenizer = llm.llm_engine.tokenizer
    ((score,),) = llm.score_continuations([""], [["the way"]])
    check_score(reference, score, [tokenizer.bos_token_id], tokenizer.encode("the way"))


def test_more_first_tokens_than_one_request_may_name(llm: LLM, reference: Reference) -> None:
    context, row = [5, 6, 7], [[token] for token in range(3, 303)]
    (scores,) = llm.score_continuations(context, row)
    want = reference(context)[-1]
    assert np.abs(np.array([score.logprob for score in scores]) - want[3:303].numpy()).max() < 1e-4


def test_what_is_too_long_is_cut_on_the_left_and_said(llm: LLM, reference: Reference) -> None:
    context = [3 + i % 200 for i in range(260)]
    long = [7 + i % 90 for i in range(300)]
    (one, two, three) = llm.score_continuations(context, [[9], [9, 10, 11], long])[0]
    check_score(reference, one, context[-255:], [9])
    check_score(reference, two, context[-253:], [9, 10, 11])
    assert (one.num_cut_context_tokens, two.num_cut_context_tokens) == (5, 7)
    check_score(reference, three, long[44:45], long[45:])
    assert (three.num_cut_context_tokens, three.num_cut_tokens, three.num_tokens) == (260, 45, 255)
    assert (one.num_cut_tokens, two.num_cut_tokens) == (0, 0)


def count_computed(llm: LLM, contexts: list[list[int]], rows: list[list[list[int]]]) -> int:
    llm.reset_prefix_cache()
    before = llm.llm_engine.get_stats().num_computed_positions
    llm.score_continuations(contexts, rows)
    return llm.llm_engine.get_stats().num_computed_positions - before


def test_a_shared_beginning_a_question_and_its_continuations_are_computed_once_each(llm: LLM) -> None:
    """The beginning and the questions end in the middle of a block; the last token of a continuation never runs."""
    shared = [3 + i % 100 for i in range(90)]
    questions = [[200 + i, *range(210, 210 + 7 + i)] for i in range(6)]
    contexts = [[*shared, *question] for question in questions]
    rows = [[[300, 301 + i], [302], [303, 304, 305], [306, 307, 308, 309]] for i in range(6)]
    num_rest = sum(len(continuation) - 1 for row in rows for continuation in row)
    assert count_computed(llm, contexts, rows) == len(shared) + sum(map(len, questions)) + num_rest
    assert count_computed(llm, contexts[::-1], rows) == len(shared) + sum(map(len, questions)) + num_rest


def test_contexts_that_begin_alike_need_not_stand_together(llm: LLM) -> None:
    shared = [[3 + i % 100 for i in range(90)], [9 + i % 100 for i in range(55)], [200 + i for i in range(35)]]
    contexts = [[*beginning, 300 + i, 301 + i] for i in range(4) for beginning in shared]
    assert count_computed(llm, contexts, [[[9], [10]]] * 12) == 90 + 55 + 35 + 12 * 2


def test_single_continuations_of_many_contexts_run_as_one_request_each(llm: LLM) -> None:
    contexts = [[3 + i, *range(20, 40)] for i in range(5)]
    assert count_computed(llm, contexts, [[[9, 10]]] * 5) == 5 * (21 + 1)


def test_equal_contexts_and_equal_continuations_are_computed_once(llm: LLM) -> None:
    context = list(range(10, 50))
    assert count_computed(llm, [context] * 8, [[[9, 10], [11, 12], [9, 10]]] * 8) == 40 + 2


def test_a_salt_keeps_contexts_apart(llm: LLM) -> None:
    contexts = [{"prompt_token_ids": list(range(10, 42)), "cache_salt": salt} for salt in ("a", "b")]
    before = llm.llm_engine.get_stats().num_computed_positions
    one, two = llm.score_continuations(contexts, [[[9, 10]]] * 2)
    assert llm.llm_engine.get_stats().num_computed_positions - before == 2 * 33
    assert one[0].logprob == pytest.approx(two[0].logprob, abs=1e-4)


def test_more_contexts_than_the_cache_holds_at_once(folder, reference: Reference) -> None:
    contexts = [[3 + i, *range(20, 60)] for i in range(12)]
    rows = [[[9, 10], [11, 12, 13], [14]]] * 12
    with LLM(str(folder), max_model_len=64, num_gpu_blocks_override=8) as small:
        scores = small.score_continuations(contexts, rows)
    for context, row, scored in zip(contexts, rows, scores, strict=True):
        for continuation, score in zip(row, scored, strict=True):
            check_score(reference, score, context, continuation)


@pytest.mark.parametrize("off", ["enable_prefix_caching", "enable_prompt_logprobs_cache"])
def test_without_a_cache_the_values_are_the_same(folder, reference: Reference, off: str) -> None:
    context, row = list(range(20, 60)), [[9, 10], [11, 12, 13], [14]]
    with LLM(str(folder), max_model_len=64, kv_cache_memory_bytes=4 << 20, **{off: False}) as plain:
        (scores,) = plain.score_continuations(context, row)
    for continuation, score in zip(row, scores, strict=True):
        check_score(reference, score, context, continuation)


@pytest.mark.parametrize(
    ("contexts", "continuations", "parameter", "message"),
    [
        ([[5], [6]], [[[7]]], "continuations", "2 contexts, 1 lists"),
        ([[5], [6]], [[[7]], [[8], []]], "continuations", r"continuations\[1\]\[1\] is empty"),
        (["a", "b"], [["c"], [""]], "continuations", r"continuations\[1\]\[0\] is empty"),
        ([[5], [6]], [[[7]], [[8], [512]]], "continuations", r"continuations\[1\]\[1\].*512.*from 0 to 511"),
        ([[5], [-1]], [[[7]], [[8]]], "contexts", r"contexts\[1\].*-1.*from 0 to 511"),
        ([[5], []], [[[7]], [[8]]], "contexts", r"contexts\[1\] is empty"),
        ([[5], [6.5]], [[[7]], [[8]]], "contexts", r"contexts\[1\].*integers"),
        ([[5], [6]], [[[7]], [9, 10]], "continuations", r"continuations\[1\] must be a list of continuations"),
        ([[5], [6]], [[[7]], "text"], "continuations", r"continuations\[1\] must be a list of continuations"),
        ([[5], [6]], [[[7]], [None]], "continuations", r"continuations\[1\]\[0\] must be a str or a list"),
        (["a"], "b", "continuations", "must be a list"),
        (5, [["b"]], "contexts", "must be a list"),
        (["a"], [[{"prompt": "b"}]], "continuations", "got a dict"),
    ],
)
def test_what_can_t_be_scored_is_refused_by_its_place(llm: LLM, contexts, continuations, parameter, message) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        llm.score_continuations(contexts, continuations)
    assert caught.value.parameter == parameter
    assert_idle(llm)


def test_an_unknown_tokenization_is_refused(llm: LLM) -> None:
    with pytest.raises(VLLMValidationError, match="joint, separate"):
        llm.score_continuations("a", ["b"], tokenization="both")


def test_nothing_to_score_is_no_error(llm: LLM) -> None:
    assert llm.score_continuations([], []) == []
    assert llm.score_continuations(["a"], [[]]) == [[]]


def test_ctrl_c_ends_what_it_interrupts_and_the_llm_is_usable_at_once(llm: LLM) -> None:
    contexts = [[3 + i, *range(20, 200)] for i in range(40)]
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            llm.reset_prefix_cache()
            llm.score_continuations(contexts, [[[9, 10], [11]]] * 40)
    timer.join()
    assert_idle(llm)
    assert len(llm.score_continuations([5, 6], [[7]])[0]) == 1


def test_requests_that_wait_elsewhere_are_answered_to_whom_they_belong(llm: LLM) -> None:
    llm.enqueue([[5, 6, 7]])
    llm.score_continuations([5, 6], [[7, 8]])
    assert [output.prompt_token_ids for output in llm.wait_for_completion()] == [[5, 6, 7]]


def test_logits_that_are_no_numbers_fail_their_pairs_and_no_others(folder) -> None:
    with LLM(str(folder), max_model_len=64, kv_cache_memory_bytes=4 << 20) as broken:

        def poison(model) -> None:
            model.model.embed_tokens.weight.data[77] = float("nan")

        broken.apply_model(poison)
        bad, good = broken.score_continuations([[77, 5], [5, 6]], [[[9, 10], [11, 12]], [[9, 10]]])
    assert all(score.error and np.isnan(score.logprob) and not score.is_greedy for score in bad)
    assert bad[0].to_dict()["logprob"] is None
    assert good[0].error is None and good[0].num_tokens == 2
