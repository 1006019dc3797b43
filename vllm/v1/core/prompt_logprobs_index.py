"""What the worker keeps of each KV block for prompt logprobs: which hidden states, and which tokens' scores.

The values themselves lie with the worker, at the block's own index (vllm/v1/worker/prompt_logprobs_cache.py); the core
knows which of them are valid. A block that is given away forgets everything.
"""


class PromptLogprobsIndex:
    """A line a block. A place is a position within its block."""

    def __init__(self, num_blocks: int) -> None:
        self._num_states = [0] * num_blocks  # leading places whose final hidden state is kept
        self._scored = [0] * num_blocks  # bit i: the score of the token at place i is kept

    def num_states(self, block_id: int) -> int:
        """Return how many leading places of the block have their final hidden state."""
        return self._num_states[block_id]

    def scored_places(self, block_id: int) -> int:
        """Return a bit for each place whose token has its score."""
        return self._scored[block_id]

    def note_states(self, block_id: int, num_places: int) -> None:
        self._num_states[block_id] = max(self._num_states[block_id], num_places)

    def note_scores(self, block_id: int, first: int, end: int) -> None:
        """Take note of the scores at places first … end − 1."""
        self._scored[block_id] |= (1 << end) - (1 << first)

    def copy(self, source: int, target: int, num_places: int) -> None:
        """Take note that the worker copies a block, of which the first `num_places` matter."""
        self._num_states[target] = min(self._num_states[source], num_places)
        self._scored[target] = self._scored[source] & ((1 << num_places) - 1)

    def forget(self, block_id: int) -> None:
        self._num_states[block_id] = self._scored[block_id] = 0

    def forget_all(self) -> None:
        num_blocks = len(self._scored)
        self._num_states, self._scored = [0] * num_blocks, [0] * num_blocks
