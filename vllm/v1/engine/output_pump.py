"""Brings what a core process sends to whoever handles it, without keeping an event loop busy for long."""

import asyncio
from collections import deque
from typing import Protocol

import msgspec

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.engine.core_client_mp import AsyncMPClient
from vllm.v1.engine.wire import Refused
from vllm.v1.messages import EngineCoreOutputs

logger = init_logger(__name__)


class OutputHandler(Protocol):
    """What the pump serves."""

    def handle_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take a step's outputs, or a slice of them."""

    def handle_refusal(self, refused: Refused) -> None: ...

    def handle_death(self, reason: str) -> None:
        """Nothing comes any more."""


class OutputPump:
    """Handles one slice in each round of the event loop.

    The next message is read when the one before is handled, so the core waits for a loop that can't follow. Nothing is
    lost when a loop ends in the middle: the pump goes on in the next one.
    """

    def __init__(self, client: AsyncMPClient, handler: OutputHandler) -> None:
        self._client = client
        self._handler = handler
        self._slices: deque[EngineCoreOutputs] = deque()
        self._is_running = False
        self._is_stopped = False

    def attach(self) -> None:
        """Serve the running loop."""
        if not self._is_stopped and self._client.attach(self._on_message, self.drain):
            self._is_running = False  # in a loop before this one
            self._on_message()

    def drain(self) -> None:
        """Handle everything that a core which has died left, then its death."""
        try:
            while not self._is_stopped and self._handle_next():
                pass
        except Exception:
            logger.exception("an output of the dead engine core could not be handled")
        self._report_death(self._client.describe_death())

    def stop(self) -> None:
        """Handle nothing any more."""
        self._is_stopped = True
        self._slices.clear()

    def _on_message(self) -> None:
        if not self._is_running:
            self._is_running = True
            self._run()

    def _run(self) -> None:
        if self._is_stopped:
            return
        try:
            has_more = self._handle_next()
        except Exception as error:
            logger.exception("an output could not be handled; the engine ends")
            self._report_death(f"the engine has died while it handled outputs: {type(error).__name__}: {error}")
            return
        if has_more:
            asyncio.get_running_loop().call_soon(self._run)
        else:
            self._is_running = False

    def _handle_next(self) -> bool:
        """Handle one slice; return False when there is none."""
        if not self._slices:
            message = self._client.receive_nowait()
            if message is None:
                return False
            if isinstance(message, Refused):
                self._handler.handle_refusal(message)
                return True
            self._slices.extend(cut(message.outputs, envs.output_proc_chunk_size()))
        self._handler.handle_outputs(self._slices.popleft())
        return True

    def _report_death(self, reason: str) -> None:
        if not self._is_stopped:
            self.stop()
            self._handler.handle_death(reason)


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
