"""The sequences that get one token each, step after step: who they are is looked up once for all these steps."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import numpy as np

from vllm.logprobs.block import BlockReader
from vllm.v1.engine.child_state import ChildState
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.messages import DecodeBatchTokens

_MOST_KEPT_STEPS = 256  # a bound on what is handed over in one step

_NO_VALUES = np.empty(0)

Member = tuple[ParentRequest, ChildState]


class _Group:
    """Members that take their tokens in one way; the first ones have rows, the others asked for none."""

    __slots__ = ("_places", "_rows", "members")

    def __init__(self, places: list[int], found: list[Member | None], tokens: DecodeBatchTokens) -> None:
        self.members = [member for place in places if (member := found[place]) is not None]
        self._places = None if len(places) == len(found) else places
        rows = [tokens.rows[place] for place in places if place < len(tokens.rows)]
        run = range(rows[0], rows[0] + len(rows)) if rows else range(0)
        self._rows = run if rows == list(run) else rows

    def take(
        self, tokens: DecodeBatchTokens, reader: BlockReader | None
    ) -> tuple[list[int], Sequence[bytes], np.ndarray]:
        """Return the members' tokens, their rows, and the chosen tokens' values ([num_rows] float64)."""
        token_ids = tokens.token_ids if self._places is None else [tokens.token_ids[place] for place in self._places]
        if not self._rows:
            return token_ids, (), _NO_VALUES
        assert reader is not None, "rows came without their block"
        return token_ids, reader.read(self._rows), reader.get_chosen_values(self._rows)

    def iterate(
        self, tokens: DecodeBatchTokens, reader: BlockReader | None
    ) -> Iterator[tuple[Member, int, bytes | None, float]]:
        """Yield each member with its token, its row and the chosen token's value; None and 0.0 without a row."""
        if not self.members:
            return iter(())
        token_ids, rows, values = self.take(tokens, reader)
        return zip_longest(self.members, token_ids, rows, values.tolist())


class DecodeBatch:
    """The members of one batch that are still wanted.

    Those that nobody sees before they end only keep their tokens and rows: `hand_over` gives each what is its own. It
    must be called before anything else is done with one of them.
    """

    __slots__ = ("_batch_id", "_rows", "_timestamp", "_token_ids", "_unseen", "_values", "others", "streamed")

    def __init__(self, tokens: DecodeBatchTokens, members: Mapping[str, Member]) -> None:
        self._batch_id = tokens.batch_id
        found = [members.get(request_id) for request_id in tokens.request_ids]
        unseen: list[int] = []
        streamed: list[int] = []
        others: list[int] = []
        for place, member in enumerate(found):
            if member is not None:
                child = member[1]
                (unseen if child.is_unseen else streamed if child.is_streamed else others).append(place)
        self._unseen = _Group(unseen, found, tokens)
        self.streamed = _Group(streamed, found, tokens)  # each token is an output
        self.others = _Group(others, found, tokens)
        self._token_ids: list[list[int]] = []  # [num_steps][num_unseen]
        self._rows: list[Sequence[bytes]] = []  # [num_steps][num_scored], of the first ones
        self._values: list[np.ndarray] = []  # [num_steps][num_scored] float64
        self._timestamp = 0.0  # of the last kept step

    def is_of(self, tokens: DecodeBatchTokens) -> bool:
        """Return whether these are tokens of the same batch."""
        return tokens.batch_id is not None and tokens.batch_id == self._batch_id

    def keep(self, tokens: DecodeBatchTokens, reader: BlockReader | None, timestamp: float) -> None:
        """Keep the tokens of the members that nobody sees yet."""
        if not self._unseen.members:
            return
        token_ids, rows, values = self._unseen.take(tokens, reader)
        self._token_ids.append(token_ids)
        if rows:
            self._rows.append(rows)
            self._values.append(values)
        self._timestamp = timestamp
        if len(self._token_ids) == _MOST_KEPT_STEPS:
            self.hand_over()

    def hand_over(self) -> None:
        """Give each member what was kept for it."""
        num_steps = len(self._token_ids)
        if num_steps == 0:
            return
        for (parent, child), token_ids in zip(self._unseen.members, zip(*self._token_ids, strict=True), strict=True):
            child.token_ids += token_ids
            parent.count_tokens(num_steps, self._timestamp)
        if self._rows:
            scored = [child for _, child in self._unseen.members[: len(self._rows[0])]]
            values = np.array([[child.cumulative_logprob for child in scored], *self._values])
            totals = np.add.accumulate(values)[-1].tolist()  # one after the other, as token by token
            for child, rows, total in zip(scored, zip(*self._rows, strict=True), totals, strict=True):
                child.rows += rows  # type: ignore[operator]  # a list, where rows are
                child.cumulative_logprob = total
        self._token_ids, self._rows, self._values = [], [], []
