"""From a batch of `vllm score`'s lines to its records."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.entrypoints.llm import LLM
from vllm.entrypoints.scoring.batch import ScoringBatch
from vllm.entrypoints.scoring.items import ChoiceItem, SourceLine, TextItem, parse_line
from vllm.entrypoints.scoring.offline import score_batch
from vllm.entrypoints.scoring.pairs import PairEncoder, ScoredPair
from vllm.entrypoints.scoring.results import ContinuationScore, as_json_number, sum_for_json
from vllm.entrypoints.scoring.windows import EncodedText, TextScore, score_texts
from vllm.exceptions import VLLMValidationError

_TOKEN_COLUMNS = ("token_ids", "logprobs", "ranks")


class ScoredBatch(NamedTuple):
    """The records of a batch, one a line, in order."""

    records: list[dict[str, Any]]

    @property
    def first_bad(self) -> int | None:
        return next((i for i, record in enumerate(self.records) if "error" in record), None)

    @property
    def first_error(self) -> str | None:
        """Return what is wrong with the first bad line, with its number."""
        if self.first_bad is None:
            return None
        record = self.records[self.first_bad]
        return f"line {record['line']}: {record['error']}"

    @property
    def records_before_bad(self) -> list[dict[str, Any]]:
        return self.records[: self.first_bad]


class LineScorer:
    """Scores lines by an `LLM`, as the settings of a run say."""

    def __init__(self, llm: LLM, settings: Mapping[str, Any]) -> None:
        self._llm = llm
        self._settings = settings
        self._encoder = PairEncoder(
            llm.model_config,
            llm.llm_engine.tokenizer,
            tokenization=settings["tokenization"],
            add_special_tokens=settings["add_special_tokens"],
        )

    def score(self, lines: Sequence[SourceLine]) -> ScoredBatch:
        """Return the records of a batch; that of a bad line has an `error`."""
        records = [{"line": line.number, "digest": line.digest} for line in lines]
        texts: list[tuple[dict[str, Any], TextItem, EncodedText]] = []
        choices: list[tuple[dict[str, Any], ChoiceItem, list[ScoredPair]]] = []
        for line, record in zip(lines, records, strict=True):
            try:
                item = parse_line(line, self._settings["source_format"])
                if isinstance(item, TextItem):
                    texts.append((record, item, EncodedText(*self._encoder.encode_text(item.text))))
                else:
                    (pairs,) = self._encoder.encode_all([item.context], [item.choices])
                    choices.append((record, item, pairs))
            except VLLMValidationError as error:
                record["error"] = _as_of_a_line(error)
        self._score_texts(texts)
        self._score_choices(choices)
        return ScoredBatch(records)

    def _score_texts(self, texts: Sequence[tuple[dict[str, Any], TextItem, EncodedText]]) -> None:
        settings = self._settings
        encoded = [text for _, _, text in texts]
        scores = score_texts(self._llm, encoded, settings["window"], settings["stride"], settings["top_k"])
        for (record, item, _), score in zip(texts, scores, strict=True):
            record.update(self._describe_text(item, score))

    def _score_choices(self, choices: Sequence[tuple[dict[str, Any], ChoiceItem, list[ScoredPair]]]) -> None:
        scores = iter(score_batch(self._llm, ScoringBatch(pair for _, _, row in choices for pair in row), False))
        for record, item, row in choices:
            record.update(self._describe_choices(item, [next(scores) for _ in row]))

    def _describe_text(self, item: TextItem, score: TextScore) -> dict[str, Any]:
        record: dict[str, Any] = {} if item.own_id is None else {"id": item.own_id}
        if score.error is not None:
            return record | {"type": "text", "error": score.error}
        record |= {
            "type": "text",
            "logprob": sum_for_json(score.logprobs),
            "num_tokens": len(score.token_ids),
            "num_scored_tokens": sum(value is not None for value in score.logprobs),
            "num_words": len(item.text.split()),
            "num_bytes": len(item.text.encode("utf-8", "replace")),
            "num_windows": score.num_windows,
        }
        if self._settings["sums_only"]:
            return record
        record["token_ids"] = score.token_ids
        record["logprobs"] = [as_json_number(value) for value in score.logprobs]
        record["ranks"] = score.ranks
        if self._settings["top_k"]:
            record["top_logprobs"] = [
                None if row is None else [[i, as_json_number(value), rank] for i, value, rank in row]
                for row in score.top_logprobs
            ]
        return record

    def _describe_choices(self, item: ChoiceItem, scores: Sequence[ContinuationScore]) -> dict[str, Any]:
        record: dict[str, Any] = {} if item.own_id is None else {"id": item.own_id}
        errors = [score.error for score in scores if score.error is not None]
        if errors:
            return record | {"type": "choices", "error": errors[0]}
        best = max(range(len(scores)), key=lambda i: scores[i].logprob)
        per_byte = [-math.inf if score.logprob_per_byte is None else score.logprob_per_byte for score in scores]
        best_per_byte = max(range(len(scores)), key=per_byte.__getitem__)
        described = [score.to_dict() for score in scores]
        if self._settings["sums_only"]:
            described = [{k: v for k, v in score.items() if k not in _TOKEN_COLUMNS} for score in described]
        return record | {
            "type": "choices",
            "best": best,
            "best_per_byte": best_per_byte,
            "answer": item.answer,
            "is_correct": None if item.answer is None else best == item.answer,
            "is_correct_per_byte": None if item.answer is None else best_per_byte == item.answer,
            "scores": described,
        }


def _as_of_a_line(error: VLLMValidationError) -> str:
    """Return the message with the names that a line's fields have."""
    message = str(error)
    for name, own in (("contexts[0]", "context"), ("continuations[0]", "choices"), ("parameter=continuations", "")):
        message = message.replace(name, own)
    return message
