"""The front end's way to a core in a process of its own: for a caller who steps, and for an event loop."""

import asyncio
import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, TypeVarTuple, get_type_hints

import msgspec

from vllm.config import VllmConfig
from vllm.exceptions import VLLMUnsupportedError
from vllm.logger import init_logger
from vllm.v1.core.sched.admission import check_can_run
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
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


class _Connection:
    """A core process, and what either client needs of it."""

    def __init__(self, vllm_config: VllmConfig, *, steps_on_demand: bool) -> None:
        self._vllm_config = vllm_config
        self.process = CoreProcess(vllm_config, steps_on_demand=steps_on_demand)
        self.num_sent = 0  # sequences
        self.num_taken = 0  # of them, as the core says
        self._num_calls = 0

    def wait_until_ready(self) -> EngineCoreReady:
        try:
            return self.process.wait_until_ready()
        except BaseException:
            self.process.stop()
            raise

    def check(self, request: EngineCoreRequest, ready: EngineCoreReady) -> None:
        """Refuse what the core would refuse, without waiting for its answer.

        Raises:
            VLLMValidationError: it could never run to its end.
        """
        config = self._vllm_config
        check_can_run(
            request, ready.max_model_len, ready.num_gpu_blocks, config.cache_config.block_size, config.scheduler_config
        )

    def send_request(self, request: EngineCoreRequest) -> None:
        self.process.send(AddRequest(request))
        self.num_sent += len(request.seeds)

    def send_call(self, method: Callable[..., Any], args: tuple[Any, ...]) -> int:
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
        self.process.send(Call(self._num_calls, method.__name__, list(args)))
        return self._num_calls


class SyncMPClient(EngineCoreClient):
    """A core process that steps when it is asked, so that it forms the same batches as one in this process.

    The next step is asked for as soon as one has come, and runs while the caller handles its outputs.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._connection = _Connection(vllm_config, steps_on_demand=True)
        self._process = self._connection.process
        self.ready = self._connection.wait_until_ready()
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

    def add_request(self, request: EngineCoreRequest) -> None:
        self._connection.check(request, self.ready)
        self._connection.send_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        if ids and not self._process.has_died():
            self._process.send(AbortRequests(ids))

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
        return is_known_to or self._connection.num_sent > self._connection.num_taken

    def call_utility(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        number = self._connection.send_call(method, args)
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
            self._connection.num_taken = message.num_taken
        if isinstance(message, StepDone | Failed):
            self._had_work = isinstance(message, Failed) or message.has_work  # the next step says what is left
            self._is_step_asked = False
            self._waiting.append(message)
        elif isinstance(message, Refused):
            logger.error("request %s was refused by the core: %s", message.request_id, message.error.message)
            self._refused.append(message)
        return message


class AsyncMPClient:
    """A core process that steps by itself, for an event loop. Not for several threads at once.

    Whoever uses it calls `attach` in his loop; from then on `on_message` is called there when messages wait, which
    `receive_nowait` returns, and `on_death` when the core is gone.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Start the process; `wait_until_ready` must follow."""
        self._connection = _Connection(vllm_config, steps_on_demand=False)
        self._process = self._connection.process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.ready: EngineCoreReady
        self.death: str | None = None  # how the core died, by its own last words

    def wait_until_ready(self) -> None:
        self.ready = self._connection.wait_until_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_in_flight(self) -> int:
        """Sequences that were sent and that no `StepDone` speaks of yet."""
        return self._connection.num_sent - self._connection.num_taken

    # ------------------------------------------------------------ the loop

    def attach(self, on_message: Callable[[], None], on_death: Callable[[], None]) -> bool:
        """Serve the running loop; return whether that is new."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return False
        self._detach()
        self._loop = loop
        self._answers.clear()  # nobody waits any more in a loop that is gone
        loop.add_reader(self._process.outputs.fileno(), on_message)
        loop.add_reader(self._process.life_fd, functools.partial(self._report_death, on_death))
        return True

    def _detach(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed() and not self._process.inputs.closed:
            loop.remove_reader(self._process.outputs.fileno())
            loop.remove_reader(self._process.life_fd)

    def _report_death(self, on_death: Callable[[], None]) -> None:
        self._detach()  # the pipe would call for ever
        on_death()

    def receive_nowait(self) -> StepDone | Refused | None:
        """Return the next message that is not an answer to a call; None when there is none.

        The socket's file descriptor becomes readable once for all that has come: read until None.
        """
        while (message := self._process.receive_nowait()) is not None:
            if isinstance(message, StepDone):
                self._connection.num_taken = message.num_taken
                return message
            if isinstance(message, Refused):
                return message
            if isinstance(message, Answer):
                self._take_answer(message)
            elif isinstance(message, Failed):
                self.death = f"the engine core has died: {message.error.rebuild()}"
        return None

    def _take_answer(self, answer: Answer) -> None:
        future = self._answers.pop(answer.number, None)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer.value)
        else:
            future.set_exception(answer.error.rebuild())

    # ------------------------------------------------------------ what is asked of the core

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; should the core refuse it after all, a `Refused` comes.

        Raises:
            VLLMValidationError: it could never run to its end.
            EngineDeadError: there is no core any more.
        """
        self._connection.check(request, self.ready)
        self._connection.send_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, children, or whole families by their id; a core that is gone runs none."""
        ids = list(request_ids)
        if ids and not self.has_died():
            self._process.send(AbortRequests(ids))

    async def call_utility(self, method: Callable[[EngineCore, *_Args], _Answer], *args: *_Args) -> _Answer:
        """Call one of the `@utility` methods of `EngineCore`, such as `EngineCore.get_stats`, and return its answer."""
        loop = asyncio.get_running_loop()
        number = self._connection.send_call(method, args)
        future = loop.create_future()
        self._answers[number] = future
        try:
            return _restore_type(method, await future)
        finally:
            self._answers.pop(number, None)

    # ------------------------------------------------------------ life and death

    def has_died(self) -> bool:
        return self.death is not None or self._process.has_died()

    def describe_death(self) -> str:
        return self.death or self._process.describe_end()

    def fail_calls(self, error: Exception) -> None:
        """Let all calls that wait for an answer raise `error`."""
        answers, self._answers = self._answers, {}
        for future in answers.values():
            if not future.done():
                future.set_exception(error)

    def shutdown(self) -> None:
        """End the process; a second call does nothing."""
        self._detach()
        self._process.stop()


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
