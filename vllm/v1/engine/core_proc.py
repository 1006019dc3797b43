"""The engine core as a process: messages in, steps, messages out.

`core_client_launch.py` starts it. The loop has one thread: between two steps it takes in everything that has come, and
with nothing to do it sleeps in its socket. Signals are the front end's matter: this process ends when its front end
does, and only then.
"""

import faulthandler
import gc
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import zmq

from vllm.exceptions import VLLMError, VLLMUnsupportedError
from vllm.logger import init_logger
from vllm.v1.engine.core import UTILITY_CALLS, EngineCore
from vllm.v1.engine.wire import (
    MAX_WAITING_OUTPUTS,
    AbortRequests,
    AddRequest,
    Answer,
    Call,
    Decoder,
    Encoder,
    ErrorReport,
    Failed,
    Frame,
    MessageToCore,
    Ready,
    Refused,
    RunStep,
    StartUp,
    StepDone,
    read_unreadable_request,
)
from vllm.v1.executor.factory import get_executor_class
from vllm.v1.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason

logger = init_logger(__name__)

_STDIN = 0
_LAST_WORDS_MS = 2000

# A step that fails costs the requests that ran in it. So many in a row are no accident of one batch: a GPU that has
# failed once fails ever after, and a server that answers nothing but errors should end and be started anew.
MAX_FAILED_STEPS = 3


class EngineCoreProcess:
    """Serves one front end."""

    def __init__(self, core: EngineCore, inputs: zmq.Socket, outputs: zmq.Socket, *, steps_on_demand: bool) -> None:
        self._core = core
        self._inputs = inputs
        self._outputs = outputs
        self._steps_on_demand = steps_on_demand
        self._encoder = Encoder()
        self._decoder = Decoder(MessageToCore)
        self._is_stale = False  # the front end's last word on what runs and waits is out of date
        self._num_taken = 0  # sequences
        self._num_failed_steps = 0  # in a row
        self._families: set[str] = set()  # ids of what was let in, all live ones among them

    def run(self) -> NoReturn:
        """Serve until the process ends; what it raises is the end."""
        while True:
            self._take_messages()
            if self._may_step():
                self._step()
            elif self._is_stale:
                self._report_state()

    def send(self, message: Any) -> None:
        """Send, and wait while the front end lags too far behind."""
        self._outputs.send_multipart(self._encoder.encode(message), copy=False)

    # ------------------------------------------------------------ messages

    def _may_step(self) -> bool:
        if self._steps_on_demand or not self._core.may_step:
            return False
        return self._is_stale or self._core.has_work()

    def _take_messages(self) -> None:
        if not self._may_step() and not self._is_stale:
            self._inputs.poll()
        while True:
            try:
                frames = self._inputs.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take_message([frame.buffer for frame in frames])

    def _take_message(self, frames: list[Frame]) -> None:
        try:
            message = self._decoder.decode(frames)
        except msgspec.ValidationError as error:
            unreadable = read_unreadable_request(frames)
            if unreadable is None:
                raise
            request_id, num_sequences = unreadable
            self._num_taken += num_sequences
            self.send(Refused(request_id, ErrorReport.of(error)))
            return
        if isinstance(message, AddRequest):
            self._add_request(message)
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.request_ids)
            self._is_stale = not self._steps_on_demand
        elif isinstance(message, RunStep):
            self._step_once()
        else:
            self._answer(message)

    def _add_request(self, message: AddRequest) -> None:
        request = message.request
        self._num_taken += len(request.seeds)
        try:
            self._core.add_request(request)
        except VLLMError as error:
            self.send(Refused(request.request_id, ErrorReport.of(error)))
            return
        if len(self._families) > 1024 + 2 * len(self._core.scheduler.requests):
            self._families = {family_id for family_id in self._families if self._is_live(family_id)}
        self._families.add(request.request_id)

    def _is_live(self, family_id: str) -> bool:
        scheduler = self._core.scheduler
        return family_id in scheduler.requests or family_id in scheduler.children

    # ------------------------------------------------------------ steps

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except Exception as error:
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise
            logger.exception("a step failed; the requests that ran in it are answered with an error")
            self._report_state(self._make_errors(error))
        else:
            self._num_failed_steps = 0
            self._report(outputs)

    def _step_once(self) -> None:
        """Run a step that was asked for; its failure is for whoever asked, as when the core runs in his own process."""
        try:
            outputs = self._core.step()
        except Exception as error:
            logger.exception("a step failed")
            self.send(Failed(ErrorReport.of(error)))
            return
        self._report(outputs)

    def _make_errors(self, error: Exception) -> list[EngineCoreOutput]:
        """Return an error for each request that the core has lost by a step that raised."""
        live = {family_id for family_id in self._families if self._is_live(family_id)}
        # Among the others are some that ended before: nobody listens to those any more.
        lost, self._families = self._families - live, live
        text = f"the step that this request ran in failed: {type(error).__name__}: {error}"
        return [
            EngineCoreOutput(request_id=family_id, new_token_ids=[], finish_reason=FinishReason.ERROR, error=text)
            for family_id in sorted(lost)
        ]

    def _report_state(self, outputs: Sequence[EngineCoreOutput] = ()) -> None:
        """Report what runs and waits, and `outputs` that no step brought."""
        stats, now = self._core.get_stats(), time.monotonic()
        self._report(EngineCoreOutputs(outputs=[*outputs], prompt_scores=[], stats=stats, timestamp=now))

    def _report(self, outputs: EngineCoreOutputs) -> None:
        self._is_stale = False
        self.send(StepDone(outputs, self._core.has_work(), self._num_taken))

    # ------------------------------------------------------------ calls

    def _answer(self, call: Call) -> None:
        try:
            method = UTILITY_CALLS.get(call.method)
            if method is None:
                raise VLLMUnsupportedError(f"the core has no method {call.method!r}", parameter="method")
            self._is_stale |= method is EngineCore.sleep and not self._steps_on_demand  # nothing runs any more
            self.send(Answer(call.number, method(self._core, *call.args)))
        except Exception as error:  # whatever it is, it is the caller's to see
            self.send(Answer(call.number, error=ErrorReport.of(error)))


def main() -> None:
    """Read from standard input what to run, and run it until the front end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    start_up = _read_start_up()
    threading.Thread(target=_end_with_front_end, args=(start_up,), name="front-end-watch", daemon=True).start()
    context = zmq.Context()
    outputs = context.socket(zmq.PUSH)
    outputs.sndhwm = MAX_WAITING_OUTPUTS
    outputs.linger = _LAST_WORDS_MS
    outputs.connect(start_up.outputs_address)
    inputs = context.socket(zmq.PULL)
    inputs.rcvhwm = 0
    inputs.linger = 0
    inputs.connect(start_up.inputs_address)
    core = None
    try:
        core = EngineCore(start_up.vllm_config, get_executor_class(start_up.vllm_config.parallel_config))
        _serve(core, inputs, outputs, start_up.steps_on_demand)
    except Exception as error:
        # Of a model that can't be read the message says all that there is to say.
        if core is not None or not isinstance(error, VLLMError):
            logger.exception("the engine core ends")
        outputs.send_multipart(Encoder().encode(Failed(ErrorReport.of(error), is_end=True)))
    context.destroy()
    sys.stderr.flush()
    # Threads of native libraries may still run; nothing of theirs is worth waiting for.
    os._exit(1)


def _serve(core: EngineCore, inputs: zmq.Socket, outputs: zmq.Socket, steps_on_demand: bool) -> NoReturn:
    process = EngineCoreProcess(core, inputs, outputs, steps_on_demand=steps_on_demand)
    process.send(Ready(core.ready))
    # What start-up has made stays: the garbage collector need not visit it again.
    gc.collect()
    gc.freeze()
    process.run()


def _read_start_up() -> StartUp:
    length = int.from_bytes(_read_exactly(8), "little")
    return msgspec.msgpack.decode(_read_exactly(length), type=StartUp)


def _read_exactly(num_bytes: int) -> bytes:
    body = b""
    while len(body) < num_bytes:
        piece = os.read(_STDIN, num_bytes - len(body))
        if not piece:
            os._exit(1)  # the front end is gone before it began
        body += piece
    return body


def _end_with_front_end(start_up: StartUp) -> None:
    """End this process when its front end has closed the pipe or died.

    A process that the front end has forked may hold the pipe open, so the front end itself is watched too, where the
    kernel can do that.
    """
    poll = select.poll()
    poll.register(_STDIN, select.POLLIN)
    try:
        front_end = os.pidfd_open(start_up.parent_pid)
    except (AttributeError, OSError):
        front_end = None
    if front_end is not None:
        poll.register(front_end, select.POLLIN)
    while os.getppid() == start_up.parent_pid:
        for fd, _ in poll.poll():
            if fd == front_end or not os.read(_STDIN, 4096):
                shutil.rmtree(start_up.folder, ignore_errors=True)
                os._exit(0)
    shutil.rmtree(start_up.folder, ignore_errors=True)
    os._exit(0)
