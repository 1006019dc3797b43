"""What waits between the engine's loop and one request's reader: a slow reader finds its outputs merged."""

import asyncio

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind


class RequestOutputCollector:
    """Holds at most one output: what comes while the reader is away is merged into it.

    Deltas are joined, so nothing is lost or doubled; of the other kinds the newest stands, for each child by itself.
    Writer and reader run in one event loop.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._aggregates = kind is RequestOutputKind.DELTA
        self._waiting: RequestOutput | BaseException | None = None
        self._has_item = asyncio.Event()

    def put(self, item: RequestOutput | BaseException) -> None:
        """Leave an output, or the error that ends the request."""
        waiting = self._waiting
        if isinstance(waiting, RequestOutput) and isinstance(item, RequestOutput):
            waiting.add(item, aggregate=self._aggregates)
        elif not isinstance(waiting, BaseException):
            self._waiting = item
        self._has_item.set()

    def get_nowait(self) -> RequestOutput | None:
        """Return what waits, or None; raises the error that was left."""
        item, self._waiting = self._waiting, None
        self._has_item.clear()
        if isinstance(item, BaseException):
            raise item
        return item

    async def get(self) -> RequestOutput:
        """Return what waits, as soon as something does; raises the error that was left."""
        while True:
            await self._has_item.wait()
            item = self.get_nowait()
            if item is not None:
                return item
