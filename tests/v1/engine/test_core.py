"""The core as a whole: a step that breaks off, weights that change, sleep, and what it settles at the start."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from tests.v1.core.scripted_engine import ScriptedRunner, make_config, make_request
from vllm.config import VllmConfig
from vllm.exceptions import VLLMServerError, VLLMUnsupportedError, VLLMValidationError
from vllm.v1.engine.core import UTILITY_CALLS, EngineCore
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreReady, FinishReason, ModelRunnerOutput, SchedulerOutput

NUM_BLOCKS = 12
PROMPT = list(range(1, 10))


class ScriptedExecutor(Executor):
    """Runs steps on the scripted runner; `trouble` is raised before or after the next step has run."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.runner = ScriptedRunner(vllm_config, NUM_BLOCKS)
        self.runner.may_leave_unknown = True
        self.trouble: BaseException | None = None
        self.trouble_comes_late = False
        self.calls: list[Any] = []
        self.plans: list[SchedulerOutput] = []

    def start(self) -> EngineCoreReady:
        length = self.vllm_config.model_config.max_model_len
        return EngineCoreReady(
            num_gpu_blocks=NUM_BLOCKS, max_model_len=length, dtype="float32", device="cpu", num_threads=1
        )

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(step)
        trouble, self.trouble = self.trouble, None
        if trouble is not None and not self.trouble_comes_late:
            raise trouble
        made = self.runner.execute_model(step)
        if trouble is not None:
            raise trouble
        return made

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        self.calls.append((method, args))
        if method == "load_weights":
            self._notify_weights_changed()
        return [None]

    @property
    def is_sleeping(self) -> bool:
        return False

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def make_core(**options: object) -> EngineCore:
    return EngineCore(make_config(**options), ScriptedExecutor)


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        for output in core.step().list_outputs():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def answer(core: EngineCore, request_id: str = "probe") -> list[int]:
    core.add_request(make_request(request_id, PROMPT, ignore_eos=True))
    return run(core)[request_id]


def test_an_engine_with_nothing_to_do_answers_without_running() -> None:
    core = make_core()
    assert not core.has_work()
    assert core.step().outputs == []
    assert core.model_executor.plans == []


def test_what_left_reaches_the_runner_even_when_nothing_runs() -> None:
    core = make_core()
    answer(core)
    assert core.model_executor.runner.batch.keys() == {"probe"}
    core.step()
    assert not core.model_executor.runner.batch
    core.step()
    assert len(core.model_executor.plans) == 6


def test_a_refused_request_leaves_nothing_behind() -> None:
    core = make_core()
    with pytest.raises(VLLMValidationError, match="max_model_len=48"):
        core.add_request(make_request("big", [1] * 50))
    assert not core.has_work()


@pytest.mark.parametrize("trouble", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_step_that_raises_ends_what_ran_and_nothing_else(
    trouble: BaseException, is_late: bool, num_steps: int
) -> None:
    """Whether the runner had taken the step in or not, it and the scheduler agree again in the next one."""
    want = answer(make_core())
    core = make_core(max_num_seqs=2)
    core.add_request(make_request("fam", PROMPT, n=3, ignore_eos=True))
    core.add_request(make_request("single", PROMPT, max_tokens=9, ignore_eos=True))
    core.add_request(make_request("waits", PROMPT, ignore_eos=True))
    for _ in range(num_steps):
        core.step()
    core.model_executor.trouble, core.model_executor.trouble_comes_late = trouble, is_late
    with pytest.raises(type(trouble)) as caught:
        core.step()
    assert caught.value is trouble
    assert core.get_stats().num_running == 0
    assert not core.scheduler.requests.keys() & {"fam", "0_fam", "1_fam", "2_fam"}
    assert run(core)["waits"] == want
    core.step()
    assert not core.model_executor.runner.batch and core.get_stats().num_used_blocks == 0
    assert answer(core) == want


@pytest.mark.parametrize("place", ["_schedule_running", "_admit_waiting", "_take_tokens", "_leave_batch", "_fork"])
def test_ctrl_c_inside_the_scheduler_leaves_a_usable_engine(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = answer(make_core())
    core = make_core(max_num_seqs=2)
    core.add_request(make_request("single", PROMPT, max_tokens=2, ignore_eos=True))
    core.step()
    core.add_request(make_request("fam", PROMPT, n=3, ignore_eos=True))
    whole = getattr(core.scheduler, place)

    def break_off(*args: Any) -> Any:
        whole(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(core.scheduler, place, break_off)
    with pytest.raises(KeyboardInterrupt):
        run(core)
    assert not core.has_work() and core.get_stats().num_used_blocks == 0
    core.abort_requests(["single", "fam"])
    assert answer(core) == want
    core.step()
    assert not core.model_executor.runner.batch


def test_new_weights_make_the_cache_forget() -> None:
    core = make_core()
    answer(core, "first")
    core.collective_rpc("load_weights", None, ("weights",), None)
    core.add_request(make_request("second", PROMPT))
    assert core.step().outputs[0].num_cached_tokens == 0


def test_the_cache_can_be_reset_by_hand() -> None:
    core = make_core()
    answer(core, "first")
    assert core.reset_prefix_cache() is True
    core.add_request(make_request("second", PROMPT))
    assert core.step().outputs[0].num_cached_tokens == 0


def test_requests_survive_a_sleep_that_loses_the_kv_cache() -> None:
    want = answer(make_core())
    core = make_core()
    core.add_request(make_request("probe", PROMPT, ignore_eos=True))
    tokens = core.step().list_outputs()[0].new_token_ids + core.step().list_outputs()[0].new_token_ids
    core.sleep(2)
    assert core.get_stats().num_used_blocks == 0
    core.model_executor.runner.kv = [[None] * len(block) for block in core.model_executor.runner.kv]
    core.wake_up(["kv_cache"])
    assert tokens + run(core)["probe"] == want
    assert core.model_executor.calls == [("sleep", (2,)), ("wake_up", (["kv_cache"],))]


@pytest.mark.parametrize(("is_given", "length"), [(False, 48), (True, 64)])
def test_a_length_nobody_gave_is_lowered_to_what_the_cache_holds(is_given: bool, length: int) -> None:
    config = make_config(block_size=4, max_model_len=64)
    model_config = dataclasses.replace(config.model_config, max_model_len_is_given=is_given)
    core = EngineCore(dataclasses.replace(config, model_config=model_config), ScriptedExecutor)
    assert core.ready.max_model_len == core.vllm_config.model_config.max_model_len == length
    core.add_request(make_request("long", PROMPT, max_tokens=length - len(PROMPT) if not is_given else 1))


def test_a_pause_lasts_until_its_last_reason_is_gone() -> None:
    core = make_core()
    assert core.may_step and not core.is_sleeping()
    core.pause("generation")
    core.pause("sleep")
    assert not core.may_step and core.is_sleeping()
    core.wake_up(["scheduling"])
    assert core.model_executor.calls == [] and not core.is_sleeping()
    assert not core.may_step, "it is still paused for the other reason"
    core.resume("generation")
    core.resume("never given")
    assert core.may_step
    core.pause("sleep")
    core.wake_up(["scheduling", "weights"])
    assert core.may_step and core.model_executor.calls == [("wake_up", (["weights"],))]
    core.pause("sleep")
    core.wake_up(None)
    assert core.may_step and core.model_executor.calls[-1] == ("wake_up", (None,))


def test_private_methods_of_workers_are_not_called() -> None:
    core = make_core()
    with pytest.raises(VLLMUnsupportedError, match="no public method"):
        core.collective_rpc("_secret", None, (), None)
    assert core.model_executor.calls == []


def test_every_control_method_declares_what_it_answers() -> None:
    """Clients of another process bring answers back to the declared type."""
    assert UTILITY_CALLS.keys() >= {"get_stats", "reset_prefix_cache", "sleep", "wake_up", "collective_rpc"}
    for name, method in UTILITY_CALLS.items():
        assert getattr(EngineCore, name) is method and "return" in get_type_hints(method)


def test_shutdown_reaches_the_executor() -> None:
    core = make_core()
    core.shutdown()
    assert core.model_executor.calls == ["shutdown"]


def test_an_abort_in_the_middle_is_forgotten_by_both_sides() -> None:
    core = make_core()
    core.add_request(make_request("fam", PROMPT, n=3, ignore_eos=True))
    core.step()
    core.step()
    core.abort_requests(["fam"])
    assert not core.has_work()
    core.step()
    assert not core.model_executor.runner.batch


def test_the_engines_own_errors_are_the_servers_fault() -> None:
    assert issubclass(EngineDeadError, VLLMServerError) and issubclass(EngineGenerateError, VLLMServerError)
    assert "died" in str(EngineDeadError())


def test_an_errors_answer_comes_from_the_core() -> None:
    core = make_core()
    core.add_request(make_request("bad", PROMPT))
    core.model_executor.runner.errors["bad"] = "its logits hold NaN"
    (output,) = core.step().outputs
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "its logits hold NaN")
    assert not core.has_work()


def test_the_core_loads_neither_torch_nor_a_worker() -> None:
    code = (
        "import sys, vllm.v1.engine.core\n"
        "far = ('torch', 'transformers', 'vllm.v1.worker')\n"
        "bad = [module for module in sys.modules if module.startswith(far)]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
