"""What a caller may ask of one request, and every check of it.

Checks run twice. Construction normalises and checks each field alone. Admission (`SamplingParams.resolve`) runs the
same checks again, since attributes may have been set meanwhile, then those that need the model, and returns an object
of its own: the caller's is never changed.
"""

import copy
import enum
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vllm import envs
from vllm.config import LOGPROBS_MODES
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError, shorten
from vllm.logger import log_once
from vllm.sampling_checks import (
    BOOL_FIELDS,
    FLOAT_RULES,
    INT_RULES,
    MEANT_INSTEAD,
    Encoder,
    StrictMeta,
    as_int,
    as_word,
    check_bool,
    check_float,
    check_ids_in_vocabulary,
    check_int,
    check_list,
    check_logit_bias,
    check_num_logprobs,
    check_travels,
    count_entries,
    describe,
    encode_words,
    is_empty,
    parse_logit_bias,
    refusal,
    unique,
)

MAX_LOGPROB_TOKEN_IDS = 128
_GREEDY_BELOW = 1e-5
_LOWEST_TEMPERATURE = 1e-2  # smaller ones overflow float32 when logits are divided by them


class RequestOutputKind(enum.Enum):
    """What the outputs of a request hold."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


class SamplingType(enum.IntEnum):
    """How the next token is chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class StructuredOutputsParams(msgspec.Struct, metaclass=StrictMeta):
    """A constraint on the text: exactly one kind. Clients import it; the engine does not serve it."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            raise VLLMValidationError(
                f"structured_outputs needs exactly one of {', '.join(kinds)}; got {', '.join(given) or 'none'}",
                parameter="structured_outputs",
            )


class RepetitionDetectionParams(msgspec.Struct, metaclass=StrictMeta):
    """Ends a request that repeats itself; a largest pattern of 0 is off. The engine serves only off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class BeamSearchParams(msgspec.Struct, metaclass=StrictMeta):
    """Settings of `LLM.beam_search`, which this engine does not serve yet."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=StrictMeta):
    """How one prompt is continued and scored.

    `logprobs`, `prompt_logprobs`: None is off, 0 the chosen token only, k the k most likely and the chosen one, −1 the
    whole vocabulary. `max_tokens`: None is up to the model's length, 0 scores the prompt and samples nothing.

    Raises:
        VLLMValidationError: a field breaks a rule; `.parameter` names it.
        TypeError: an unknown keyword.
    """

    n: int = 1
    presence_penalty: float = 0.0  # from −2 to 2, over generated tokens
    frequency_penalty: float = 0.0  # from −2 to 2, over generated tokens
    repetition_penalty: float = 1.0  # above 0, over prompt and generated tokens
    temperature: float = 1.0  # 0 is greedy
    watermarking: bool | None = None  # not served
    top_p: float = 1.0
    top_k: int = 0  # 0 and −1 are off
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None  # not served
    prompt_logprob_start: int | None = None  # not served
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False  # kept for its name: every container here is a FlatLogprobs
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0  # derived: characters held back for a stop string
    structured_outputs: StructuredOutputsParams | None = None  # not served
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None  # not served
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None  # not served
    repetition_detection: RepetitionDetectionParams | None = None  # not served
    routed_experts_prompt_start: int = 0  # not served
    trace_decode_token_ids: list[int] | None = None  # not served
    logprobs_mode: str | None = None  # None: the engine's
    prompt_logprobs_start: int | None = None  # the first prompt token that is scored; those before read as None
    # set at admission
    _eos_token_id: int | None = None
    _extra_eos_token_ids: list[int] = []
    _bad_words_token_ids: list[list[int]] = []

    def __post_init__(self) -> None:
        self._normalise()

    def __repr__(self) -> str:
        fields = [name for name in self.__struct_fields__ if not name.startswith("_")]
        return f"SamplingParams({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"

    @staticmethod
    def from_optional(**given: Any) -> "SamplingParams":
        """Return the params for `given`, where None stands for a field's default (`max_tokens` keeps its None).

        The keys of `logit_bias` may be strings of integers; its values are clamped to −100 … 100.
        """
        fields = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        bias = fields.get("logit_bias")
        if isinstance(bias, dict):
            fields["logit_bias"] = parse_logit_bias(bias)
        return SamplingParams(**fields)

    # ------------------------------------------------------------ what it comes to

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature < _GREEDY_BELOW:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        """The model's end token; known after admission."""
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        """All ids that `min_tokens` masks: stop ids, and the model's end tokens even where they are ignored."""
        eos = () if self._eos_token_id is None else (self._eos_token_id,)
        return {*(self.stop_token_ids or ()), *eos, *self._extra_eos_token_ids}

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """The bad words as ids; None before admission or without any."""
        return self._bad_words_token_ids or None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives a generated token comes with; None when nothing was asked."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    def first_scored(self, prompt_len: int) -> int:
        """Return the first prompt token that is scored when prompt logprobs are asked for; `prompt_len`: none is."""
        return min(max(self.prompt_logprobs_start or 0, 1), prompt_len)

    def clone(self) -> "SamplingParams":
        """Return a copy with lists and dicts of its own; `self` when the caller promised not to reuse it."""
        return self if self.skip_clone else self._copy()

    # ------------------------------------------------------------ admission

    def verify(self, *, vocab_size: int, max_logprobs: int = 20) -> None:
        """Check everything that does not depend on the prompt; the object is not changed.

        Raises:
            VLLMValidationError: a field breaks a rule.
            VLLMUnsupportedError: a feature that is not served is asked for with effect.
        """
        checked = self._copy()
        checked._normalise()
        checked._check_served()
        checked._check_against_model(vocab_size, max_logprobs)

    def resolve(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        prompt_len: int,
        max_logprobs: int = 20,
        logprobs_mode: str = "raw_logprobs",
        eos_token_id: int | None = None,
        extra_eos_token_ids: Sequence[int] = (),
        tokenizer: Encoder | None = None,
    ) -> "SamplingParams":
        """Return a checked copy in the form that the engine reads; `self` is not changed.

        In the copy `max_tokens` is a number that fits the model's length, `logprobs` and `prompt_logprobs` are None or
        from 0 to `vocab_size`, `skip_reading_prefix_cache` is a bool, `top_k` is from 0 (off) to `vocab_size` − 1,
        `logprobs_mode` is set, `stop_token_ids` holds the extra end tokens unless `ignore_eos`; `bad_words_token_ids`
        and `all_stop_token_ids` are filled.
        `tokenizer` is None where the engine has none.

        Raises:
            VLLMValidationError: a field breaks a rule, or the prompt leaves no room.
            VLLMUnsupportedError: a feature that is not served is asked for with effect.
        """
        params = self._copy()
        params._normalise()
        params._check_served()
        params._check_against_model(vocab_size, max_logprobs)
        params._fit_length(max_model_len, prompt_len)
        params._check_start(prompt_len)
        params._resolve_scoring(vocab_size, logprobs_mode)
        params._check_num_entries(vocab_size, prompt_len)
        params.top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        params._eos_token_id = eos_token_id if eos_token_id is not None and eos_token_id < vocab_size else None
        params._add_extra_eos([token_id for token_id in extra_eos_token_ids if token_id < vocab_size])
        if tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise VLLMValidationError(f"{name} needs a tokenizer, and this engine has none", parameter=name)
        if tokenizer is not None:
            params.update_from_tokenizer(tokenizer)
            # an id without a logit can't be drawn, so no sequence with it can be completed
            params._bad_words_token_ids = [ids for ids in params._bad_words_token_ids if max(ids) < vocab_size]
        return params

    def update_from_generation_config(self, generation_config: dict[str, Any], eos_token_id: int | None = None) -> None:
        """Take the model's end token and the further ones of its generation config, in place."""
        self._eos_token_id = eos_token_id
        extra = generation_config.get("eos_token_id")
        self._add_extra_eos([] if extra is None else [extra] if isinstance(extra, int) else list(extra))

    def update_from_tokenizer(self, tokenizer: Encoder) -> None:
        """Turn `bad_words` into ids, in place: each as it stands and after a space, since both can be its text.

        Raises:
            VLLMValidationError: a word has no tokens, or they are too many.
        """
        self._bad_words_token_ids = encode_words("bad_words", self.bad_words or (), tokenizer)

    # ------------------------------------------------------------ steps of construction

    def _copy(self) -> "SamplingParams":
        params = copy.copy(self)
        for name in self.__struct_fields__:
            value = getattr(params, name)
            if type(value) in (list, dict):
                setattr(params, name, value.copy())
        return params

    def _normalise(self) -> None:
        """Bring every field into its one form and check each alone, in place."""
        for rule in FLOAT_RULES:
            setattr(self, rule.name, check_float(rule, getattr(self, rule.name)))
        for name, low, high, is_optional in INT_RULES:
            setattr(self, name, check_int(name, getattr(self, name), low, high, is_optional))
        for name in BOOL_FIELDS:
            setattr(self, name, check_bool(name, getattr(self, name)))
        self.n = check_int("n", self.n, 1, envs.max_n_sequences(), False)
        self.logprobs = check_num_logprobs("logprobs", self.logprobs)
        self.prompt_logprobs = check_num_logprobs("prompt_logprobs", self.prompt_logprobs)
        self.seed = None if self.seed == -1 else self.seed
        self.thinking_token_budget = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        self._normalise_temperature()
        self._normalise_words()
        self._normalise_ids()
        self._normalise_choices()
        self._check_lengths()

    def _normalise_temperature(self) -> None:
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            log_once(
                __name__,
                logging.WARNING,
                f"temperature {self.temperature} is too low to compute with and was raised to {_LOWEST_TEMPERATURE}; "
                "0 is greedy",
            )
            self.temperature = _LOWEST_TEMPERATURE
        if self.temperature < _GREEDY_BELOW:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _normalise_words(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else check_list("stop", self.stop, as_word) or []
        self.bad_words = unique(check_list("bad_words", self.bad_words, as_word) or [])
        for name, words in (("stop", self.stop), ("bad_words", self.bad_words)):
            if "" in words:
                raise VLLMValidationError(f"{name} must not hold an empty string", parameter=name)
        if self.stop and not self.detokenize:
            raise refusal("stop", self.stop, "strings are found in the text, so they need detokenize=True")
        holds_back = bool(self.stop) and not self.include_stop_str_in_output
        self.output_text_buffer_length = max(map(len, self.stop)) - 1 if holds_back else 0

    def _normalise_ids(self) -> None:
        self.stop_token_ids = unique(check_list("stop_token_ids", self.stop_token_ids, as_int) or [])
        self.logprob_token_ids = check_list("logprob_token_ids", self.logprob_token_ids, as_int)
        self.allowed_token_ids = check_list("allowed_token_ids", self.allowed_token_ids, as_int)
        self.trace_decode_token_ids = check_list("trace_decode_token_ids", self.trace_decode_token_ids, as_int)
        if self.logit_bias is not None:
            self.logit_bias = check_logit_bias(self.logit_bias)

    def _normalise_choices(self) -> None:
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise VLLMValidationError(
                f"output_kind must be a RequestOutputKind; got {describe(self.output_kind)}", parameter="output_kind"
            ) from None
        if self.logprobs_mode is not None and self.logprobs_mode not in LOGPROBS_MODES:
            raise refusal(
                "logprobs_mode",
                self.logprobs_mode,
                f"must be one of {', '.join(LOGPROBS_MODES)}; got {describe(self.logprobs_mode)}",
            )
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise refusal("extra_args", self.extra_args, "must be a dict")
        check_travels(self.extra_args)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refusal(
                "min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}; got {self.min_tokens}"
            )
        if self.max_tokens == 0 and self.n > 1:
            raise VLLMValidationError(
                f"max_tokens=0 scores the prompt and samples nothing, so n must be 1; got {self.n}",
                parameter="n",
                value=self.n,
            )
        if self.prompt_logprobs_start is not None and self.prompt_logprobs is None:
            raise refusal("prompt_logprobs_start", self.prompt_logprobs_start, "needs prompt_logprobs")

    # ------------------------------------------------------------ steps of admission

    def _check_served(self) -> None:
        repetition = self.repetition_detection
        asked = {
            "watermarking": bool(self.watermarking),
            "structured_outputs": self.structured_outputs is not None,
            "thinking_token_budget": self.thinking_token_budget is not None,
            "repetition_detection": repetition is not None and repetition.max_pattern_size > 0,
            "routed_experts_prompt_start": self.routed_experts_prompt_start != 0,
            "trace_decode_token_ids": bool(self.trace_decode_token_ids),
            "prompt_logprob_token_ids": not is_empty(self.prompt_logprob_token_ids),
            "prompt_logprob_start": self.prompt_logprob_start is not None,
            "extra_args": bool(self.extra_args),
        }
        for name, is_asked in asked.items():
            if is_asked:
                message = f"{name} is not served by this engine; leave it out{MEANT_INSTEAD.get(name, '')}"
                raise VLLMUnsupportedError(message, parameter=name, value=getattr(self, name))

    def _check_against_model(self, vocab_size: int, max_logprobs: int) -> None:
        for name, kind in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            k = getattr(self, name)
            asked = vocab_size if k == -1 else k
            if k is not None and max_logprobs != -1 and asked > max_logprobs:
                raise VLLMValidationError(
                    f"Requested {kind} logprobs of {shorten(asked)}, which is greater than max allowed: {max_logprobs} "
                    "(raise max_logprobs; -1 lifts the cap)",
                    parameter=name,
                    value=k,
                )
        num_given = len(self.logprob_token_ids or ())
        if num_given > MAX_LOGPROB_TOKEN_IDS:
            raise refusal(
                "logprob_token_ids", num_given, f"may hold at most {MAX_LOGPROB_TOKEN_IDS} ids; got {num_given}"
            )
        if self.allowed_token_ids == []:
            raise VLLMValidationError(
                "allowed_token_ids must not be empty: no token could be drawn", parameter="allowed_token_ids"
            )
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            check_ids_in_vocabulary(name, getattr(self, name) or (), vocab_size)

    def _fit_length(self, max_model_len: int, prompt_len: int) -> None:
        room = max_model_len - prompt_len
        if room < 0:
            raise VLLMValidationError(
                f"The decoder prompt (length {prompt_len}) is longer than the maximum model length of {max_model_len}. "
                "Shorten the prompt or raise max_model_len",
                parameter="prompt",
                value=prompt_len,
            )
        if room == 0 and self.max_tokens != 0:
            raise VLLMValidationError(
                f"The decoder prompt (length {prompt_len}) plus the number of requested output tokens (at least 1) is "
                f"longer than the maximum model length of {max_model_len}. max_tokens=0 scores it without sampling",
                parameter="prompt",
                value=prompt_len,
            )
        self.max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        self.min_tokens = min(self.min_tokens, self.max_tokens)

    def _check_start(self, prompt_len: int) -> None:
        start = self.prompt_logprobs_start
        if start is not None and start > prompt_len:
            raise refusal(
                "prompt_logprobs_start",
                start,
                f"must be at most the prompt's length {prompt_len}; got {shorten(start)}",
            )

    def _resolve_scoring(self, vocab_size: int, logprobs_mode: str) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if (k := getattr(self, name)) is not None:
                setattr(self, name, vocab_size if k == -1 else min(k, vocab_size))
        self.logprob_token_ids = unique(self.logprob_token_ids) if self.logprob_token_ids else None
        self.logprobs_mode = self.logprobs_mode or logprobs_mode
        self.skip_reading_prefix_cache = bool(self.skip_reading_prefix_cache)

    def _check_num_entries(self, vocab_size: int, prompt_len: int) -> None:
        num_rows = prompt_len + 1 - self.first_scored(prompt_len)  # the empty one in front of the scored ones counts
        prompt = num_rows * count_entries(self.prompt_logprobs, vocab_size)
        k = len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs
        sample = self.n * (self.max_tokens or 0) * count_entries(k, vocab_size)
        if prompt + sample > (limit := envs.max_logprob_entries()):
            name = "prompt_logprobs" if prompt > sample else "logprobs"
            raise VLLMValidationError(
                f"the answer could hold {prompt + sample} logprob entries (rows × entries × n: {prompt} for the prompt,"
                f" {sample} for up to {self.max_tokens} tokens of {self.n} sequences); at most {limit} are allowed: "
                f"lower {name} or max_tokens, or raise VLLM_MAX_LOGPROB_ENTRIES",
                parameter=name,
                value=getattr(self, name),
            )

    def _add_extra_eos(self, token_ids: Iterable[int]) -> None:
        self._extra_eos_token_ids = [token_id for token_id in token_ids if token_id != self._eos_token_id]
        if not self.ignore_eos:
            self.stop_token_ids = unique([*(self.stop_token_ids or ()), *self._extra_eos_token_ids])
