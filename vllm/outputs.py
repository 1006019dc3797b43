"""What a caller gets back: `RequestOutput` and its completions, and how outputs of one request are merged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm.logprobs import FlatLogprobs, PromptLogprobs, SampleLogprobs

_Output = TypeVar("_Output")


@dataclass
class CompletionOutput:
    """One of the n continuations of a prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None  # of all tokens so far, in a delta too; None when no logprobs were asked
    logprobs: SampleLogprobs | None  # as long as token_ids
    routed_experts: Any = None
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | str | None = None  # the stop string or the stop token id that ended it
    lora_request: Any = None
    sampling_mask: Any = None
    spec_decode_metrics: Any = None
    weight_versions: Any = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput:
    """What one prompt has brought so far, or since the last output, or in the end (`RequestOutputKind`)."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None,  # as long as prompt_token_ids; its first position is None
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: Any = None,  # RequestStateStats when statistics are on
        lora_request: Any = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        num_cache_creation_tokens: int | None = None,
        *,
        prompt_token_id_logprobs: Any = None,
        kv_transfer_params: dict[str, Any] | None = None,
        ec_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.num_cache_creation_tokens = num_cache_creation_tokens
        self.prompt_token_id_logprobs = prompt_token_id_logprobs
        self.kv_transfer_params = kv_transfer_params
        self.ec_transfer_params = ec_transfer_params

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Merge the request's next output into this one, in place.

        With `aggregate` (deltas) a completion is continued by the next one of its index, else it is replaced by it;
        completions of a new index are added. Nothing that this output or the next one holds is written to.
        """
        self.finished = self.finished or next_output.finished
        if next_output.metrics is not None:
            self.metrics = next_output.metrics
        places = {completion.index: i for i, completion in enumerate(self.outputs)}
        outputs = list(self.outputs)
        for following in next_output.outputs:
            i = places.get(following.index)
            if i is None:
                places[following.index] = len(outputs)
                outputs.append(following)
            else:
                outputs[i] = _join(outputs[i], following) if aggregate else following
        self.outputs = outputs

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({shown})"


def _join(completion: CompletionOutput, following: CompletionOutput) -> CompletionOutput:
    """Return one delta that stands for two, one after the other."""
    return CompletionOutput(
        index=completion.index,
        text=completion.text + following.text,
        token_ids=[*completion.token_ids, *following.token_ids],
        cumulative_logprob=following.cumulative_logprob,
        logprobs=_join_logprobs(completion.logprobs, following.logprobs),
        routed_experts=following.routed_experts,
        finish_reason=following.finish_reason,
        stop_reason=following.stop_reason,
        lora_request=following.lora_request,
        sampling_mask=following.sampling_mask,
        spec_decode_metrics=following.spec_decode_metrics,
        weight_versions=following.weight_versions,
    )


def _join_logprobs(first: SampleLogprobs | None, second: SampleLogprobs | None) -> SampleLogprobs | None:
    if not first or not second:
        return first or second or (second if first is None else first)
    if isinstance(first, FlatLogprobs) and isinstance(second, FlatLogprobs):
        return FlatLogprobs.concatenate([first, second])
    return [*first, *second]


# ---------------------------------------------------------------- names that clients import; pooling is not served


@dataclass
class PoolingOutput:
    """What a pooling model gives; this engine serves none."""

    data: Any


@dataclass
class EmbeddingOutput:
    """An embedding; this engine serves none."""

    embedding: list[float]


@dataclass
class ClassificationOutput:
    """Class probabilities; this engine serves none."""

    probs: list[float]


@dataclass
class ScoringOutput:
    """A similarity; this engine serves none."""

    score: float


@dataclass
class PoolingRequestOutput(Generic[_Output]):
    """What one request to a pooling model gives; this engine serves none."""

    request_id: str
    outputs: _Output
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """One request's embedding; this engine serves none."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """One request's class probabilities; this engine serves none."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """One request's similarity; this engine serves none."""
