"""The exception tree.

Exception
└── VLLMError
    ├── VLLMClientError                 the caller's fault (HTTP 4xx)
    │   ├── VLLMValidationError         a parameter breaks a rule; also a ValueError
    │   ├── VLLMNotFoundError           a named thing (model, request) is not here
    │   └── VLLMUnsupportedError        a known feature that this engine does not serve; a VLLMValidationError
    └── VLLMServerError                 our fault (HTTP 5xx)
        ├── QueueOverflowError          the queue is full; try again
        ├── MaxQueuedTokensError        the queue holds too many tokens; try again
        ├── ModelLoadError              a checkpoint can't be read; also a ValueError
        └── (vllm.v1.engine.exceptions) EngineDeadError, EngineGenerateError
"""

from typing import Any


class VLLMError(Exception):
    """The root of everything that this package raises on purpose."""


class VLLMClientError(VLLMError):
    """The caller can mend it."""


class VLLMValidationError(VLLMClientError, ValueError):
    """A parameter breaks a rule.

    `parameter` names the field and `value` holds what came; `str()` appends those that are given.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.value = value

    def __str__(self) -> str:
        given = [("parameter", self.parameter), ("value", self.value)]
        shown = ", ".join(f"{name}={shorten(item)}" for name, item in given if item is not None)
        return f"{self.message} ({shown})" if shown else self.message

    def __reduce__(self) -> Any:
        return (_rebuild_validation_error, (type(self), self.message, self.parameter, self.value))


class VLLMUnsupportedError(VLLMValidationError):
    """A known feature, asked for with effect, that this engine does not serve."""


class VLLMNotFoundError(VLLMClientError):
    """A named thing is not here."""


class VLLMServerError(VLLMError):
    """Only we can mend it."""


class QueueOverflowError(VLLMServerError):
    """The queue of requests is full."""


class MaxQueuedTokensError(VLLMServerError):
    """The queue holds too many prompt tokens."""


class ModelLoadError(VLLMServerError, ValueError):
    """A checkpoint can't be read or holds what this engine does not serve."""


def shorten(value: Any, limit: int = 200) -> str:
    """Return `str(value)`, cut so that a huge argument does not fill a log."""
    try:
        text = str(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "an integer too large to print"
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _rebuild_validation_error(
    kind: type[VLLMValidationError], message: str, parameter: str | None, value: Any
) -> VLLMValidationError:
    return kind(message, parameter=parameter, value=value)
