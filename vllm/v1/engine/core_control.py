"""Halting, sleeping and waking of a core that steps by itself."""

from collections.abc import Awaitable, Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

SCHEDULING_TAG = "scheduling"
SLEEP_STATES = {1: "weights_offloaded", 2: "discard_all"}


class CoreControl:
    """Keeps why the core does not step; `call` calls one of its methods."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call
        self._halts: set[str] = set()

    async def halt(self, reason: str) -> None:
        """Let the core take requests in, but run none."""
        await self._call("pause")
        self._halts.add(reason)

    async def resume(self, reason: str) -> None:
        """Take a reason back; without any other the core goes on."""
        if reason in self._halts:
            self._halts.discard(reason)
            if not self._halts:
                await self._call("resume")

    async def sleep(self, level: int) -> str:
        """Give memory back and return the state's name; level 0 only halts the core."""
        if level == 0:
            await self.halt("sleep")
            return "awake"
        if level not in SLEEP_STATES:
            raise VLLMValidationError("level must be 0, 1 or 2", parameter="level", value=level)
        await self._call("sleep", level)
        return SLEEP_STATES[level]

    async def wake_up(self, tags: list[str] | None) -> None:
        """Take memory again and go on: all of it, or what `tags` name."""
        if tags is None or SCHEDULING_TAG in tags:
            await self.resume("sleep")
        rest = None if tags is None else [tag for tag in tags if tag != SCHEDULING_TAG]
        if rest is None or rest:
            await self._call("wake_up", rest)

    async def is_sleeping(self) -> bool:
        return "sleep" in self._halts or bool(await self._call("is_sleeping"))
