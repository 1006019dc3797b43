"""Scoring in scripts: the methods of `LLM` that score continuations and labels."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.interrupt_guard import InterruptGuard
from vllm.entrypoints.progress import ProgressBar, UseTqdm
from vllm.entrypoints.scoring.batch import Dispatcher, ScoringBatch
from vllm.entrypoints.scoring.labels import encode_labels, gather_labels, make_label_pairs, tokenize_prompts
from vllm.entrypoints.scoring.pairs import JOINT, PairEncoder
from vllm.entrypoints.scoring.results import ContinuationScore, LabelScores
from vllm.exceptions import VLLMValidationError
from vllm.inputs import PromptType, parse_prompts
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

Continuation = str | Sequence[int]


class ScoringMethods:
    """What `LLM` can say about given texts; it writes nothing."""

    llm_engine: LLMEngine
    request_counter: "itertools.count[int]"
    _finished: dict[str, RequestOutput]

    @property
    def model_config(self) -> ModelConfig:
        raise NotImplementedError

    def _aborting_on_error(self, request_ids: list[str]) -> AbstractContextManager[Any]:
        raise NotImplementedError

    # ------------------------------------------------------------ public

    def score_continuations(
        self,
        contexts: PromptType | Sequence[PromptType],
        continuations: Sequence[Continuation] | Sequence[Sequence[Continuation]],
        *,
        tokenization: str = JOINT,
        add_special_tokens: bool = True,
        use_tqdm: UseTqdm = None,
    ) -> list[list[ContinuationScore]]:
        """Score given continuations of contexts: for each context a list, in the order of its continuations.

            (scores,) = llm.score_continuations("The sky is", [" blue", " green"])
            best = max(scores, key=lambda score: score.logprob)

        `continuations` has a list for each context; of a single context that does not stand in a list, its list itself.
        Both may be texts or token ids. A context is computed once, what several contexts begin with is computed once,
        and continuations run on top of it. `tokenization` "joint" is lm-eval's way (trailing spaces of the context go
        to the continuation, which gets the tokens that follow the context's own); "separate" tokenises each by itself.
        What is too long for the model is cut on the left, and the score says so.

        Raises:
            VLLMValidationError: something is empty or unknown to the model; the message names its place.
            KeyboardInterrupt: Ctrl-C; what this call started is ended, and the LLM is usable at once.
        """
        given: Any = contexts
        rows: Any = continuations
        if isinstance(continuations, str) or not isinstance(continuations, Sequence):
            raise _not_lists("continuations", continuations)
        if isinstance(given, str | Mapping) or _is_token_ids(given):
            given, rows = [given], [continuations]
        if not isinstance(given, Sequence):
            raise _not_lists("contexts", given)
        check_rows(given, rows)
        encoder = PairEncoder(
            self.model_config,
            self.llm_engine.tokenizer,
            tokenization=tokenization,
            add_special_tokens=add_special_tokens,
        )
        pairs = encoder.encode_all(given, rows)
        scores = iter(score_batch(self, ScoringBatch(itertools.chain.from_iterable(pairs)), use_tqdm))
        return [list(itertools.islice(scores, len(row))) for row in pairs]

    def label_logprobs(
        self,
        prompts: PromptType | Sequence[PromptType],
        labels: Sequence[str | int],
        *,
        add_special_tokens: bool = True,
        use_tqdm: UseTqdm = None,
    ) -> list[LabelScores]:
        """Compare labels, each a single token, as the next token of each prompt: raw, and among themselves.

            (scores,) = llm.label_logprobs("Is water wet? Answer:", [" Yes", " No"])
            scores.normalized_probabilities

        Raises:
            VLLMValidationError: a label has several tokens (all such are named), or a prompt is empty or too long.
            KeyboardInterrupt: Ctrl-C; what this call started is ended, and the LLM is usable at once.
        """
        tokenizer = self.llm_engine.tokenizer
        label_ids = encode_labels(labels, tokenizer, self.model_config.vocab_size)
        parsed = tokenize_prompts(
            parse_prompts(prompts), tokenizer, add_special_tokens=add_special_tokens, parameter="prompts"
        )
        pairs = make_label_pairs(parsed, label_ids, self.model_config)
        return gather_labels(score_batch(self, ScoringBatch(pairs), use_tqdm), len(label_ids))


def score_batch(llm: ScoringMethods, batch: ScoringBatch, use_tqdm: UseTqdm = None) -> list[ContinuationScore]:
    """Run a batch's requests, each as soon as what it waits for has ended, and return the scores of its pairs."""
    config = llm.llm_engine.vllm_config
    num_kv_tokens = llm.llm_engine.engine_core.ready.num_gpu_blocks * config.cache_config.block_size
    dispatcher = Dispatcher(batch, num_kv_tokens // 2, 2 * config.scheduler_config.max_num_seqs)
    places: dict[str, int] = {}  # request id → its index in the batch
    request_ids: list[str] = []

    def start(indices: Sequence[int]) -> None:
        for index in indices:
            request = batch.requests[index]
            request_id = str(next(llm.request_counter))
            llm.llm_engine.add_request(request_id, request.as_input(), request.params)
            places[request_id] = index
            request_ids.append(request_id)

    with InterruptGuard() as guard, llm._aborting_on_error(request_ids):
        bar = ProgressBar(len(batch.requests), use_tqdm, "Scored continuations")
        try:
            while not dispatcher.is_done:
                guard.check()
                start(dispatcher.take_ready())
                for output in llm.llm_engine.step():
                    if (index := places.get(output.request_id)) is not None:
                        batch.take(index, output)
                        start(dispatcher.end(index))
                        bar.update(output)
                    else:
                        llm._finished[output.request_id] = output
        finally:
            bar.close()
    return batch.make_scores()


def check_rows(contexts: Sequence[Any], rows: Sequence[Any]) -> None:
    """Raise unless each context has its list of continuations."""
    if len(contexts) != len(rows):
        raise VLLMValidationError(
            f"continuations must have a list for each context: {len(contexts)} contexts, {len(rows)} lists",
            parameter="continuations",
            value=len(rows),
        )
    for index, row in enumerate(rows):
        if isinstance(row, str | Mapping) or not isinstance(row, Sequence) or _is_token_ids(row):
            raise VLLMValidationError(
                f"continuations[{index}] must be a list of continuations, each a str or a list of token ids",
                parameter="continuations",
            )


def _is_token_ids(given: Any) -> bool:
    """Say whether this is one prompt of token ids rather than a list of prompts."""
    return isinstance(given, Sequence) and len(given) > 0 and hasattr(given[0], "__index__")


def _not_lists(name: str, given: Any) -> VLLMValidationError:
    return VLLMValidationError(
        f"{name} must be a list; got {type(given).__name__}", parameter=name, value=f"<{type(given).__name__}>"
    )
