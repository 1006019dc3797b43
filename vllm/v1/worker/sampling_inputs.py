"""From rows of the persistent batch to what the sampler reads."""

import numpy as np
import torch

from vllm.v1.sample.logits_processor import LogitsEdits, RuledRow, make_edits
from vllm.v1.sample.metadata import Draws, Filters, SamplingMetadata, find_changed_rows, group_scored_rows
from vllm.v1.sample.ops.logprobs import RowKind, ScoreTable
from vllm.v1.sample.ops.penalties import Penalties, PenaltyRow, make_penalties
from vllm.v1.worker.gpu_input_batch import InputBatch


def make_sampling_metadata(batch: InputBatch, rows: np.ndarray, device: torch.device) -> SamplingMetadata:
    """Return how to sample from logits whose row i belongs to batch row `rows[i]`; rows: [num_rows] int64."""
    num_rows = len(rows)
    temperature = batch.temperature[rows]
    filters = _make_filters(batch, rows)
    edits = _make_edits(batch, rows, device)
    penalised = np.flatnonzero(batch.has_penalties[rows]).tolist()
    penalties = _make_penalties(batch, rows, penalised, device)
    has_temperature = bool((temperature != 1).any())
    metadata = SamplingMetadata(
        num_rows=num_rows,
        is_greedy=batch.is_greedy[rows],
        draws=_make_draws(batch, rows),
        temperature=temperature if has_temperature else None,
        filters=filters,
        edits=edits,
        penalties=penalties,
    )
    if not batch.score_kind[rows].any():
        return metadata
    table = _make_score_table(batch, rows)
    is_changed = find_changed_rows(num_rows, metadata.temperature, filters, edits, penalised)
    kept_rows, spans = group_scored_rows(table, batch.wants_processed[rows], is_changed, batch.num_draws[rows])
    return metadata._replace(score_table=table, kept_rows=kept_rows, spans=spans)


def advance_sampling_metadata(
    batch: InputBatch, rows: np.ndarray, last: SamplingMetadata, device: torch.device
) -> SamplingMetadata:
    """Return what `make_sampling_metadata` would; `last` is of the same rows, a token ago."""
    if (batch.has_rules | batch.has_penalties)[rows].any():  # these look at the tokens so far
        return make_sampling_metadata(batch, rows, device)
    if last.all_greedy:  # nothing is drawn at random, so positions are not read
        return last
    return last._replace(draws=last.draws._replace(positions=_find_positions(batch, rows, last.draws.row_of_draw)))


def _make_draws(batch: InputBatch, rows: np.ndarray) -> Draws:
    num_draws = batch.num_draws[rows]
    row_of_draw = np.repeat(np.arange(len(rows), dtype=np.int32), num_draws)
    if (num_draws == 1).all():
        seeds = batch.first_seed[rows]
    else:
        seeds = np.concatenate([batch.requests[row].seeds for row in rows.tolist()])
    return Draws(row_of_draw, seeds, _find_positions(batch, rows, row_of_draw))


def _find_positions(batch: InputBatch, rows: np.ndarray, row_of_draw: np.ndarray) -> np.ndarray:  # [num_draws] int64
    return batch.num_tokens[rows[row_of_draw]].astype(np.int64)


def _make_filters(batch: InputBatch, rows: np.ndarray) -> Filters | None:
    index = np.flatnonzero(batch.has_filters[rows])
    if not len(index):
        return None
    asking = rows[index]
    return Filters(index, batch.temperature[asking], batch.top_k[asking], batch.top_p[asking], batch.min_p[asking])


def _make_edits(batch: InputBatch, rows: np.ndarray, device: torch.device) -> LogitsEdits | None:
    index = np.flatnonzero(batch.has_rules[rows]).tolist()
    if not index:
        return None
    ruled = []
    for i in index:
        rules = batch.requests[rows[i]].rules
        assert rules is not None, "has_rules says so"
        ruled.append(RuledRow(i, rules, batch.get_generated(rows[i])))
    return make_edits(ruled, device)


def _make_penalties(batch: InputBatch, rows: np.ndarray, index: list[int], device: torch.device) -> Penalties | None:
    if not index:
        return None
    return make_penalties(
        (
            PenaltyRow(
                row=i,
                token_ids=batch.get_sequence(rows[i]),
                num_prompt_tokens=int(batch.num_prompt_tokens[rows[i]]),
                presence=float(batch.presence[rows[i]]),
                frequency=float(batch.frequency[rows[i]]),
                repetition=float(batch.repetition[rows[i]]),
            )
            for i in index
        ),
        batch.vocab_size,
        device,
    )


def _make_score_table(batch: InputBatch, rows: np.ndarray) -> ScoreTable:
    kinds = batch.score_kind[rows]
    given_index = np.flatnonzero(kinds == RowKind.GIVEN).tolist()
    given_ids = None
    if given_index:
        lists = {i: batch.requests[rows[i]].given_ids for i in given_index}
        given_ids = np.full((len(rows), max(len(ids) for ids in lists.values() if ids is not None)), -1, dtype=np.int32)
        for i, ids in lists.items():
            assert ids is not None, "a row of kind GIVEN has its ids"
            given_ids[i, : len(ids)] = ids
    return ScoreTable(kinds, batch.score_num_top[rows], batch.as_logits[rows], given_ids)
