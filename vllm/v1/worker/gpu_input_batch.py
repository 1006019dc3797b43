"""The persistent batch: what the runner knows of each request between steps, as arrays with a row a request.

Rows 0 … num_reqs − 1 are in use. A request that leaves hands its row to the last one, so no step ever copies the
whole batch.
"""

from dataclasses import dataclass

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.v1.messages import NewRequest
from vllm.v1.sample.logits_processor import TokenRules
from vllm.v1.sample.ops.logprobs import RowKind, choose_kind
from vllm.v1.sample.ops.random import to_seed_bits
from vllm.v1.worker.block_table import BlockTable

GREEDY_BELOW = 1e-5  # temperatures below it mean greedy


@dataclass(slots=True)
class BatchedRequest:
    """The part of a request that is no column of the batch."""

    request_id: str
    seeds: np.ndarray  # [num_draws] int64, bits of the seed of each draw from its sampled row
    rules: TokenRules | None
    given_ids: np.ndarray | None  # [num_given] int32, logprob_token_ids


class InputBatch:
    """All requests that the runner holds. Arrays are [max_num_reqs] unless noted."""

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.requests: list[BatchedRequest] = []  # by row
        self.row_of: dict[str, int] = {}  # request id → row
        self.num_with_prompt_scores = 0  # requests that ask for prompt logprobs
        # np.empty: pages of positions that no request reaches are never touched.
        self.token_ids = np.empty(
            (max_num_reqs, max_model_len + 1), dtype=np.int32
        )  # [max_num_reqs, max_model_len + 1]
        self.block_table = BlockTable(max_num_reqs, -(-max_model_len // block_size))

        def column(dtype: type) -> np.ndarray:
            return np.zeros(max_num_reqs, dtype=dtype)

        self.num_tokens = column(np.int32)
        self.num_prompt_tokens = column(np.int32)
        self.num_computed = column(np.int32)
        self.is_never_sampled = column(np.bool_)  # max_tokens=0
        self.num_draws = column(np.int64)
        self.first_seed = column(np.int64)  # of requests with one draw
        # Greedy rows hold the neutral value of everything that only a random row reads.
        self.is_greedy = column(np.bool_)
        self.temperature = column(np.float32)
        self.top_k = column(np.int64)  # vocab_size: off
        self.top_p = column(np.float32)  # 1: off
        self.min_p = column(np.float32)  # 0: off
        self.has_filters = column(np.bool_)
        self.presence = column(np.float64)
        self.frequency = column(np.float64)
        self.repetition = column(np.float64)
        self.has_penalties = column(np.bool_)
        self.has_rules = column(np.bool_)
        # What the sampled rows, and the prompt's rows, ask of the scorer.
        self.score_kind = column(np.int8)  # RowKind
        self.score_num_top = column(np.int32)
        self.prompt_kind = column(np.int8)  # RowKind
        self.prompt_num_top = column(np.int32)
        self.as_logits = column(np.bool_)
        self.wants_processed = column(np.bool_)
        self._columns = [
            array for array in vars(self).values() if isinstance(array, np.ndarray) and array.ndim == 1
        ]  # fmt: skip

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    def add(self, new: NewRequest) -> None:
        """Give `new` a row; a row that it still has is given up first."""
        self.remove(new.request_id)
        row = self.num_reqs
        assert row < self.max_num_reqs, (
            f"the batch holds {self.max_num_reqs} requests; {new.request_id} is one too many"
        )
        params = new.sampling_params
        given = params.logprob_token_ids
        # An id beyond the logits can't be sampled anyway; as a cell to change it would end the step for all.
        stop_ids = [token_id for token_id in new.min_tokens_stop_ids if token_id < self.vocab_size]
        seeds = np.array([to_seed_bits(seed) for seed in new.seeds], dtype=np.int64)
        self.requests.append(
            BatchedRequest(
                request_id=new.request_id,
                seeds=seeds,
                rules=TokenRules.try_make(params, new.bad_words_token_ids, stop_ids),
                given_ids=np.array(given, dtype=np.int32) if given else None,
            )
        )
        self.row_of[new.request_id] = row
        num_tokens = len(new.token_ids)
        self.token_ids[row, :num_tokens] = new.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.block_table.set_row(row, new.block_ids)
        self.is_never_sampled[row] = params.max_tokens == 0 or not new.seeds
        self.num_draws[row] = len(seeds)
        self.first_seed[row] = seeds[0] if len(seeds) else 0
        self._set_sampling(row, params)
        self._set_scoring(row, params)
        self.num_with_prompt_scores += int(self.prompt_kind[row] != RowKind.NONE)

    def _set_sampling(self, row: int, params: SamplingParams) -> None:
        is_greedy = params.temperature < GREEDY_BELOW
        has_top_k = not is_greedy and 0 < params.top_k < self.vocab_size
        self.is_greedy[row] = is_greedy
        self.temperature[row] = 1.0 if is_greedy else params.temperature
        self.top_k[row] = params.top_k if has_top_k else self.vocab_size
        self.top_p[row] = 1.0 if is_greedy else params.top_p
        self.min_p[row] = 0.0 if is_greedy else params.min_p
        self.has_filters[row] = has_top_k or self.top_p[row] < 1 or self.min_p[row] > 0
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = params.repetition_penalty
        self.has_penalties[row] = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.has_rules[row] = self.requests[row].rules is not None

    def _set_scoring(self, row: int, params: SamplingParams) -> None:
        mode = params.logprobs_mode
        assert mode is not None, "the input processor sets logprobs_mode"
        has_given = self.requests[row].given_ids is not None
        self.score_kind[row] = choose_kind(params.logprobs, has_given, self.vocab_size)
        self.score_num_top[row] = params.logprobs or 0
        self.prompt_kind[row] = choose_kind(params.prompt_logprobs, False, self.vocab_size)
        self.prompt_num_top[row] = params.prompt_logprobs or 0
        self.as_logits[row] = mode.endswith("logits")
        self.wants_processed[row] = mode.startswith("processed")

    def remove(self, request_id: str) -> None:
        """Take a request out, if it is in; the last row moves into its place."""
        row = self.row_of.pop(request_id, None)
        if row is None:
            return
        self.num_with_prompt_scores -= int(self.prompt_kind[row] != RowKind.NONE)
        last = self.num_reqs - 1
        moved = self.requests.pop()
        if row == last:
            return
        self.requests[row] = moved
        self.row_of[moved.request_id] = row
        num_tokens = self.num_tokens[last]
        self.token_ids[row, :num_tokens] = self.token_ids[last, :num_tokens]
        self.block_table.move(last, row)
        for column in self._columns:
            column[row] = column[last]

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:  # [num_rows], [num_rows]
        """Append a token a row."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def get_sequence(self, row: int) -> np.ndarray:
        """Return a view of the row's tokens, [num_tokens] int32."""
        return self.token_ids[row, : self.num_tokens[row]]

    def get_generated(self, row: int) -> np.ndarray:
        """Return a view of the row's generated tokens, [num_generated] int32."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]
