"""The progress bar of `LLM.generate`: requests, and tokens or scored positions a second."""

import sys
import time
from collections.abc import Callable
from typing import Any

from vllm.outputs import RequestOutput

UseTqdm = bool | Callable[..., Any] | None


def _import_tqdm() -> Callable[..., Any]:
    from tqdm import tqdm  # 40 ms, and scripts mostly write to no terminal

    return tqdm


class ProgressBar:
    """A bar over `num_requests`.

    `use_tqdm`: None shows it where standard error is a terminal, True always, False never; a callable is used in
    tqdm's place.
    """

    def __init__(self, num_requests: int, use_tqdm: UseTqdm, description: str = "Processed prompts") -> None:
        if use_tqdm is None:
            use_tqdm = sys.stderr.isatty()
        self._bar = None
        if use_tqdm:
            make = use_tqdm if callable(use_tqdm) else _import_tqdm()
            self._bar = make(total=num_requests, desc=description, dynamic_ncols=True, unit="request")
        self._started = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_scored_positions = 0
        self._num_output_tokens = 0

    def update(self, output: RequestOutput) -> None:
        """Count a finished request."""
        if self._bar is None:
            return
        num_prompt_tokens = len(output.prompt_token_ids or ())
        self._num_prompt_tokens += num_prompt_tokens
        if output.prompt_logprobs is not None:
            self._num_scored_positions += num_prompt_tokens - 1  # the first has nothing before it
        self._num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        set_postfix_str = getattr(self._bar, "set_postfix_str", None)
        if set_postfix_str is not None:
            set_postfix_str(self._describe_speed(), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _describe_speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        if self._num_output_tokens == 0 and self._num_scored_positions > 0:
            return f"scored: {self._num_scored_positions / seconds:.0f} positions/s"
        return (
            f"prompt: {self._num_prompt_tokens / seconds:.0f} tok/s, "
            f"output: {self._num_output_tokens / seconds:.0f} tok/s"
        )
