"""From logits to tokens and their scores.

The order, each step only for the rows that ask:

    1. most likely token, and a check for NaN and +inf, in one pass over the model's own (raw) logits
    2. raw logits are set aside for rows that want raw scores and are changed below
    3. allowed_token_ids, bad_words, min_tokens, logit_bias          (vllm/v1/sample/logits_processor.py)
    4. repetition, frequency and presence penalties                  (ops/penalties.py)
    5. greedy rows: the most likely token of what 3 and 4 made; they are not changed further
    6. min-p, top-k, top-p: decided on the values before temperature (ops/topk_topp_sampler.py)
    7. temperature
    8. draws                                                         (ops/random.py)
    9. scores, of the raw logits or of those that were sampled from  (ops/logprobs.py)
"""

import numpy as np
import torch

from vllm.ops import api as ops
from vllm.v1.outputs import LogprobsTensors, SamplerOutput, Scores, WideRows
from vllm.v1.sample.logits_processor import apply_edits
from vllm.v1.sample.metadata import SamplingMetadata, ScoredSpan
from vllm.v1.sample.ops.logprobs import RowKind, ScoreTable, score
from vllm.v1.sample.ops.penalties import apply_penalties
from vllm.v1.sample.ops.random import draw
from vllm.v1.sample.ops.topk_topp_sampler import apply_filters


class Sampler:
    """Samples from rows of logits, in the order that the module's docstring lists."""

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Draw from each row and score what was drawn.

        `logits` ([num_rows, vocab_size] float32) is changed in place. A row that is not finite yields some token
        and is flagged; other rows don't notice.
        """
        most_likely, is_finite = ops.argmax_rows(logits)
        kept = None
        if metadata.kept_rows is not None:
            kept = logits[torch.from_numpy(metadata.kept_rows).to(logits.device)]
        has_candidates = None
        if metadata.edits is not None or metadata.penalties is not None:
            self._apply_rules(logits, metadata)
            most_likely, has_candidates = ops.argmax_rows(logits)
        if not metadata.all_greedy:
            self._apply_randomness(logits, metadata)
        token_ids = self._draw(logits, most_likely, metadata)
        scores = self._score(logits, kept, token_ids, metadata) if metadata.spans else None
        return SamplerOutput(token_ids, is_finite, has_candidates, scores)

    @staticmethod
    def _apply_rules(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
        if metadata.edits is not None:
            apply_edits(logits, metadata.edits)
        if metadata.penalties is not None:
            apply_penalties(logits, metadata.penalties)

    @staticmethod
    def _apply_randomness(logits: torch.Tensor, metadata: SamplingMetadata) -> None:
        if metadata.filters is not None:
            filters = metadata.filters
            apply_filters(logits, filters.rows, *filters.settings_on(logits.device))
        if metadata.temperature is not None:  # rows that don't ask are divided by 1, which is exact
            logits.div_(torch.from_numpy(metadata.temperature).to(logits.device)[:, None])

    @staticmethod
    def _draw(logits: torch.Tensor, most_likely: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Return a token a draw; a greedy row is computed once and answered as often as it is drawn from."""
        draws = metadata.draws
        if metadata.all_random:
            return draw(logits, *draws)
        num_draws = len(draws.row_of_draw)
        token_ids = most_likely
        if num_draws != metadata.num_rows:
            token_ids = most_likely[torch.from_numpy(draws.row_of_draw).to(logits.device).long()]
        if metadata.all_greedy:
            return token_ids
        random_draws = np.flatnonzero(~metadata.is_greedy[draws.row_of_draw])
        drawn = draw(logits, *draws.take(random_draws))
        return token_ids.index_copy(0, torch.from_numpy(random_draws).to(logits.device), drawn)

    @staticmethod
    def _score(
        logits: torch.Tensor, kept: torch.Tensor | None, token_ids: torch.Tensor, metadata: SamplingMetadata
    ) -> Scores:
        assert metadata.score_table is not None, "spans come with their table"
        parts = []
        for span in metadata.spans:
            source, first = logits, span.first
            if span.kept_first is not None:
                assert kept is not None, "a span names kept rows"
                source, first = kept, span.kept_first
            rows = source[first : first + span.end - span.first]
            chosen = token_ids[span.first_draw : span.first_draw + span.num_draws]
            table = metadata.score_table.take_rows(slice(span.first, span.end))
            scores = (
                score(rows, chosen, table) if span.num_draws == len(rows) else _score_many_draws(rows, chosen, table)
            )
            parts.append(_shift(scores, span))
        rectangles = [part.rectangle for part in parts if part.rectangle is not None]
        return Scores(
            LogprobsTensors.concatenate(rectangles) if rectangles else None,
            [block for part in parts for block in part.wide],
            torch.cat([part.is_finite for part in parts]),
        )


def _shift(scores: Scores, span: ScoredSpan) -> Scores:
    """Number the wide rows by draw instead of by row of the span."""
    return scores._replace(wide=[block._replace(first=block.first + span.first_draw) for block in scores.wide])


def _score_many_draws(row: torch.Tensor, chosen: torch.Tensor, table: ScoreTable) -> Scores:
    """Score the draws from one row ([1, vocab_size]): each distinct token once, on a view that repeats nothing."""
    num_draws = len(chosen)
    if table.kinds[0] == RowKind.FULL:
        (block,) = score(row, chosen[:1], table).wide
        values, ranks = block.values.expand(num_draws, -1), block.ranks.expand(num_draws, -1)
        is_finite = torch.ones(num_draws, dtype=torch.bool, device=row.device)
        return Scores(None, [WideRows(0, chosen, None, values, ranks)], is_finite)
    distinct, index = torch.unique(chosen, return_inverse=True)
    repeated = table.take_rows(np.zeros(len(distinct), dtype=np.int64))
    scores = score(row.expand(len(distinct), -1), distinct, repeated)
    is_finite = scores.is_finite[index]
    if scores.rectangle is not None:
        return Scores(scores.rectangle.take_rows(index), [], is_finite)
    (block,) = scores.wide
    columns = [tensor[index] for tensor in block[2:] if tensor is not None]
    return Scores(None, [WideRows(0, chosen, *columns)], is_finite)
