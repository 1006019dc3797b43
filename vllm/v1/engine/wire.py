"""How the front end and a core in a process of its own write to each other.

    front end ──AddRequest, AbortRequests, RunStep, Call──▶ core process
    front end ◀──Ready, StepDone, Refused, Answer, Failed── core process

A message has several frames: the first is msgpack, the others are the arrays that it names, as they lie in
memory. Nothing is ever pickled: what can't be written this way is refused with a TypeError.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from vllm import exceptions
from vllm.config import VllmConfig
from vllm.exceptions import VLLMError, VLLMServerError, VLLMValidationError, shorten
from vllm.v1.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest

_ARRAY_CODE = 1  # msgpack extension: (frame, dtype, shape)

# Messages that wait in a socket before the core stands still: a front end that lags behind does not fill the memory.
MAX_WAITING_OUTPUTS = 16

Frame = bytes | memoryview


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that can travel."""

    kind: str
    message: str
    parameter: str | None = None
    value: int | float | str | bool | None = None

    @classmethod
    def of(cls, error: BaseException) -> "ErrorReport":
        """Return what of `error` can travel."""
        if isinstance(error, VLLMValidationError):
            return cls(
                kind=type(error).__name__,
                message=error.message,
                parameter=error.parameter,
                value=_make_plain(error.value),
            )
        return cls(kind=type(error).__name__, message=str(error))

    def rebuild(self) -> Exception:
        """Return the exception again; one that is neither ours nor a ValueError or TypeError as a VLLMServerError."""
        kind = getattr(exceptions, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, VLLMValidationError):
            return kind(self.message, parameter=self.parameter, value=self.value)
        if isinstance(kind, type) and issubclass(kind, VLLMError):
            return kind(self.message)
        if self.kind in ("TypeError", "ValueError"):
            return {"TypeError": TypeError, "ValueError": ValueError}[self.kind](self.message)
        return VLLMServerError(f"{self.kind}: {self.message}" if self.message else self.kind)


# ---------------------------------------------------------------- at start-up, through the core's standard input


class StartUp(msgspec.Struct, frozen=True, kw_only=True):
    """What a core process needs to begin."""

    vllm_config: VllmConfig
    folder: str  # of the sockets; empty and gone once both sides are connected
    parent_pid: int
    steps_on_demand: bool  # a step runs when a RunStep asks for it, else whenever there is work

    @property
    def inputs_address(self) -> str:
        return f"ipc://{self.folder}/in"

    @property
    def outputs_address(self) -> str:
        return f"ipc://{self.folder}/out"


# ---------------------------------------------------------------- front end → core


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: EngineCoreRequest


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    """Run one step; a StepDone, or a Failed, answers."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call one of the core's methods; an Answer with the same number follows."""

    number: int
    method: str
    args: list[Any] = []


MessageToCore = AddRequest | AbortRequests | RunStep | Call


# ---------------------------------------------------------------- core → front end


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    ready: EngineCoreReady


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    outputs: EngineCoreOutputs
    has_work: bool  # after this step
    num_taken: int  # sequences that the core has taken in since its start, refused ones included


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request was not let in."""

    request_id: str
    error: ErrorReport


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: int
    value: Any = None
    error: ErrorReport | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The start, a step that was asked for, or the core as a whole has failed."""

    error: ErrorReport
    is_end: bool = False  # the core process ends


MessageFromCore = Ready | StepDone | Refused | Answer | Failed


# ---------------------------------------------------------------- messages ↔ frames


class Encoder:
    """Writes messages. Not for several threads at once."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_other)
        self._arrays: list[Frame] = []

    def encode(self, message: Any) -> list[Frame]:
        """Return the frames; those of arrays are views, so nobody may write to the arrays before they are sent.

        Raises:
            TypeError: something in it can't travel.
        """
        self._arrays = []
        head = self._encoder.encode(message)
        return [head, *self._arrays]

    def _encode_other(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} can't travel between processes")

    def _encode_array(self, array: np.ndarray) -> msgspec.msgpack.Ext:
        if array.dtype.kind not in "biufc":
            raise TypeError(f"an array of {array.dtype} can't travel between processes; only numbers can")
        array = np.ascontiguousarray(array)
        self._arrays.append(array.reshape(-1).view(np.uint8).data)
        place = (len(self._arrays), array.dtype.str, array.shape)
        return msgspec.msgpack.Ext(_ARRAY_CODE, msgspec.msgpack.encode(place))


class Decoder:
    """Reads messages of one direction. Not for several threads at once."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type, dec_hook=_check_array, ext_hook=self._decode_array)
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> Any:
        """Return the message; its arrays are views of the frames, and keep them alive.

        Raises:
            msgspec.ValidationError: it is no message of this direction, or a value in it breaks a rule.
        """
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        finally:
            self._frames = ()

    def _decode_array(self, code: int, data: memoryview) -> np.ndarray:
        if code != _ARRAY_CODE:
            raise ValueError(f"extension {code} is not one of ours")
        place, dtype, shape = msgspec.msgpack.decode(data, type=tuple[int, str, tuple[int, ...]])
        array = np.frombuffer(self._frames[place], dtype).reshape(shape)
        # A frame may begin at any address; memory views of an unaligned array can't be assigned from.
        return array if array.flags.aligned else array.copy()


def read_unreadable_request(frames: Sequence[Frame]) -> tuple[str, int] | None:
    """Return id and number of sequences of an AddRequest that could not be decoded; None for any other message."""
    message = msgspec.msgpack.decode(frames[0])
    if not isinstance(message, dict) or message.get("type") != "add":
        return None
    request = message["request"]
    return request["request_id"], len(request["seeds"])


def _check_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise NotImplementedError(f"{kind} does not travel")


def _make_plain(value: Any) -> int | float | str | bool | None:
    """Return a value that every message can hold."""
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    return shorten(value)
