"""Gathers what a step makes on the device, and brings it to the host in one copy."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm.logprobs.block import LogprobsBlock, WholeRows
from vllm.v1.messages import ModelRunnerOutput, RowRange, SampledTokens
from vllm.v1.outputs import LogprobsTensors, SamplerOutput, Scores, WideRows
from vllm.v1.worker.scored_rows import OwnedRows

NOT_FINITE = (
    "the model's logits hold NaN or +inf, or are -inf throughout: the weights or the numbers of this dtype are broken"
)
NO_CANDIDATE = "allowed_token_ids, bad_words, min_tokens, logit_bias and penalties leave no token to sample"


@dataclass(slots=True)
class RowOwners:
    """Where each request's rows ended up: of the samples, or of the prompts."""

    ranges: dict[str, RowRange] = field(default_factory=dict)  # rows of the step's block
    wide: dict[str, RowRange] = field(default_factory=dict)  # rows behind the rectangle's, counted from there
    whole: dict[str, list[WholeRows]] = field(default_factory=dict)

    def list_rows(self, request_id: str, num_draws: int) -> list[RowRange | None]:
        """Return the row of each draw: in the step's block, or among the request's own."""
        rows = RowRange(0, num_draws) if request_id in self.whole else self.ranges.get(request_id)
        if rows is None:
            return [None] * num_draws
        assert rows.end - rows.first == num_draws, f"{request_id}: {rows} for {num_draws} draws"
        return [RowRange(row, row + 1) for row in range(*rows)]

    def drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for rows in (self.ranges, self.wide, self.whole):
                rows.pop(request_id, None)

    def place_wide(self, num_rectangle_rows: int) -> None:
        """Number the wide rows as they stand in the step's block."""
        for request_id, (first, end) in self.wide.items():
            self.ranges[request_id] = RowRange(num_rectangle_rows + first, num_rectangle_rows + end)


def _add_range(ranges: dict[str, RowRange], request_id: str, first: int, num_rows: int) -> None:
    before = ranges.get(request_id, RowRange(first, first))
    assert before.end == first, f"the rows of {request_id} are torn apart"
    ranges[request_id] = RowRange(before.first, first + num_rows)


class StepResults:
    """Takes the results of a step's chunks; `finish` makes the runner's output of them."""

    def __init__(self) -> None:
        self._token_ids: list[torch.Tensor] = []  # per chunk [num_draws] int32
        self._sampled: list[tuple[str, int]] = []  # (request id, number of draws), in order
        self._candidates: list[tuple[torch.Tensor, list[str]]] = []  # flags and the request of each
        self._finite: list[tuple[torch.Tensor, list[tuple[str, int]]]] = []  # flags and (request id, rows)
        self._rectangles: list[LogprobsTensors] = []
        self._num_rectangle_rows = 0
        self._wide: list[LogprobsBlock] = []
        self._num_wide_rows = 0
        self._samples = RowOwners()
        self._prompts = RowOwners()

    def add_samples(
        self, output: SamplerOutput, request_ids: list[str], num_draws: list[int], owners: list[OwnedRows]
    ) -> None:
        """Take a chunk of sampled rows; `owners` are those of its scored draws."""
        self._token_ids.append(output.token_ids)
        self._sampled += zip(request_ids, num_draws, strict=True)
        self._finite.append((output.is_finite, [(request_id, 1) for request_id in request_ids]))
        if output.has_candidates is not None:
            self._candidates.append((output.has_candidates, request_ids))
        if output.scores is not None:
            self._take_scores(output.scores, owners, self._samples)

    def add_prompts(self, scores: Scores, owners: list[OwnedRows]) -> None:
        """Take a chunk of scored prompt rows."""
        self.check_prompts(scores.is_finite, owners)
        self._take_scores(scores, owners, self._prompts)

    def add_kept_prompts(self, rectangle: LogprobsTensors, owners: list[OwnedRows]) -> None:
        """Take prompt rows that are read from what blocks keep."""
        self._take_scores(Scores(rectangle, [], rectangle.token_ids[:, 0] >= 0), owners, self._prompts)

    def check_prompts(self, is_finite: torch.Tensor, owners: list[OwnedRows]) -> None:
        """Take the flags of a chunk of prompt rows whose scores come by `add_kept_prompts`."""
        self._finite.append((is_finite, [(item.request_id, item.num_rows) for item in owners]))

    def _take_scores(self, scores: Scores, owners: list[OwnedRows], target: RowOwners) -> None:
        if scores.rectangle is not None:
            self._rectangles.append(scores.rectangle)
        blocks = iter(scores.wide)
        block, num_read = None, 0
        for owner in owners:
            if owner.kind.is_rectangular:
                _add_range(target.ranges, owner.request_id, self._num_rectangle_rows, owner.num_rows)
                self._num_rectangle_rows += owner.num_rows
                continue
            if block is None or num_read == len(block.chosen_token_ids):
                block, num_read = next(blocks), 0
            self._take_wide(owner, block, slice(num_read, num_read + owner.num_rows), target)
            num_read += owner.num_rows

    def _take_wide(self, owner: OwnedRows, block: WideRows, rows: slice, target: RowOwners) -> None:
        """Bring rows over at once: they are too large to wait on the device for the step's end.

        Part of a block of whole rows is copied out of it: a request must not keep its neighbours' rows alive.
        """
        is_part = rows != slice(0, len(block.chosen_token_ids))

        def take(tensor: torch.Tensor) -> np.ndarray:
            array: np.ndarray = tensor[rows].cpu().numpy()
            return array

        values, ranks = take(block.values), take(block.ranks)
        if block.token_ids is None:
            whole = WholeRows(take(block.chosen_token_ids), values, ranks)
            target.whole.setdefault(owner.request_id, []).append(whole.copy() if is_part else whole)
            return
        packed = LogprobsBlock.of_rectangle(take(block.token_ids), values, ranks)
        self._wide.append(packed)
        _add_range(target.wide, owner.request_id, self._num_wide_rows, owner.num_rows)
        self._num_wide_rows += owner.num_rows

    def finish(self) -> ModelRunnerOutput:
        """Copy all to the host and sort out the requests whose logits were not finite."""
        rectangle = LogprobsTensors.concatenate(self._rectangles) if self._rectangles else None
        flags = [*(flags for flags, _ in self._finite), *(flags for flags, _ in self._candidates)]
        arrays = copy_to_host([*(rectangle or ()), *flags, *self._token_ids])
        columns = [arrays.pop(0) for _ in rectangle or ()]
        blocks = [LogprobsBlock.of_rectangle(*columns)] if columns else []
        blocks += self._wide
        errors, num_bad_rows = self._find_errors(arrays[: len(flags)])
        for owners in (self._samples, self._prompts):
            owners.drop(errors)
            owners.place_wide(self._num_rectangle_rows)
        return ModelRunnerOutput(
            sampled=self._make_sampled(arrays[len(flags) :], errors),
            logprobs=LogprobsBlock.concatenate(blocks) if blocks else None,
            prompt_rows=self._prompts.ranges,
            full_sample_rows=self._samples.whole,
            full_prompt_rows=self._prompts.whole,
            errors=errors,
            num_nan_rows=num_bad_rows,
        )

    def _find_errors(self, flags: list[np.ndarray]) -> tuple[dict[str, str], int]:
        """Return what was wrong by request id, and the number of rows that were not finite."""
        errors: dict[str, str] = {}
        num_bad_rows = 0
        finite, candidates = flags[: len(self._finite)], flags[len(self._finite) :]
        for is_good, (_, request_ids) in zip(candidates, self._candidates, strict=True):
            errors |= {request_ids[row]: NO_CANDIDATE for row in np.flatnonzero(~is_good).tolist()}
        for is_good, (_, counts) in zip(finite, self._finite, strict=True):
            if not is_good.all():
                bad_rows = np.flatnonzero(~is_good)
                num_bad_rows += len(bad_rows)
                ends = np.cumsum([count for _, count in counts])
                errors |= {counts[i][0]: NOT_FINITE for i in np.searchsorted(ends, bad_rows, side="right").tolist()}
        return errors, num_bad_rows

    def _make_sampled(self, chunks: list[np.ndarray], errors: dict[str, str]) -> SampledTokens:
        drawn = np.concatenate(chunks).tolist() if chunks else []
        sampled = SampledTokens()
        first = 0
        for request_id, count in self._sampled:
            if request_id not in errors:
                sampled.request_ids.extend([request_id] * count)
                sampled.draws.extend(range(count))
                sampled.token_ids.extend([token_id] for token_id in drawn[first : first + count])
                sampled.rows.extend(self._samples.list_rows(request_id, count))
            first += count
        return sampled


def copy_to_host(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    """Return the tensors as arrays; from a GPU they travel as one buffer, so that a step waits once."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return unpack(pack(tensors).cpu(), tensors)


def pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of all tensors end to end, each from a multiple of 8 on: [num_bytes] uint8."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([torch.nn.functional.pad(part, (0, -len(part) % 8)) for part in parts])


def unpack(buffer: torch.Tensor, like: list[torch.Tensor]) -> list[np.ndarray]:
    """Return the arrays in `buffer`, shaped as the tensors that were packed."""
    arrays = []
    first = 0
    for tensor in like:
        part = buffer[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        arrays.append(part.numpy())
        first += tensor.nbytes + -tensor.nbytes % 8
    return arrays
