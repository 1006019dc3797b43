"""Texts longer than the model: windows that overlap, in which each token is scored once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams


class Window(NamedTuple):
    """Positions begin … end − 1 of a text run together; those from `first` on are scored there."""

    begin: int
    end: int
    first: int


def check_window(window: int | None, stride: int | None, max_model_len: int) -> tuple[int, int]:
    """Return window and stride; by default a window is the model's length and the stride half of it.

    Raises:
        VLLMValidationError: one is out of its range; with a stride as long as the window a token would have nothing
            before it.
    """
    window = max_model_len if window is None else window
    if not 2 <= window <= max_model_len:
        raise VLLMValidationError(
            f"window must be from 2 to the model's length of {max_model_len}; got {window}",
            parameter="window",
            value=window,
        )
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride < window:
        raise VLLMValidationError(
            f"stride must be from 1 to {window - 1} (the window less the one token that the first needs before it); "
            f"got {stride}",
            parameter="stride",
            value=stride,
        )
    return window, stride


def make_windows(num_tokens: int, num_unscored: int, window: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a text of `num_tokens`, the first `num_unscored` of which are context only.

    Window i begins at i · stride and scores what no window before has reached: as transformers' guide to the perplexity
    of fixed-length models does. So a token has at least window − stride tokens before it, once that many are there.
    """
    scored_to = max(1, num_unscored)  # a first token has nothing before it
    for begin in range(0, num_tokens, stride):
        end = min(begin + window, num_tokens)
        if end > scored_to:
            yield Window(begin, end, scored_to)
            scored_to = end
        if end == num_tokens:
            return


@dataclass(slots=True)
class TextScore:
    """A text's values, with an entry for each of its own tokens; None where a token has nothing before it."""

    token_ids: list[int]
    logprobs: list[float | None] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float, int]] | None] = field(default_factory=list)  # (token id, logprob, rank)
    num_windows: int = 0
    error: str | None = None


class EncodedText(NamedTuple):
    """A text as token ids, special tokens of the model in front."""

    num_leading: int
    token_ids: list[int]


def score_texts(
    llm: Any, texts: Sequence[EncodedText], window: int, stride: int, top_k: int | None = None
) -> list[TextScore]:
    """Score texts of any length with an `LLM`; `top_k` alternatives come with each token where it is given."""
    windows = [list(make_windows(len(text.token_ids), text.num_leading, window, stride)) for text in texts]
    prompts = [
        {"prompt_token_ids": text.token_ids[place.begin : place.end]}
        for text, places in zip(texts, windows, strict=True)
        for place in places
    ]
    params = [_make_params(place, top_k) for places in windows for place in places]
    outputs = iter(llm.generate(prompts, params, use_tqdm=False))
    scored = []
    for text, places in zip(texts, windows, strict=True):
        score = TextScore(text.token_ids[text.num_leading :], num_windows=len(places))
        num_without = len(score.token_ids) if not places else places[0].first - text.num_leading
        _append_none(score, num_without, top_k)
        for place in places:
            _append_window(score, place, next(outputs), top_k)
        scored.append(score)
    return scored


def _make_params(place: Window, top_k: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=0,
        temperature=0.0,
        detokenize=False,
        prompt_logprobs=top_k or 0,
        prompt_logprobs_start=place.first - place.begin,
        logprobs_mode="raw_logprobs",
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _append_none(score: TextScore, count: int, top_k: int | None) -> None:
    score.logprobs += [None] * count
    score.ranks += [None] * count
    if top_k:
        score.top_logprobs += [None] * count


def _append_window(score: TextScore, place: Window, output: Any, top_k: int | None) -> None:
    completion = output.outputs[0]
    num_rows = place.end - place.first
    if completion.finish_reason == "error":
        score.error = f"{completion.stop_reason or 'the logits are no numbers'}"
        _append_none(score, num_rows, top_k)
        return
    rows = output.prompt_logprobs.take_rows(place.first - place.begin, place.end - place.begin)
    arrays = rows.to_arrays()
    firsts = arrays.row_starts[:-1]
    score.logprobs += arrays.values[firsts].tolist()
    score.ranks += arrays.ranks[firsts].tolist()
    if top_k:
        score.top_logprobs += [_take_top(rows, row, top_k) for row in range(num_rows)]


def _take_top(rows: Any, row: int, top_k: int) -> list[tuple[int, float, int]]:
    """Return the `top_k` most likely tokens of a row, the actual one only where it is among them."""
    ids, values, ranks = rows.row_values(row)
    entries = list(zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True))
    return sorted(entries, key=lambda entry: entry[2])[:top_k]
