"""The core as a process of its own: it computes what one in this process does, and comes and goes cleanly."""

import gc
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from tests.tiny_models import copy_model
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import ModelLoadError, VLLMServerError, VLLMUnsupportedError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.core import UTILITY_CALLS, EngineCore
from vllm.v1.engine.core_client_launch import _make_folder
from vllm.v1.engine.core_client_mp import SyncMPClient
from vllm.v1.engine.core_proc import MAX_FAILED_STEPS, EngineCoreProcess
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequest,
    Answer,
    Call,
    Decoder,
    Encoder,
    MessageFromCore,
    Refused,
    StepDone,
)
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.messages import EngineCoreRequest, FinishReason, ModelRunnerOutput, SchedulerOutput

ROOT = pathlib.Path(__file__).resolve().parents[3]


def make_args(folder: pathlib.Path, **settings: Any) -> EngineArgs:
    return EngineArgs(str(folder), max_model_len=64, max_logprobs=-1, kv_cache_memory_bytes=4 << 20, **settings)


@pytest.fixture(scope="module")
def mp_engine(tiny_folder: pathlib.Path) -> Iterator[LLMEngine]:
    """An engine whose core is a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        engine = LLMEngine.from_engine_args(make_args(tiny_folder))
    yield engine
    engine.shutdown()


def make_add(name: str, num_children: int = 1, **fields: Any) -> AddRequest:
    given = {"max_tokens": 20, "ignore_eos": True, **fields}
    params = SamplingParams(**given).resolve(vocab_size=512, max_model_len=64, prompt_len=3)
    request = EngineCoreRequest(
        request_id=name, prompt_token_ids=[5, 6, 7], sampling_params=params, seeds=list(range(num_children))
    )
    return AddRequest(request)


def get_pid(engine: LLMEngine) -> int:
    assert isinstance(engine.engine_core, SyncMPClient)
    return engine.engine_core._process.pid


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # what an init that does not reap leaves of it


def wait_until_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({out.request_id: out for out in engine.step()})
    return outputs


MIXED = {
    "greedy": SamplingParams(temperature=0, max_tokens=6, logprobs=2),
    "whole vocabulary": SamplingParams(seed=1, max_tokens=4, logprobs=-1, prompt_logprobs=-1),
    "family": SamplingParams(n=3, seed=5, max_tokens=5, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY),
    "whole family": SamplingParams(n=2, seed=9, max_tokens=3, logprobs=-1),
    "wide": SamplingParams(seed=2, max_tokens=3, logprobs=200, prompt_logprobs=150),
    "nothing asked": SamplingParams(seed=3, max_tokens=5),
    "given ids": SamplingParams(seed=4, max_tokens=3, logprob_token_ids=[7, 3, 300]),
    "score only": SamplingParams(max_tokens=0, prompt_logprobs=3),
    "raw logits": SamplingParams(seed=6, max_tokens=3, logprobs=3, logprobs_mode="raw_logits"),
    "stop string": SamplingParams(temperature=0, max_tokens=20, stop=["e", "a", "o"], logprobs=1),
}


def run_mixed(engine: LLMEngine) -> dict[str, RequestOutput]:
    engine.reset_prefix_cache()
    for length, (name, params) in enumerate(MIXED.items(), start=3):
        fields = {"output_kind": RequestOutputKind.FINAL_ONLY}
        engine.add_request(name, list(range(10, 10 + 3 * length)), SamplingParams(**{**as_fields(params), **fields}))
    return finish(engine)


def as_fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__ if not name.startswith("_")}


def assert_equal_logprobs(one: Any, other: Any) -> None:
    assert (one is None) == (other is None)
    if one is not None:
        for column, other_column in zip(one.to_arrays(), other.to_arrays(), strict=True):
            np.testing.assert_allclose(column, other_column, rtol=0, atol=1e-4)  # promise 10: rounding of another batch


def test_a_mixed_batch_comes_out_as_from_a_core_in_this_process(mp_engine: LLMEngine, engine: LLMEngine) -> None:
    there, here = run_mixed(mp_engine), run_mixed(engine)
    assert there.keys() == here.keys() == MIXED.keys()
    for name, expected in here.items():
        out = there[name]
        assert_equal_logprobs(out.prompt_logprobs, expected.prompt_logprobs)
        for completion, other in zip(out.outputs, expected.outputs, strict=True):
            for field in ("index", "text", "token_ids", "finish_reason", "stop_reason"):
                assert getattr(completion, field) == getattr(other, field), (name, field)
            assert_equal_logprobs(completion.logprobs, other.logprobs)


def test_a_whole_vocabulary_row_is_whole(mp_engine: LLMEngine) -> None:
    mp_engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=2, logprobs=-1))
    (out,) = finish(mp_engine).values()
    for i, token_id in enumerate(out.outputs[0].token_ids):
        token_ids, values, ranks = out.outputs[0].logprobs.row_values(i)
        assert token_ids[0] == token_id and sorted(token_ids.tolist()) == list(range(512))
        assert np.exp(values.astype(np.float64)).sum() == pytest.approx(1, abs=1e-4)
        assert sorted(ranks.tolist()) == list(range(1, 513))


def test_what_can_never_run_is_refused_at_once_and_leaves_nothing(mp_engine: LLMEngine) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        mp_engine.add_request("long", [5] * 64, SamplingParams(max_tokens=1))
    assert caught.value.parameter is not None
    assert not mp_engine.has_unfinished_requests() and mp_engine.get_stats().num_waiting == 0


def test_a_refusal_that_only_the_core_can_give_comes_back_for_its_request(mp_engine: LLMEngine) -> None:
    client = mp_engine.engine_core
    for _ in range(2):
        client.add_request(make_add("twice").request)
    assert client.has_work()
    (refused,) = [out for out in client.get_output().outputs if out.finish_reason is FinishReason.ERROR]
    assert refused.request_id == "twice" and "in use" in (refused.error or "")
    client.abort_requests(["twice"])
    while client.has_work():
        client.get_output()
    assert client.call_utility(EngineCore.get_stats).num_used_blocks == 0


def test_aborted_requests_free_their_blocks(mp_engine: LLMEngine) -> None:
    mp_engine.add_request("a", [5, 6, 7], SamplingParams(n=4, max_tokens=30, ignore_eos=True))
    mp_engine.step()
    assert mp_engine.get_stats().num_used_blocks > 0
    mp_engine.abort_request("a")
    mp_engine.step()
    assert mp_engine.get_stats().num_used_blocks == 0


def test_control_reaches_the_core(mp_engine: LLMEngine) -> None:
    assert mp_engine.reset_prefix_cache() is True
    mp_engine.sleep(1)
    assert mp_engine.is_sleeping()
    mp_engine.wake_up(["weights"])
    assert mp_engine.is_sleeping()
    mp_engine.wake_up()
    assert not mp_engine.is_sleeping()
    with pytest.raises(VLLMValidationError, match="level must be 1 or 2"):
        mp_engine.sleep(3)
    assert run_mixed(mp_engine).keys() == MIXED.keys()


def test_workers_are_called_by_name_and_functions_stay_here(mp_engine: LLMEngine) -> None:
    assert mp_engine.collective_rpc("wake_up", kwargs={"tags": ["weights"]}) == [None]
    with pytest.raises(VLLMUnsupportedError, match="name"):
        mp_engine.collective_rpc(lambda worker: worker)
    with pytest.raises(VLLMUnsupportedError, match="no public method"):
        mp_engine.collective_rpc("__init__")
    with pytest.raises(VLLMServerError, match="AttributeError"):
        mp_engine.collective_rpc("no_such_method")
    with pytest.raises(AttributeError, match="VLLM_ENABLE_V1_MULTIPROCESSING"):
        _ = mp_engine.model_executor


def test_an_idle_core_sleeps(mp_engine: LLMEngine) -> None:
    def count_ticks() -> int:
        fields = pathlib.Path(f"/proc/{get_pid(mp_engine)}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    mp_engine.get_stats()
    before = count_ticks()
    time.sleep(0.5)
    assert (count_ticks() - before) / os.sysconf("SC_CLK_TCK") < 0.1


def test_signals_are_the_front_ends_matter(mp_engine: LLMEngine) -> None:
    pid = get_pid(mp_engine)
    assert os.getsid(pid) == pid, "Ctrl-C in the front end's terminal would reach the core"
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    mp_engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=2))
    assert len(finish(mp_engine)) == 1


def test_nothing_of_the_sockets_is_left_once_both_sides_are_connected(mp_engine: LLMEngine) -> None:
    assert not os.path.exists(mp_engine.engine_core._process._folder)


def test_the_sockets_lie_where_only_this_user_may_enter_and_the_path_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = _make_folder()
    assert len(folder) <= 100 and stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    os.rmdir(folder)
    assert list(deep.iterdir()) == []


def test_a_model_that_cannot_be_read_is_told_as_if_it_were_read_here(
    tiny_folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_model(tiny_folder, tmp_path / "broken")
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"\0" * 100)
    sockets = tmp_path / "tmp"
    sockets.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    config = make_args(folder).create_engine_config()
    with pytest.raises(ModelLoadError) as expected:
        UniProcExecutor(config).start()
    with pytest.raises(ModelLoadError) as caught:
        SyncMPClient(config)
    assert str(caught.value) == str(expected.value)
    assert list(sockets.iterdir()) == []


FRONT_END = """
import os, sys, time
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

engine = LLMEngine.from_engine_args(EngineArgs(sys.argv[1], max_model_len=64, kv_cache_memory_bytes=1 << 20))
params = SamplingParams(n=2, max_tokens=3, logprobs=2, prompt_logprobs=-1 if len(sys.argv) > 2 else 2)
engine.add_request("a", "some text", params)
while engine.has_unfinished_requests():
    outputs = engine.step()
repr(outputs[0])
fork = os.fork()
if fork == 0:
    time.sleep(30)  # holds the front end's end of the core's pipe
    os._exit(0)
heavy = {"torch", "transformers"} & sys.modules.keys()
print(engine.engine_core._process.pid, fork, ",".join(heavy) or "none", flush=True)
time.sleep(60)
"""


def test_a_front_end_loads_no_torch_and_takes_its_core_with_it_when_killed(tiny_folder: pathlib.Path) -> None:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)}
    front_end = subprocess.Popen(
        [sys.executable, "-c", FRONT_END, str(tiny_folder)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert front_end.stdout is not None
    try:
        pid, fork, heavy = front_end.stdout.readline().split()
        assert heavy == "none"
        assert is_running(int(pid))
    finally:
        front_end.kill()
        front_end.wait()
    try:
        assert wait_until_gone(int(pid), 2.0), "the core outlives its front end"
    finally:
        os.kill(int(fork), signal.SIGKILL)
        front_end.stdout.close()


def test_a_killed_core_is_an_error_at_once_and_for_ever(tiny_config: VllmConfig, tiny_folder: pathlib.Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        engine = LLMEngine.from_engine_args(make_args(tiny_folder))
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    os.kill(get_pid(engine), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        finish(engine)
    assert time.monotonic() - started < 1
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError):
        engine.add_request("b", [5, 6, 7], SamplingParams())
        engine.step()
    engine.shutdown()
    engine.shutdown()


def test_a_forgotten_client_ends_its_core(tiny_folder: pathlib.Path) -> None:
    client = SyncMPClient(make_args(tiny_folder).create_engine_config())
    pid = client._process.pid
    client.itself = client  # type: ignore[attr-defined]  # only the collector can take it
    del client
    gc.collect()
    assert wait_until_gone(pid, 2.0)


@pytest.mark.parametrize("is_own_process", [False, True])
def test_a_callers_executor_runs_the_model_wherever_the_core_is(
    tiny_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_own_process: bool
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(is_own_process)))
    engine = LLMEngine.from_engine_args(make_args(tiny_folder, distributed_executor_backend=NamedExecutor))
    try:
        assert engine.collective_rpc("get_name") == ["the caller's own"]
    finally:
        engine.shutdown()


# ---------------------------------------------------------------- the loop itself, with a worker that fails on demand


class NamedExecutor(UniProcExecutor):
    """Has a method that no other has."""

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        return ["the caller's own"] if method == "get_name" else super().collective_rpc(method, timeout, args, kwargs)


class FailingExecutor(UniProcExecutor):
    """Raises in steps while `failures` lasts."""

    failures = 0

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device is out of memory")
        return super().execute_model(step)


class Loop:
    """A core process's loop in this process, a turn at a time."""

    def __init__(self, config: VllmConfig) -> None:
        self.context = zmq.Context()
        self.inputs, inputs = self._make_pair("in", zmq.PUSH, zmq.PULL)
        outputs, self.outputs = self._make_pair("out", zmq.PUSH, zmq.PULL)
        self.core = EngineCore(config, FailingExecutor)
        self.process = EngineCoreProcess(self.core, inputs, outputs, steps_on_demand=False)
        self.decoder = Decoder(MessageFromCore)

    def _make_pair(self, name: str, one: int, other: int) -> tuple[zmq.Socket, zmq.Socket]:
        sockets = (self.context.socket(one), self.context.socket(other))
        sockets[0].bind(f"inproc://{name}")
        sockets[1].connect(f"inproc://{name}")
        return sockets

    def turn(self, *messages: Any) -> list[Any]:
        """Send messages, let the loop turn once, and return what it said."""
        for message in messages:
            self.inputs.send_multipart(Encoder().encode(message))
        self.process._take_messages()
        if self.process._may_step():
            self.process._step()
        elif self.process._is_stale:
            self.process._report_state()
        said = []
        while self.outputs.poll(0):
            said.append(self.decoder.decode(self.outputs.recv_multipart()))
        return said


@pytest.fixture
def loop(tiny_folder: pathlib.Path) -> Iterator[Loop]:
    loop = Loop(make_args(tiny_folder, max_num_seqs=2).create_engine_config())
    yield loop
    loop.core.shutdown()
    loop.context.destroy(linger=0)


def test_a_step_that_fails_is_told_to_those_it_cost_and_the_others_go_on(loop: Loop) -> None:
    loop.turn(make_add("ended", max_tokens=1))
    loop.turn(make_add("family", 2))
    loop.core.model_executor.failures = 1
    (failed,) = loop.turn(make_add("waits"))
    errors = {out.request_id: out for out in failed.outputs.outputs}
    assert errors["family"].finish_reason is FinishReason.ERROR and "out of memory" in errors["family"].error
    assert "waits" not in errors and failed.has_work
    (done,) = loop.turn()
    assert [out.request_id for out in done.outputs.outputs] == ["waits"]


def test_a_core_that_does_nothing_but_fail_ends(loop: Loop) -> None:
    loop.core.model_executor.failures = MAX_FAILED_STEPS
    for i in range(MAX_FAILED_STEPS - 1):
        loop.turn(make_add(str(i)))
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.turn(make_add("last"))


def test_inputs_are_taken_in_between_two_steps_all_at_once(loop: Loop) -> None:
    (done,) = loop.turn(*(make_add(str(i), num_children=3 if i == 1 else 1) for i in range(4)))
    assert done.num_taken == 6
    assert done.outputs.stats.num_running + done.outputs.stats.num_waiting == 6


def test_gauges_fall_when_the_last_request_is_aborted(loop: Loop) -> None:
    (done,) = loop.turn(make_add("a"))
    assert done.outputs.stats.num_running == 1
    (done,) = loop.turn(AbortRequests(["a"]))
    assert done.outputs.stats.num_running == 0 and done.outputs.stats.num_used_blocks == 0 and not done.has_work


def test_a_halted_core_takes_requests_in_and_runs_none(loop: Loop) -> None:
    (paused,) = loop.turn(Call(1, "pause", ["test"]))
    assert paused == Answer(1)
    assert loop.turn(make_add("a")) == []
    assert not loop.process._may_step(), "a halted loop would spin"
    resumed, done = loop.turn(Call(2, "resume", ["test"]))
    assert resumed.number == 2
    assert isinstance(done, StepDone) and [out.request_id for out in done.outputs.outputs] == ["a"]


def test_a_sleeping_core_keeps_what_comes_for_later(loop: Loop) -> None:
    loop.turn(make_add("a"))
    loop.turn(Call(1, "sleep", [1]))
    assert loop.turn(make_add("b")) == []
    awake, done = loop.turn(Call(2, "wake_up", [None]))
    assert awake.error is None
    assert sorted(out.request_id for out in done.outputs.outputs) == ["a", "b"]


def test_a_request_that_breaks_a_rule_on_arrival_is_refused_by_its_id(loop: Loop) -> None:
    bad = make_add("bad", 2)
    bad.request.sampling_params.top_p = 7.0
    (refused, done) = loop.turn(bad, make_add("good"))
    assert isinstance(refused, Refused) and refused.request_id == "bad" and "top_p" in refused.error.message
    assert done.num_taken == 3 and [out.request_id for out in done.outputs.outputs] == ["good"]


def test_a_call_that_fails_is_answered_and_so_is_one_whose_answer_cannot_travel(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown, no_object, good = loop.turn(
        Call(1, "no_such"),
        Call(2, "collective_rpc", ["__class__", None, [], {}]),
        Call(3, "is_sleeping"),
    )
    assert "no_such" in unknown.error.message and "no public method" in no_object.error.message
    assert good == Answer(3, False)
    monkeypatch.setitem(UTILITY_CALLS, "get_object", lambda core: object())
    (answer,) = loop.turn(Call(4, "get_object"))
    assert answer.number == 4 and answer.error.kind == "TypeError" and "can't travel" in answer.error.message
