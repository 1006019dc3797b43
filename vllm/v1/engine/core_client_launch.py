"""Starts a core in a process of its own, notices when it is gone, and ends it.

The two processes hold each other by pipes that the kernel closes whatever happens: the core ends when its standard
input closes, and the front end knows that the core has died when the other pipe does. The sockets lie in a folder that
only this user may enter, and are unlinked as soon as both sides are connected, so a crash leaves nothing behind.
"""

import contextlib
import dataclasses
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence

import msgspec
import zmq

from vllm import envs, platforms
from vllm.config import VllmConfig
from vllm.exceptions import VLLMServerError
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.wire import (
    MAX_WAITING_OUTPUTS,
    Decoder,
    Encoder,
    Failed,
    Frame,
    MessageFromCore,
    Ready,
    StartUp,
)
from vllm.v1.messages import EngineCoreReady

# The core imports from the very places that this process does, and nothing from the folder that it is started in.
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from vllm.v1.engine.core_proc import main; main()"
_TITLE = "vllm-engine-core"

_LONGEST_SOCKET_PATH = 100  # Linux allows 107
_END_TIMEOUT_S = 1.0


class CoreProcess:
    """A core process, from its start to its end, and the two sockets to it.

    Nothing here waits but `wait_until_ready`, `receive` and `stop`.
    """

    def __init__(self, vllm_config: VllmConfig, *, steps_on_demand: bool) -> None:
        self._folder = _make_folder()
        self._encoder = Encoder()
        self._decoder = Decoder(MessageFromCore)
        start_up = StartUp(
            vllm_config=_leave_out_hf_config(vllm_config),
            folder=self._folder,
            parent_pid=os.getpid(),
            steps_on_demand=steps_on_demand,
        )
        context = zmq.Context()
        self.inputs, self.outputs = _bind_sockets(context, start_up)
        self.life_fd, child_fd = os.pipe()  # readable when the core has died
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, _TITLE, *(path or os.getcwd() for path in sys.path)],
                stdin=subprocess.PIPE,
                pass_fds=(child_fd,),
                env=_make_environment(),
                start_new_session=True,  # Ctrl-C is the front end's matter
            )
        except BaseException:
            context.destroy()
            os.close(self.life_fd)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(child_fd)
        # Also at the interpreter's end, and when nobody holds the client any more. The sockets stand here so that they
        # are not collected together with their context, which would wait for their end for ever.
        sockets = (self.inputs, self.outputs)
        self._end = weakref.finalize(
            self, _end_process, self._process, context, sockets, self.life_fd, self._folder, os.getpid()
        )
        with contextlib.suppress(BrokenPipeError):  # it died already: wait_until_ready says why
            self._write_start_up(start_up)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _write_start_up(self, start_up: StartUp) -> None:
        body = msgspec.msgpack.encode(start_up)
        assert self._process.stdin is not None
        self._process.stdin.write(len(body).to_bytes(8, "little") + body)
        self._process.stdin.flush()

    def wait_until_ready(self) -> EngineCoreReady:
        """Return what the core settled.

        Raises:
            VLLMValidationError, ModelLoadError: it can't run this model.
            VLLMServerError: it failed for another reason, died, or took too long.
        """
        deadline = time.monotonic() + envs.engine_ready_timeout_s()
        try:
            message = None
            while message is None:
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    raise VLLMServerError(
                        f"the engine core was not ready after {envs.engine_ready_timeout_s()} s; a larger model may "
                        "take longer: raise VLLM_ENGINE_READY_TIMEOUT_S"
                    )
                message = self.receive(seconds)
            if isinstance(message, Failed):
                raise message.error.rebuild()
            assert isinstance(message, Ready), f"the core began with a {type(message).__name__}"
        except EngineDeadError as error:
            raise VLLMServerError(f"the engine core did not start: {error}") from None
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return message.ready

    # ------------------------------------------------------------ messages

    def send(self, message: object) -> None:
        """Send without waiting.

        Raises:
            EngineDeadError: nobody is there to take it.
            TypeError: it can't travel.
        """
        frames = self._encoder.encode(message)
        if not self._end.alive:
            raise EngineDeadError(self.describe_end())
        try:
            self.inputs.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError(self.describe_end()) from None

    def receive(self, seconds: float | None = None) -> object | None:
        """Wait for the next message; None when the time is up.

        Raises:
            EngineDeadError: the core has died and nothing is left to read.
        """
        poller = zmq.Poller()
        poller.register(self.outputs, zmq.POLLIN)
        poller.register(self.life_fd, zmq.POLLIN)
        poller.poll(None if seconds is None else max(0, int(seconds * 1000)))
        message = self.receive_nowait()
        if message is None and self.has_died():
            message = self.receive_nowait()  # its last words may have come in between
            if message is None:
                raise EngineDeadError(self.describe_end())
        return message

    def receive_nowait(self) -> object | None:
        """Return the next message that is here, or None."""
        try:
            frames = self.outputs.recv_multipart(flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        bodies: Sequence[Frame] = [frame.buffer for frame in frames]
        return self._decoder.decode(bodies)

    # ------------------------------------------------------------ life and death

    def has_died(self) -> bool:
        """Say whether the process is gone, by itself or by `stop`."""
        return not self._end.alive or self._process.poll() is not None or _is_readable(self.life_fd)

    def describe_end(self) -> str:
        """Return how the core came to its end."""
        if not self._end.alive:
            return "the engine was shut down; make a new one"
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "the engine core has closed its connection"
        if status >= 0:
            return f"the engine core has died with exit status {status}; its own error stands above in the log"
        hint = "; the kernel does so when memory runs out" if status == -signal.SIGKILL else ""
        return f"the engine core was killed by {signal.Signals(-status).name}{hint}"

    def stop(self) -> None:
        """End the process within a second or so and close everything; a second call does nothing."""
        self._end()


def _bind_sockets(context: zmq.Context, start_up: StartUp) -> tuple[zmq.Socket, zmq.Socket]:
    """Return the sockets to the core and from it."""
    inputs, outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    inputs.linger = outputs.linger = 0
    inputs.sndhwm = 0
    outputs.rcvhwm = MAX_WAITING_OUTPUTS
    inputs.bind(start_up.inputs_address)
    outputs.bind(start_up.outputs_address)
    return inputs, outputs


def _end_process(
    process: subprocess.Popen[bytes],
    context: zmq.Context,
    sockets: tuple[zmq.Socket, zmq.Socket],
    life_fd: int,
    folder: str,
    owner_pid: int,
) -> None:
    if os.getpid() != owner_pid:  # a fork of the front end: the core is not its own
        return
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()  # the core ends when it sees that
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for socket in sockets:
        socket.close(linger=0)
    context.term()
    os.close(life_fd)
    shutil.rmtree(folder, ignore_errors=True)


def _leave_out_hf_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return the configuration without config.json: the core does not read it, and not all of it may travel."""
    return dataclasses.replace(vllm_config, model_config=dataclasses.replace(vllm_config.model_config, hf_config={}))


def _make_environment() -> dict[str, str]:
    """Return this process's environment, with a bound on OpenMP's spinning."""
    environment = dict(os.environ)
    platforms.bound_openmp_spinning(environment)
    return environment


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _make_folder() -> str:
    """Return a new folder that only this user may enter."""
    folder = tempfile.mkdtemp(prefix="vllm-")
    if len(folder) > _LONGEST_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="vllm-", dir="/tmp")
    return folder
