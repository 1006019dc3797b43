"""The requests that wait, lowest precedence value first.

One order serves both policies, since a precedence never changes: who was preempted, and children of an older family,
stand before what came later without being put there.
"""

import heapq

from vllm.v1.request import Precedence, Request


class RequestQueue:
    """A heap; what is removed from its middle stays there until it comes up or half of the heap is dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[Precedence, str]] = []
        self._requests: dict[str, Request] = {}
        self.num_sequences = 0  # a family counts its children

    def __len__(self) -> int:
        return len(self._requests)

    def push(self, request: Request) -> None:
        assert request.request_id not in self._requests, f"{request.request_id} waits already"
        self._requests[request.request_id] = request
        self.num_sequences += len(request.seeds)
        heapq.heappush(self._heap, (request.precedence, request.request_id))

    def get_first(self) -> Request:
        while not self._is_alive(self._heap[0]):
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def pop(self) -> Request:
        request = self.get_first()
        heapq.heappop(self._heap)
        self._forget(request)
        return request

    def discard(self, request: Request) -> None:
        """Remove `request` if it waits."""
        if self._requests.get(request.request_id) is not request:
            return
        self._forget(request)
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._heap = [entry for entry in self._heap if self._is_alive(entry)]
            heapq.heapify(self._heap)

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.num_sequences -= len(request.seeds)

    def _is_alive(self, entry: tuple[Precedence, str]) -> bool:
        request = self._requests.get(entry[1])
        return request is not None and request.precedence == entry[0]
