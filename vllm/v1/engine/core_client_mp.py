"""The front end's way to a core in a process of its own: for a caller who steps, and for an event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Protocol, TypeVar, TypeVarTuple, get_type_hints

import msgspec

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMUnsupportedError
from vllm.logger import init_logger
from vllm.v1.core.sched.admission import check_can_run
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client_launch import CoreProcess
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.wire import AbortRequests, AddRequest, Answer, Call, Failed, Refused, RunStep, StepDone
from vllm.v1.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    FinishReason,
)

logger = init_logger(__name__)

_Args = TypeVarTuple("_Args")
_Answer = TypeVar("_Answer")


class _MPClient:
    """A core process, and what either client asks of it."""

    ready: EngineCoreReady

    def __init__(self, vllm_config: VllmConfig, *, steps_on_demand: bool) -> None:
        """Start the process; `wait_until_ready` must follow."""
        self._vllm_config = vllm_config
        self._process = CoreProcess(vllm_config, steps_on_demand=steps_on_demand)
        self._num_sent = 0  # sequences
        self._num_taken = 0  # of them, as the core says
        self._num_calls = 0

    def wait_until_ready(self) -> None:
        try:
            self.ready = self._process.wait_until_ready()
        except BaseException:
            self._process.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_in_flight(self) -> int:
        """Sequences that were sent and that no `StepDone` speaks of yet."""
        return self._num_sent - self._num_taken

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request after the checks that the core makes; should it refuse it after all, a `Refused` comes.

        Raises:
            VLLMValidationError: it could never run to its end.
            EngineDeadError: there is no core any more.
        """
        config, ready = self._vllm_config, self.ready
        check_can_run(
            request, ready.max_model_len, ready.num_gpu_blocks, config.cache_config.block_size, config.scheduler_config
        )
        self._send_request(request)

    def _send_request(self, request: EngineCoreRequest) -> None:
        self._process.send(AddRequest(request))
        self._num_sent += len(request.seeds)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, children, or whole families by their id; a core that is gone runs none."""
        ids = list(request_ids)
        if ids and not self.has_died():
            self._process.send(AbortRequests(ids))

    def has_died(self) -> bool:
        return self._process.has_died()

    def _send_call(self, method: Callable[..., Any], args: tuple[Any, ...]) -> int:
        """Send a call and return its number.

        Raises:
            VLLMUnsupportedError: an argument is a function.
        """
        if any(map(callable, args)):
            raise VLLMUnsupportedError(
                "collective_rpc takes a method's name when the core is a process of its own: a function would have to "
                "be pickled",
                parameter="method",
            )
        self._num_calls += 1
        self._process.send(Call(self._num_calls, method.__name__, list(args)))
        return self._num_calls


class SyncMPClient(_MPClient):
    """A core process that steps when it is asked, so that it forms the same batches as one in this process.

    The next step is asked for as soon as one has come, and runs while the caller handles its outputs.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, steps_on_demand=True)
        self.wait_until_ready()
        self._is_step_asked = False
        self._had_work = False  # after the last step
        self._waiting: list[StepDone | Failed] = []  # steps that came while something else was waited for
        self._refused: list[Refused] = []

    @property
    def model_executor(self) -> NoReturn:
        raise AttributeError(
            "model_executor is in the core's own process; unset VLLM_ENABLE_V1_MULTIPROCESSING to reach the model, or "
            "use collective_rpc"
        )

    def get_output(self) -> EngineCoreOutputs:
        if not self._waiting:
            self._ask_for_step()
            while not self._waiting:
                self._receive()
        message = self._waiting.pop(0)
        if isinstance(message, Failed):
            raise message.error.rebuild()
        if message.has_work:
            self._ask_for_step()
        refused, self._refused = self._refused, []
        outputs = message.outputs
        return msgspec.structs.replace(outputs, outputs=outputs.outputs + _make_errors(refused)) if refused else outputs

    def has_work(self) -> bool:
        is_known_to = self._had_work or self._is_step_asked or bool(self._waiting or self._refused)
        return is_known_to or self.num_in_flight > 0

    def call_utility(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        number = self._send_call(method, args)
        while True:
            answer = self._receive()
            if isinstance(answer, Answer) and answer.number == number:  # not one that an interrupted call left
                if answer.error is not None:
                    raise answer.error.rebuild()
                return _restore_type(method, answer.value)

    def shutdown(self) -> None:
        self._process.stop()

    # ------------------------------------------------------------ messages

    def _ask_for_step(self) -> None:
        if not self._is_step_asked:
            self._process.send(RunStep())
            self._is_step_asked = True

    def _receive(self) -> object:
        """Wait for a message, put it where it belongs and return it."""
        message = self._process.receive()
        if isinstance(message, Failed) and message.is_end:
            self._process.stop()
            raise EngineDeadError(f"the engine core has died: {message.error.rebuild()}")
        if isinstance(message, StepDone):
            self._num_taken = message.num_taken
        if isinstance(message, StepDone | Failed):
            self._had_work = isinstance(message, Failed) or message.has_work  # the next step says what is left
            self._is_step_asked = False
            self._waiting.append(message)
        elif isinstance(message, Refused):
            logger.error("request %s was refused by the core: %s", message.request_id, message.error.message)
            self._refused.append(message)
        return message


class OutputHandler(Protocol):
    """Whom an `AsyncMPClient` hands on what the core sends."""

    def handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take a step's outputs, or a slice of them."""

    def handle_refusal(self, refused: Refused) -> None: ...

    def handle_death(self, reason: str) -> None:
        """Nothing comes any more."""


class AsyncMPClient(_MPClient):
    """A core process that steps by itself, for an event loop. Not for several threads at once.

    Outputs are handled in slices, one in each round of the loop, so that it is never busy for long. The next message is
    read when the one before is handled, so the core waits for a loop that can't follow. Nothing is lost when a loop
    ends in the middle: the next one that is attached goes on.
    """

    def __init__(self, vllm_config: VllmConfig, handler: OutputHandler) -> None:
        """Start the process; `wait_until_ready` must follow."""
        super().__init__(vllm_config, steps_on_demand=False)
        self._handler = handler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slices: deque[EngineCoreOutputs] = deque()
        self._is_handling = False  # and asks the loop for the next round by itself
        self._is_stopped = False
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._death: str | None = None  # how the core died, by its own last words

    # ------------------------------------------------------------ the loop

    def attach(self) -> None:
        """Serve the running loop."""
        loop = asyncio.get_running_loop()
        if self._is_stopped or self._loop is loop:
            return
        self._detach()
        self._loop = loop
        self._answers.clear()  # nobody waits any more in a loop that is gone
        loop.add_reader(self._process.outputs.fileno(), self._on_message)
        loop.add_reader(self._process.life_fd, self.drain)
        self._is_handling = False  # in a loop before this one
        self._on_message()

    def _detach(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed() and not self._process.inputs.closed:
            loop.remove_reader(self._process.outputs.fileno())
            loop.remove_reader(self._process.life_fd)

    def drain(self) -> None:
        """Handle everything that a core which has died left, then its death."""
        self._detach()  # the pipe would call for ever
        try:
            while not self._is_stopped and self._handle_next():
                pass
        except Exception:
            logger.exception("an output of the dead engine core could not be handled")
        self._report_death(self._death or self._process.describe_end())

    def _on_message(self) -> None:
        if not self._is_handling:
            self._is_handling = True
            self._handle_round()

    def _handle_round(self) -> None:
        if self._is_stopped:
            return
        try:
            has_more = self._handle_next()
        except Exception as error:
            logger.exception("an output could not be handled; the engine ends")
            self._report_death(f"the engine has died while it handled outputs: {type(error).__name__}: {error}")
            return
        if has_more:
            asyncio.get_running_loop().call_soon(self._handle_round)
        else:
            self._is_handling = False

    def _handle_next(self) -> bool:
        """Handle one slice; return False when there is none.

        The socket's file descriptor becomes readable once for all that has come: go on until False.
        """
        while not self._slices:
            message = self._process.receive_nowait()
            if message is None:
                return False
            if isinstance(message, StepDone):
                self._num_taken = message.num_taken
                self._slices.extend(cut(message.outputs, envs.output_proc_chunk_size()))
            elif isinstance(message, Refused):
                self._handler.handle_refusal(message)
            elif isinstance(message, Answer):
                self._take_answer(message)
            elif isinstance(message, Failed):
                self._death = f"the engine core has died: {message.error.rebuild()}"
        self._handler.handle_outputs(self._slices.popleft())
        return True

    def _take_answer(self, answer: Answer) -> None:
        future = self._answers.pop(answer.number, None)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(answer.error.rebuild())

    async def call_utility(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        """Call one of the `@utility` methods of `EngineCore`, such as `EngineCore.get_stats`, and return its answer."""
        loop = asyncio.get_running_loop()
        number = self._send_call(method, args)
        future = loop.create_future()
        self._answers[number] = future
        try:
            return _restore_type(method, await future)
        finally:
            self._answers.pop(number, None)

    # ------------------------------------------------------------ life and death

    def has_died(self) -> bool:
        return self._death is not None or super().has_died()

    def _report_death(self, reason: str) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._handler.handle_death(reason)

    def shutdown(self, reason: str = "") -> None:
        """End the process; calls that wait for an answer fail with `reason`. A second call does nothing."""
        self._is_stopped = True
        self._slices.clear()
        answers, self._answers = self._answers, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(EngineDeadError(reason))
        self._detach()
        self._process.stop()


def cut(outputs: EngineCoreOutputs, size: int) -> list[EngineCoreOutputs]:
    """Return a step's outputs in slices of at most `size` sequences: scores in the first one, stats in the last."""
    batch = outputs.decode_batch
    num_decoded = 0 if batch is None else len(batch.request_ids)
    if len(outputs.outputs) + num_decoded <= size:
        return [outputs]
    rest = msgspec.structs.replace(outputs, outputs=[], prompt_scores=[], decode_batch=None, stats=None)
    slices = [
        msgspec.structs.replace(rest, outputs=outputs.outputs[first : first + size])
        for first in range(0, len(outputs.outputs), size)
    ]
    if batch is not None:
        slices += [
            msgspec.structs.replace(rest, decode_batch=batch.select(first, first + size))
            for first in range(0, num_decoded, size)
        ]
    slices[0] = msgspec.structs.replace(slices[0], prompt_scores=outputs.prompt_scores)
    slices[-1] = msgspec.structs.replace(slices[-1], stats=outputs.stats)
    return slices


def _restore_type(method: Callable[..., Any], value: Any) -> Any:
    """Return what `method` answered as the type that it declares, from the plain values that have travelled."""
    return msgspec.convert(value, get_type_hints(method)["return"])


def _make_errors(refused: list[Refused]) -> list[EngineCoreOutput]:
    return [
        EngineCoreOutput(
            request_id=message.request_id,
            new_token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=str(message.error.rebuild()),
        )
        for message in refused
    ]
