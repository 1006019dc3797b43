"""Steps of a core, made by hand: what an output processor sees, without a model."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vllm.config import VllmConfig
from vllm.logprobs.block import LogprobsBlock
from vllm.logprobs.rows import EMPTY_SLOT
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


def make_block(token_ids: Sequence[int], width: int = 1 + NUM_TOP) -> LogprobsBlock:
    """Return a row for each token: the token itself, then tokens 5 and 6, then empty slots."""
    ids = np.full((len(token_ids), width), EMPTY_SLOT, np.int32)
    ids[:, 0], ids[:, 1:3] = token_ids, (5, 6)
    ranks = np.tile(np.array([40, 1, 2, *[99] * (width - 3)], np.int32), (len(token_ids), 1))
    return LogprobsBlock.of_rectangle(ids, (-ids / 64).astype(np.float32), ranks)


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
        self._num_steps = 0
        self._last_table: tuple[list[str], list[int]] | None = None
        self._num_batches = 0

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
        self._num_steps += 1
        block = make_block(rows, width=3 + self._num_steps % 2 * 10 if self._uses_table else 3) if rows else None
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
        request_ids = [output.request_id for output in just_go_on]
        rows = [output.rows.first for output in just_go_on if output.rows is not None]
        others = [output for output in outputs if output not in just_go_on]
        if self._last_table != (request_ids, rows):
            self._num_batches += 1
        self._last_table = None if others else (request_ids, rows)
        table = DecodeBatchTokens(
            request_ids=request_ids,
            token_ids=[output.new_token_ids[0] for output in just_go_on],
            rows=rows,
            batch_id=None if others else self._num_batches,
        )
        return others, table
