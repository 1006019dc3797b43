"""Ctrl-C between two steps instead of in the middle of one."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

IMPATIENT = 3  # presses after which it is not held back any longer


class InterruptGuard:
    """Holds Ctrl-C back, so that no step is broken off half done; `check` lets it through.

    Only the main thread sees signals, and only a handler of Python's can be asked to wait: elsewhere it does nothing.
    The third press goes through at once, for a step that hangs.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._num_presses = 0

    def __enter__(self) -> "InterruptGuard":
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self._num_presses and kind is None:
            signal.raise_signal(signal.SIGINT)

    def check(self) -> None:
        """Let a Ctrl-C that was held back through: as a rule this raises KeyboardInterrupt."""
        if self._num_presses and self._previous is not None:
            self._num_presses = 0
            self._previous(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._num_presses += 1
        if self._num_presses >= IMPATIENT and self._previous is not None:
            self._num_presses = 0
            self._previous(number, frame)
