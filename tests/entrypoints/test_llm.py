"""`LLM` as scripts use it, on a tiny random model."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.tiny_models import write_tiny_model
from tests.tiny_tokenizers import FIRST_BYTE_ID
from vllm import LLM, EngineArgs, SamplingParams
from vllm.entrypoints.interrupt_guard import InterruptGuard
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-for-llm"))


@pytest.fixture(scope="module")
def llm(folder: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(folder), max_logprobs=-1, max_num_batched_tokens=128, kv_cache_memory_bytes=16 << 20) as llm:
        yield llm


def ids_of(outputs) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def assert_idle(llm: LLM) -> None:
    """Nothing runs, and what ran before gave its blocks back."""
    assert not llm.llm_engine.has_unfinished_requests()
    llm.llm_engine.step()
    stats = llm.llm_engine.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


# ---------------------------------------------------------------- prompts and params


def test_answers_come_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    prompts = [[7 + i] * (3 + 50 * (i % 2)) for i in range(8)]
    params = [SamplingParams(max_tokens=20 - 2 * i, ignore_eos=True, temperature=0) for i in range(8)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20 - 2 * i for i in range(8)]
    assert [int(output.request_id) for output in outputs] == sorted(int(output.request_id) for output in outputs)


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    ids = llm.llm_engine.tokenizer.encode("hello you")
    params = SamplingParams(temperature=0, max_tokens=5)
    forms = ["hello you", {"prompt": "hello you"}, {"prompt_token_ids": ids}, ids]
    alone = [llm.generate(form, params)[0] for form in forms]
    together = llm.generate(forms, sampling_params=params)
    for output in [*alone, *together]:
        assert output.prompt_token_ids == ids
        assert ids_of([output]) == ids_of([alone[0]])
    assert [output.prompt for output in together] == ["hello you", "hello you", None, None]
    assert llm.generate([], params) == []


def test_the_callers_params_are_never_changed_and_may_be_shared(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=5, logprobs=1, max_tokens=3)
    before = params.clone()
    outputs = llm.generate([[5, 6], [5, 6]], [params, params])
    assert params == before and params.output_kind is RequestOutputKind.CUMULATIVE
    assert ids_of(outputs[:1]) == ids_of(outputs[1:])
    promised = SamplingParams(max_tokens=3, skip_clone=True)
    llm.generate([5, 6], promised)
    assert promised.output_kind is RequestOutputKind.CUMULATIVE


def test_lengths_that_differ_are_refused_in_known_words(llm: LLM) -> None:
    one = SamplingParams()
    with pytest.raises(VLLMValidationError, match=r"The lengths of prompts \(2\) and params \(1\) must be the same\."):
        llm.generate([[5], [6]], [one])
    with pytest.raises(VLLMValidationError, match=r"prompts \(2\) and priority \(3\)"):
        llm.generate([[5], [6]], one, priority=[1, 2, 3])
    assert_idle(llm)


def test_one_bad_prompt_refuses_the_call_by_its_index_and_nothing_is_left_running(llm: LLM) -> None:
    with pytest.raises(VLLMValidationError, match=r"prompts\[2\].*out of vocabulary") as caught:
        llm.generate([[5], [6], [99999], [7]], SamplingParams(n=2))
    assert caught.value.parameter == "prompt_token_ids" and caught.value.value == 99999
    assert_idle(llm)
    with pytest.raises(VLLMValidationError, match=r"prompts\[1\].*logprob_token_ids"):
        llm.generate([[5], [6]], [SamplingParams(), SamplingParams(logprob_token_ids=[512])])
    with pytest.raises(TypeError):
        llm.generate([[5], [6]], [SamplingParams(), "params"])  # type: ignore[list-item]
    assert_idle(llm)


def test_features_that_are_not_served_are_refused_by_name(llm: LLM) -> None:
    for name in ("beam_search", "encode", "embed", "classify", "score", "start_profile", "get_metrics"):
        with pytest.raises(VLLMUnsupportedError, match=name):
            getattr(llm, name)("x")
    with pytest.raises(VLLMUnsupportedError, match="lora_request"):
        llm.generate([5], lora_request=object())
    with pytest.raises(VLLMUnsupportedError, match="mm_processor_kwargs"):
        llm.generate([5], mm_processor_kwargs={"a": 1})
    with pytest.raises(VLLMUnsupportedError, match="prompt_embeds"):
        llm.generate({"prompt": "a", "prompt_embeds": [1.0]})
    llm.generate([5], SamplingParams(max_tokens=1), lora_request=None, mm_processor_kwargs={})


def test_unseeded_answers_differ_and_a_fresh_llm_repeats_them(folder: pathlib.Path) -> None:
    def script(seed: int) -> list:
        with LLM(str(folder), seed=seed, max_model_len=64, kv_cache_memory_bytes=4 << 20) as llm:
            params = SamplingParams(n=2, temperature=2.0, max_tokens=12, ignore_eos=True)
            return [ids_of(llm.generate([[5, 6], [5, 6]], params)) for _ in range(2)]

    first, second = script(3), script(3)
    assert first == second
    drawn = [tuple(tokens) for call in first for family in call for tokens in family]
    assert len(set(drawn)) == 8
    assert script(4) != first


def test_the_family_s_numbers(llm: LLM) -> None:
    """n, prompt logprobs and a top-k in one call: the shape that scripts rely on."""
    (output,) = llm.generate("hello you", SamplingParams(n=3, seed=1, logprobs=2, prompt_logprobs=1, max_tokens=6))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.prompt_logprobs[0] is None
    for completion in output.outputs:
        chosen = [completion.logprobs[i][token].logprob for i, token in enumerate(completion.token_ids)]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))
        assert "".join(completion.logprobs[i][t].decoded_token for i, t in enumerate(completion.token_ids))


# ---------------------------------------------------------------- chat, defaults, tokenizer


def test_a_text_cut_within_a_character_ends_in_the_mark_that_its_last_token_shows(llm: LLM) -> None:
    first_of_three = FIRST_BYTE_ID + 0xE4
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0, allowed_token_ids=[first_of_three])
    (completion,) = llm.generate("a", params)[0].outputs
    texts = [entry.decoded_token for position in completion.logprobs for entry in position.values()]
    assert texts == ["", "\ufffd\ufffd"] and completion.text == "".join(texts)


def test_a_chat_is_its_template_s_text_without_further_special_tokens(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    tokenizer = llm.llm_engine.tokenizer
    text = tokenizer.apply_chat_template(conversation)
    (alone,) = llm.chat(conversation, params)
    assert alone.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert alone.prompt == text
    several = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "you"}]], params)
    assert ids_of(several[:1]) == ids_of([alone]) and len(several[1].prompt_token_ids) > len(alone.prompt_token_ids)
    (other,) = llm.chat(conversation, params, chat_template="{{ messages[0].content }}!")
    assert other.prompt == "hello!"
    with pytest.raises(VLLMValidationError, match=r"messages\[1\]"):
        llm.chat([conversation, [{"content": "nobody"}]], params)
    with pytest.raises(VLLMUnsupportedError, match="chat_template_content_format"):
        llm.chat(conversation, params, chat_template_content_format="openai")


def test_default_params_are_the_generation_config_s_and_fresh_each_time(folder: pathlib.Path) -> None:
    overrides = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3, "do_sample": True}
    args = {"max_model_len": 64, "kv_cache_memory_bytes": 4 << 20}
    with LLM(str(folder), override_generation_config=overrides, **args) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens, params.top_p) == (0.25, 7, 3, 1.0)
        params.top_k = 1
        assert llm.get_default_sampling_params().top_k == 7
        assert len(llm.generate([5])[0].outputs[0].token_ids) <= 3
    with LLM(str(folder), generation_config="vllm", **args) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_the_tokenizer_for_callers_is_the_hugging_face_one(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer.encode("hello you") == llm.llm_engine.tokenizer.encode("hello you")
    assert hasattr(tokenizer, "convert_ids_to_tokens") and hasattr(tokenizer, "apply_chat_template")
    assert llm.get_tokenizer() is tokenizer


def test_without_a_tokenizer_ids_go_in_and_ids_come_out(folder: pathlib.Path) -> None:
    with LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=4 << 20) as llm:
        (output,) = llm.generate([5, 6], SamplingParams(max_tokens=2, logprobs=0, ignore_eos=True))
        completion = output.outputs[0]
        assert completion.text == "" and len(completion.token_ids) == 2
        assert completion.logprobs[0][completion.token_ids[0]].decoded_token is None
        with pytest.raises(VLLMValidationError, match="tokenizer"):
            llm.generate("text")
        with pytest.raises(VLLMValidationError, match="stop"):
            llm.generate([5], SamplingParams(stop=["x"]))
        with pytest.raises(VLLMValidationError, match="tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])


# ---------------------------------------------------------------- Ctrl-C


LONG = SamplingParams(n=4, max_tokens=400, ignore_eos=True, prompt_logprobs=0)


def assert_usable(llm: LLM, expected: list) -> None:
    assert_idle(llm)
    assert ids_of(llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5))) == expected


def test_ctrl_c_ends_what_it_interrupts_and_the_llm_is_usable_at_once(llm: LLM) -> None:
    expected = ids_of(llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5)))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(1000):
            llm.generate([[5, 6, 7]] * 8, LONG)
    timer.join()
    assert_usable(llm, expected)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", [1, 2, 5])
def test_ctrl_c_waits_for_the_end_of_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """A step that is broken off would leave scheduler and runner with different ideas."""
    expected = ids_of(llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5)))
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    execute, begun, ended = runner.execute_model, [], []

    def execute_with_ctrl_c(step):
        begun.append(step)
        if len(begun) == moment:
            signal.raise_signal(signal.SIGINT)
        made = execute(step)
        ended.append(step)
        return made

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "execute_model", execute_with_ctrl_c)
        llm.generate([[5] * 300, [6, 7]], LONG)
    assert len(begun) == len(ended) == moment
    assert_usable(llm, expected)


def test_impatience_breaks_a_step_that_hangs() -> None:
    with pytest.raises(KeyboardInterrupt), InterruptGuard():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        pytest.fail("the third press must go through")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_press_after_the_last_step_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt), InterruptGuard():
        signal.raise_signal(signal.SIGINT)


def test_the_llm_works_in_a_thread_that_sees_no_signals(llm: LLM) -> None:
    answers: list = []
    thread = threading.Thread(target=lambda: answers.extend(llm.generate([5], SamplingParams(max_tokens=2))))
    thread.start()
    thread.join()
    assert len(answers) == 1


# ---------------------------------------------------------------- progress


class FakeBar:
    made: list["FakeBar"] = []  # noqa: RUF012

    def __init__(self, **settings: object) -> None:
        self.settings, self.count, self.postfix, self.is_closed = settings, 0, "", False
        self.made.append(self)

    def update(self, count: int) -> None:
        self.count += count

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self.postfix = text

    def close(self) -> None:
        self.is_closed = True


def test_a_callable_takes_the_bar_s_place(llm: LLM) -> None:
    llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=2), use_tqdm=FakeBar)
    bar = FakeBar.made.pop()
    assert (bar.settings["total"], bar.count, bar.is_closed) == (2, 2, True)
    assert "prompt:" in bar.postfix and "output:" in bar.postfix
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=FakeBar)
    assert "positions/s" in FakeBar.made.pop().postfix
    with pytest.raises(VLLMValidationError):
        llm.generate([[5], []], use_tqdm=FakeBar)
    assert all(bar.is_closed for bar in FakeBar.made)


def test_the_bar_shows_only_on_a_terminal_unless_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for use_tqdm, shows in ((None, False), (False, False), (True, True)):
        llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=use_tqdm)
        assert ("Processed prompts" in capsys.readouterr().err) is shows


# ---------------------------------------------------------------- enqueue, life and death


def test_enqueued_prompts_are_answered_in_order_and_others_in_between(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = ids_of(llm.generate([[5], [6], [7]], params))
    ids = [*llm.enqueue([[5], [6]], params), *llm.enqueue([7], params)]
    llm.generate([9], SamplingParams(max_tokens=40, ignore_eos=True))  # ends after them
    outputs = llm.wait_for_completion()
    assert [output.request_id for output in outputs] == ids and ids_of(outputs) == expected
    assert llm.wait_for_completion() == []
    assert_idle(llm)


def test_attributes_that_clients_read(llm: LLM) -> None:
    assert llm.llm_engine.model_config.max_model_len == llm.model_config.max_model_len == 512
    assert llm.llm_engine.vllm_config.model_config.get_vocab_size() == 512
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    assert hasattr(model, "load_weights")
    assert llm.apply_model(lambda found: found is model) == [True]
    assert isinstance(next(llm.request_counter), int)
    assert llm.reset_prefix_cache() is True
    assert len(repr(llm)) < 300 and "max_model_len=512" in repr(llm)


def test_unknown_keywords_and_bad_values_of_the_constructor(folder: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        LLM(str(folder), max_nums_seqs=3)
    with pytest.raises(ValueError, match="data_parallel_size"):
        LLM(str(folder), data_parallel_size=2)
    with pytest.raises(ValueError, match="no such folder"):
        LLM(str(folder / "nowhere"))


def test_an_llm_can_be_made_of_engine_args(folder: pathlib.Path) -> None:
    with LLM.from_engine_args(EngineArgs(str(folder), max_model_len=64, num_gpu_blocks_override=8)) as llm:
        assert llm.model_config.max_model_len == 64


def test_a_forgotten_llm_gives_its_memory_back(folder: pathlib.Path) -> None:
    llm = LLM(str(folder), max_model_len=64, num_gpu_blocks_override=8)
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    assert runner.kv_cache.layers
    del llm
    gc.collect()
    assert not runner.kv_cache.layers


def test_importing_the_llm_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, vllm.entrypoints.llm; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_first_token_needs_no_transformers(folder: pathlib.Path) -> None:
    code = (
        "import sys; from vllm import LLM\n"
        f"llm = LLM({str(folder)!r}, max_model_len=64, kv_cache_memory_bytes=4 << 20)\n"
        "print(llm.generate('hello')[0].outputs[0].finish_reason, 'transformers' in sys.modules)"
    )
    started = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout.split()[-1:] == ["False"], found.stderr
    assert found.stderr.count("\n") <= 3, f"a start should say one line: {found.stderr}"
    assert time.monotonic() - started < 120
