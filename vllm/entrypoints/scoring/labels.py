"""Labels: single tokens whose probabilities as the next token are compared."""

from collections.abc import Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.scoring.pairs import ContextKey, ScoredPair, find_leading_ids
from vllm.entrypoints.scoring.results import ContinuationScore, LabelScores
from vllm.exceptions import VLLMValidationError, shorten
from vllm.inputs import ParsedPrompt
from vllm.tokenizers.tokenizer import Tokenizer


def encode_labels(
    labels: Sequence[Any], tokenizer: Tokenizer | None, vocab_size: int, *, parameter: str = "labels"
) -> list[int]:
    """Return the token id of each label, which is a text or a token id.

    Raises:
        VLLMValidationError: there is none, one comes twice, is unknown to the model, or has several tokens: the message
            names every such label with its tokens.
    """
    if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
        raise VLLMValidationError(
            f"{parameter} must be a list of at least one text or token id", parameter=parameter, value=labels
        )
    encoded = [_encode_label(label, tokenizer, f"{parameter}[{i}]", parameter) for i, label in enumerate(labels)]
    several = [
        f"{label!r} ({len(token_ids)} tokens: {', '.join(map(str, token_ids))})"
        for label, token_ids in zip(labels, encoded, strict=True)
        if len(token_ids) != 1
    ]
    if several:
        raise VLLMValidationError(
            f"a label must be a single token; these are not: {shorten('; '.join(several), 1000)}. Score labels of "
            "several tokens as continuations",
            parameter=parameter,
        )
    ids = [token_ids[0] for token_ids in encoded]
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise VLLMValidationError(
                f"{parameter}[{index}] is token id {token_id}; token ids must be from 0 to {vocab_size - 1}",
                parameter=parameter,
                value=token_id,
            )
        if token_id in ids[:index]:
            raise VLLMValidationError(
                f"{parameter}[{index}] is the same token as {parameter}[{ids.index(token_id)}]: {token_id}",
                parameter=parameter,
                value=labels[index],
            )
    return ids


def _encode_label(label: Any, tokenizer: Tokenizer | None, place: str, parameter: str) -> list[int]:
    if isinstance(label, bool) or not (isinstance(label, str) or hasattr(label, "__index__")):
        raise VLLMValidationError(
            f"{place} must be a text or a token id; got {type(label).__name__}", parameter=parameter, value=label
        )
    if not isinstance(label, str):
        return [int(label)]
    if tokenizer is None:
        raise VLLMValidationError(f"{place} is a text, and this engine has no tokenizer", parameter=parameter)
    return tokenizer.encode(label, add_special_tokens=False)


def make_label_pairs(
    prompts: Sequence[ParsedPrompt], label_ids: Sequence[int], model_config: ModelConfig, *, parameter: str = "prompts"
) -> list[ScoredPair]:
    """Return a pair for each prompt (which has its token ids) and each label.

    Raises:
        VLLMValidationError: a prompt is empty, too long, or holds a token that the model does not have.
    """
    limit = model_config.max_model_len - 1
    pairs = []
    for index, prompt in enumerate(prompts):
        token_ids = tuple(prompt.token_ids or ())
        if not 1 <= len(token_ids) <= limit:
            raise VLLMValidationError(
                f"{parameter}[{index}] has {len(token_ids)} tokens; there must be from 1 to {limit} (the model's "
                f"maximum context length is {limit + 1} tokens)",
                parameter=parameter,
                value=len(token_ids),
            )
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < model_config.vocab_size:
                raise VLLMValidationError(
                    f"{parameter}[{index}] holds token id {token_id}, which is out of vocabulary: token ids must be "
                    f"from 0 to {model_config.vocab_size - 1}",
                    parameter=parameter,
                    value=token_id,
                )
        key = ContextKey(prompt.cache_salt or "", token_ids)
        pairs += [ScoredPair(key, (label_id,), None) for label_id in label_ids]
    return pairs


def tokenize_prompts(
    prompts: Sequence[ParsedPrompt], tokenizer: Tokenizer | None, *, add_special_tokens: bool, parameter: str
) -> list[ParsedPrompt]:
    """Return the prompts with token ids; a text gets the model's tokens in front of it, and none behind it."""
    texts = [prompt.text or "" for prompt in prompts if prompt.token_ids is None]
    if not texts:
        return list(prompts)
    if tokenizer is None:
        raise VLLMValidationError("a prompt of text needs a tokenizer; pass token ids", parameter=parameter)
    leading = find_leading_ids(tokenizer) if add_special_tokens else []
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    return [
        prompt if prompt.token_ids is not None else prompt._replace(token_ids=[*leading, *next(encoded)])
        for prompt in prompts
    ]


def gather_labels(scores: Sequence[ContinuationScore], num_labels: int) -> list[LabelScores]:
    """Return the labels of each prompt from the scores of `make_label_pairs`' pairs."""
    return [
        LabelScores(
            token_ids=[score.token_ids[0] for score in row],
            logprobs=[score.logprobs[0] for score in row],
            ranks=[score.ranks[0] for score in row],
            num_prompt_tokens=row[0].num_context_tokens,
            error=row[0].error,
        )
        for row in (scores[start : start + num_labels] for start in range(0, len(scores), num_labels))
    ]
