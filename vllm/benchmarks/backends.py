"""One streamed request to an OpenAI server: the body that is sent, and the clock readings of its answer."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm.benchmarks.datasets import SampleRequest
from vllm.entrypoints.http_client import EventReader, HttpClient
from vllm.exceptions import VLLMError, VLLMValidationError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ENDPOINTS = {"openai": COMPLETIONS, "vllm": COMPLETIONS, "openai-chat": CHAT}


@dataclass(slots=True)
class RequestResult:
    """What one request was and took. Times are seconds by time.perf_counter()."""

    prompt_len: int
    started_at: float = 0.0
    first_at: float = 0.0  # the first token's event; 0: none came
    last_at: float = 0.0  # the last token's event, or the event of the end
    itls: list[float] = field(default_factory=list)  # gaps between the events of one choice
    token_times: list[float] = field(default_factory=list)
    num_choices: int = 0
    output_len: int = 0
    text: str = ""
    error: str = ""

    @property
    def is_success(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first_at - self.started_at

    @property
    def latency(self) -> float:
        """Time to the last token."""
        return self.last_at - self.started_at

    @property
    def tpot(self) -> float | None:
        """Time of an output token after the first one; a choice's share where there are several."""
        later = self.output_len / max(1, self.num_choices) - 1
        return (self.last_at - self.first_at) / later if later > 0 else None


# ---------------------------------------------------------------- what an event says


class _Delta(msgspec.Struct):
    content: str | None = None
    role: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode  # logprobs are skipped, not read


class StreamTimer:
    """Reads the events of one answer and notes when they came.

    An event with a choice is a token, or several that the server merged. Two kinds are not: one that only says who
    speaks, and an empty one that only ends the choice. Some servers let the last token (an end token, which has no
    text) come with the latter; it counts where the usage says that there were more tokens than events.
    """

    def __init__(self, result: RequestResult) -> None:
        self._result = result
        self._events = EventReader(self._on_event)
        self._previous: dict[int, float] = {}  # choice → its last event
        self._empty_ends: list[tuple[float, float]] = []  # (time, gap)
        self._texts: list[str] = []
        self._usage: _Usage | None = None
        self._has_ended = False
        self.feed = self._events.feed

    def _on_event(self, data: bytes, arrived_at: float) -> None:
        if data == b"[DONE]":
            self._has_ended = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self._result.error = self._result.error or f"an event is not what the API says: {error}"
            return
        if event.error:
            self._result.error = self._result.error or _describe_error(event.error)
            return
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices or ():
            self._on_choice(choice, arrived_at)

    def _on_choice(self, choice: _Choice, arrived_at: float) -> None:
        result = self._result
        text, has_only_role = choice.text or "", False
        if choice.delta is not None:
            delta = choice.delta
            text = delta.content or delta.reasoning or delta.reasoning_content or ""
            has_only_role = delta.role is not None and not text
        ends = choice.finish_reason is not None
        if has_only_role and not ends:
            return
        previous = self._previous.get(choice.index)
        result.last_at = arrived_at
        if ends:
            self._has_ended = True
            if not text and previous is not None:
                self._empty_ends.append((arrived_at, arrived_at - previous))
                return
        if previous is not None:
            result.itls.append(arrived_at - previous)
        if not result.first_at:
            result.first_at = arrived_at
        result.token_times.append(arrived_at)
        self._previous[choice.index] = arrived_at
        self._texts.append(text)

    def finish(self, count_tokens: Any = None) -> None:
        """Complete the result; `count_tokens(text)` is used where the server does not report how many there were."""
        result = self._result
        result.text = "".join(self._texts)
        result.num_choices = len(self._previous)
        num_reported = self._usage.completion_tokens if self._usage is not None else None
        for arrived_at, gap in self._empty_ends:
            if num_reported is not None and num_reported > len(result.token_times):
                result.itls.append(gap)
                result.token_times.append(arrived_at)
        if num_reported is not None:
            result.output_len = num_reported
        elif count_tokens is not None:
            result.output_len = count_tokens(result.text)
        else:
            result.output_len = len(result.token_times)
        if self._usage is not None and self._usage.prompt_tokens:
            result.prompt_len = self._usage.prompt_tokens
        if result.error:
            return
        if not result.first_at:
            result.error = "the stream held no token"
        elif not self._has_ended:
            result.error = "the stream ended before the answer did"


def _describe_error(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


# ---------------------------------------------------------------- what is sent


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes the bodies of requests."""

    backend: str
    model: str
    endpoint: str
    logprobs: int | None = None
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.backend.endswith("-chat")

    def make_body(self, request: SampleRequest, model: str | None = None) -> dict[str, Any]:
        """Return the body of a streamed request.

        Raises:
            VLLMValidationError: token ids for a chat.
        """
        body: dict[str, Any] = {"model": model or self.model}
        if self.is_chat:
            if not isinstance(request.prompt, str):
                raise VLLMValidationError(f"--backend {self.backend} sends texts: it needs --tokenizer to make them")
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if request.output_len is not None:
            body["max_completion_tokens" if self.is_chat else "max_tokens"] = request.output_len
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs} if self.is_chat else {"logprobs": self.logprobs}
        if self.ignore_eos:
            body["ignore_eos"] = True
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return {**body, **self.sampling, **self.extra_body}


async def send_request(
    client: HttpClient,
    endpoint: str,
    body: Mapping[str, Any],
    prompt_len: int,
    *,
    request_id: str | None = None,
    count_tokens: Any = None,
) -> RequestResult:
    """Send one request and return its times; a failure is in the result's `error`."""
    result = RequestResult(prompt_len)
    timer = StreamTimer(result)
    headers = {"x-request-id": request_id} if request_id else None
    result.started_at = time.perf_counter()
    try:
        answer = await client.send("POST", endpoint, body, on_data=timer.feed, headers=headers)
    except VLLMError as error:
        result.error = str(error)
    else:
        if not answer.is_ok:
            result.error = answer.describe_refusal()
    timer.finish(count_tokens)
    return result
