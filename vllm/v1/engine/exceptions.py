"""What goes wrong in the engine itself."""

from vllm.exceptions import VLLMServerError


class EngineGenerateError(VLLMServerError):
    """One generate call failed; the engine goes on."""


class EngineDeadError(VLLMServerError):
    """The engine has died: this call and all later ones fail."""

    def __init__(self, message: str = "the engine core has died; its own error stands above in the log") -> None:
        super().__init__(message)
