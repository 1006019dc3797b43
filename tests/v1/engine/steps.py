"""Steps of a core, made by hand: what an output processor sees, without a model."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.input_processor import InputProcessor, ProcessedRequest
from vllm.v1.engine.output_processor import OutputProcessor, ProcessedOutputs
from vllm.v1.messages import (
    DecodeBatchTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    PromptScores,
    RowRange,
)

NUM_TOP = 2  # entries of a row beside the chosen one


def token(char: str) -> int:
    """Return the id of an ASCII character in the tiny byte-level vocabulary."""
    return ord(char) + 3


def value_of(token_id: int) -> float:
    """Return the value that hand-made rows give to a token."""
    return -token_id / 64


def make_block(token_ids: Sequence[int]) -> FlatLogprobs:
    """Return a row for each token: the token itself, then tokens 5 and 6."""
    width = 1 + NUM_TOP
    ids = np.array([[token_id, 5, 6] for token_id in token_ids], np.int32).reshape(-1, width)
    return FlatLogprobs.from_arrays(
        np.arange(len(token_ids) + 1, dtype=np.int64) * width,
        ids.ravel(),
        (-ids.ravel() / 64).astype(np.float32),
        np.tile(np.array([40, 1, 2], np.int32), len(token_ids)),
    )


def make_even_block(token_ids: Sequence[int]) -> FlatLogprobs:
    """Return the same rows as a core sends them, of a rectangle with room for one entry more."""
    columns = make_block(token_ids).to_arrays()
    ids, values, ranks = (
        np.pad(column.reshape(-1, 1 + NUM_TOP), ((0, 0), (0, 1)), constant_values=99)
        for column in (columns.token_ids, columns.values, columns.ranks)
    )
    return FlatLogprobs.from_rectangle(ids, values, ranks, np.full(len(ids), 1 + NUM_TOP, np.int32))


def params(kind: RequestOutputKind, **fields: object) -> SamplingParams:
    """Return params that ask for logprobs and bring a seed, unless `fields` say otherwise."""
    return SamplingParams(output_kind=kind, **{"logprobs": NUM_TOP, "seed": 0, **fields})


@dataclasses.dataclass
class Move:
    """What a step brings one sequence."""

    child_id: str
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    is_scored: bool = True


class Bench:
    """An output processor, the input processor that feeds it, and the steps between."""

    def __init__(
        self, config: VllmConfig, tokenizer: Tokenizer, *, uses_table: bool = False, **options: object
    ) -> None:
        """With `uses_table`, sequences that just go on come as columns of one table, as from a real core."""
        self.inputs = InputProcessor(config, tokenizer)
        self.outputs = OutputProcessor(tokenizer, **options)  # type: ignore[arg-type]
        self._uses_table = uses_table
        self._has_spoken: set[str] = set()

    def add(
        self, params: SamplingParams, prompt: object = "ab", request_id: str = "r", sink: object = None
    ) -> list[str]:
        """Let a request in and return the ids of its children."""
        processed = self.inputs.process(request_id, prompt, params)
        self.last: ProcessedRequest = processed
        self.outputs.add_request(processed, sink)  # type: ignore[arg-type]
        return processed.core_request.child_ids

    def step(self, *moves: Move, prompt_rows: Sequence[int] = (), scored: bool = True) -> ProcessedOutputs:
        """Take one step; `prompt_rows` are the prompt tokens of the last added request that it scored."""
        rows: list[int] = list(prompt_rows)
        outputs = []
        for move in moves:
            has_rows = scored and move.is_scored and len(move.token_ids) > 0
            span = RowRange(len(rows), len(rows) + len(move.token_ids)) if has_rows else None
            rows += move.token_ids if span else ()
            outputs.append(
                EngineCoreOutput(
                    request_id=move.child_id,
                    new_token_ids=list(move.token_ids),
                    rows=span,
                    finish_reason=move.finish_reason,
                    stop_reason=move.stop_reason,
                    error=move.error,
                    num_cached_tokens=move.num_cached_tokens,
                )
            )
        scores = []
        if prompt_rows:
            request_id = self.last.core_request.request_id
            scores = [PromptScores(request_id=request_id, rows=RowRange(0, len(prompt_rows)))]
        make = make_even_block if self._uses_table else make_block
        block = make(rows) if rows else None
        outputs, batch = self._split(outputs)
        return self.outputs.process_outputs(
            EngineCoreOutputs(outputs=outputs, prompt_scores=scores, decode_batch=batch, logprobs=block)
        )

    def _split(self, outputs: list[EngineCoreOutput]) -> tuple[list[EngineCoreOutput], DecodeBatchTokens | None]:
        just_go_on = [
            output
            for output in outputs
            if self._uses_table
            and output.request_id in self._has_spoken
            and len(output.new_token_ids) == 1
            and output.finish_reason is None
        ]
        self._has_spoken |= {output.request_id for output in outputs}
        if not just_go_on:
            return outputs, None
        just_go_on.sort(key=lambda output: output.rows is None)
        table = DecodeBatchTokens(
            request_ids=[output.request_id for output in just_go_on],
            token_ids=[output.new_token_ids[0] for output in just_go_on],
            rows=[output.rows.first for output in just_go_on if output.rows is not None],
        )
        return [output for output in outputs if output not in just_go_on], table
