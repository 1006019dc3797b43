"""`LLM`: a model in this process, for scripts."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.interrupt_guard import InterruptGuard
from vllm.entrypoints.progress import ProgressBar, UseTqdm
from vllm.entrypoints.scoring.offline import ScoringMethods
from vllm.exceptions import VLLMUnsupportedError, VLLMValidationError
from vllm.inputs import ParsedPrompt, PromptType, parse_prompts
from vllm.outputs import RequestOutput
from vllm.sampling_checks import read_model_defaults
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine.llm_engine import LLMEngine, refuse_lora

Params = SamplingParams | Sequence[SamplingParams] | None
Conversation = list[Mapping[str, Any]]


def _refuse(method: str, advice: str) -> Callable[..., NoReturn]:
    """Return a method of `LLM` that is not served."""

    def refuse(self: "LLM", *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: not served."""
        raise VLLMUnsupportedError(f"LLM.{method} is not supported: {advice}", parameter=method)

    refuse.__name__ = method
    return refuse


class LLM(ScoringMethods):
    """A model that continues and scores prompts.

        with LLM("model-folder") as llm:
            for output in llm.generate(["Hello"], SamplingParams(logprobs=5, n=2)): ...

    `model` is a Hugging Face folder, a .gguf file or a hub id; the keywords are those of `EngineArgs`, and
    `chat_template`, which takes the place of the model's own. One caller at a time.

    Raises:
        VLLMValidationError: an argument breaks a rule, or asks for what is not served.
        ModelLoadError: the model can't be found or read.
        TypeError: an unknown keyword.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, **engine_args: Any) -> None:
        if engine_args.get("disable_log_stats") is None:
            engine_args["disable_log_stats"] = True
        self._start(EngineArgs(model=model, **engine_args), chat_template)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Return the LLM that the arguments describe."""
        llm = cls.__new__(cls)
        llm._start(engine_args, None)
        return llm

    def _start(self, engine_args: EngineArgs, chat_template: str | None) -> None:
        self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self.request_counter = itertools.count()
        self._chat_template = chat_template
        self._hf_tokenizer: Any = None
        self._enqueued: list[str] = []  # ids, in order, that wait_for_completion answers
        self._finished: dict[str, RequestOutput] = {}  # of enqueued requests

    # ------------------------------------------------------------ generate

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, and score it where the params ask; the answers come in the order of the prompts.

        A prompt is a str, a list of token ids, or a dict with `prompt` or `prompt_token_ids` (and `cache_salt`).
        `sampling_params` is one object, one for each prompt, or None for `get_default_sampling_params()`; it is read
        now and never changed. A refused prompt refuses the call: the error names its index, and nothing is left
        running.

        Raises:
            VLLMValidationError: a prompt or its params break a rule.
            KeyboardInterrupt: Ctrl-C; what this call started is ended, and the LLM is usable at once.
        """
        _refuse_mm_kwargs(mm_processor_kwargs)
        return self._run(parse_prompts(prompts), sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue one conversation, or each of several: the model's chat template makes the prompts.

        Raises:
            VLLMValidationError: there is no chat template, a conversation does not fit it, or as in `generate`.
        """
        _refuse_mm_kwargs(mm_processor_kwargs)
        if chat_template_content_format not in ("auto", "string"):
            raise VLLMUnsupportedError(
                "chat_template_content_format must be auto or string: contents reach the template as text",
                parameter="chat_template_content_format",
                value=chat_template_content_format,
            )
        prompts = []
        for index, conversation in enumerate(_as_conversations(messages)):
            with _naming_index("messages", index):
                prompts.append(
                    self._render(
                        conversation,
                        chat_template=chat_template or self._chat_template,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=continue_final_message,
                        tools=tools,
                        **(chat_template_kwargs or {}),
                    )
                )
        encoding = {"add_special_tokens": False, **(tokenization_kwargs or {})}
        return self._run(prompts, sampling_params, use_tqdm, lora_request, priority, encoding)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Enqueue prompts and return their request ids without waiting; `wait_for_completion` returns the answers."""
        request_ids: list[str] = []
        parsed = parse_prompts(prompts)
        with InterruptGuard() as guard, self._aborting_on_error(request_ids):
            self._add_all(request_ids, parsed, sampling_params, lora_request, priority, tokenization_kwargs, guard)
        self._enqueued += request_ids
        return request_ids

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: UseTqdm = None) -> list[RequestOutput]:
        """Run until everything that was enqueued is answered; the answers come in the order of enqueueing."""
        request_ids, self._enqueued = self._enqueued, []
        with InterruptGuard() as guard, self._aborting_on_error(request_ids):
            return self._answer(request_ids, use_tqdm, guard)

    # ------------------------------------------------------------ the loop

    def _run(
        self,
        prompts: list[ParsedPrompt],
        params: Params,
        use_tqdm: UseTqdm,
        lora_request: Any,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[RequestOutput]:
        request_ids: list[str] = []
        with InterruptGuard() as guard, self._aborting_on_error(request_ids):
            self._add_all(request_ids, prompts, params, lora_request, priority, tokenization_kwargs, guard)
            return self._answer(request_ids, use_tqdm, guard)

    @contextlib.contextmanager
    def _aborting_on_error(self, request_ids: list[str]) -> Any:
        try:
            yield
        except BaseException:  # Ctrl-C too
            self.llm_engine.abort_request(request_ids)
            for request_id in request_ids:
                self._finished.pop(request_id, None)
            raise

    def _add_all(
        self,
        request_ids: list[str],
        prompts: list[ParsedPrompt],
        params: Params,
        lora_request: Any,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        guard: InterruptGuard,
    ) -> None:
        """Enqueue all prompts; each id is added to `request_ids`, so that the caller can abort them."""
        refuse_lora(lora_request)
        for name, given in (("lora_request", lora_request), ("params", params), ("priority", priority)):
            if isinstance(given, Sequence) and len(given) != len(prompts):
                raise VLLMValidationError(
                    f"The lengths of prompts ({len(prompts)}) and {name} ({len(given)}) must be the same.",
                    parameter="sampling_params" if name == "params" else name,
                )
        if params is None:
            params = self.get_default_sampling_params()
        prompts = self.llm_engine.tokenize(prompts, tokenization_kwargs)
        finals: dict[int, SamplingParams] = {}  # one object for many prompts is copied once
        for index, prompt in enumerate(prompts):
            guard.check()
            own = params[index] if isinstance(params, Sequence) else params
            if id(own) not in finals:
                finals[id(own)] = _as_final_only(own)
            request_id = str(next(self.request_counter))
            with _naming_index("prompts", index if len(prompts) > 1 else None):
                self.llm_engine.add_request(
                    request_id,
                    prompt,
                    finals[id(own)],
                    priority=priority[index] if isinstance(priority, Sequence) else priority or 0,
                )
            request_ids.append(request_id)

    def _answer(self, request_ids: list[str], use_tqdm: UseTqdm, guard: InterruptGuard) -> list[RequestOutput]:
        """Step until `request_ids` are answered; the answers of others that end meanwhile are kept for them."""
        answers = {key: self._finished.pop(key) for key in request_ids if key in self._finished}
        wanted = set(request_ids)
        bar = ProgressBar(len(request_ids), use_tqdm)
        try:
            for output in answers.values():
                bar.update(output)
            while len(answers) < len(request_ids):
                guard.check()
                for output in self.llm_engine.step():
                    if output.request_id in wanted:
                        answers[output.request_id] = output
                        bar.update(output)
                    else:
                        self._finished[output.request_id] = output
        finally:
            bar.close()
        return [answers[request_id] for request_id in request_ids]

    def _render(self, conversation: Conversation, **template_args: Any) -> ParsedPrompt:
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise VLLMValidationError(
                "chat needs a tokenizer, and this engine was started with skip_tokenizer_init", parameter="messages"
            )
        return ParsedPrompt(tokenizer.apply_chat_template(conversation, **template_args), None, None)

    # ------------------------------------------------------------ what it is

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration, with the length that the engine settled on."""
        return self.llm_engine.model_config

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer of the model (loads transformers at the first call)."""
        if self._hf_tokenizer is None:
            config = self.model_config
            self._hf_tokenizer = get_tokenizer(
                config.tokenizer,
                tokenizer_mode=config.tokenizer_mode,
                trust_remote_code=config.trust_remote_code,
            )
        return self._hf_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a fresh SamplingParams with the defaults of the model's generation config."""
        fields = read_model_defaults(self.model_config.generation_config)
        return SamplingParams.from_optional(**{"max_tokens": SamplingParams().max_tokens, **fields})

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return how many workers compute."""
        config = self.llm_engine.vllm_config.parallel_config
        return config.world_size * (config.data_parallel_size if include_dp else 1)

    def __repr__(self) -> str:
        ready = self.llm_engine.engine_core.ready
        return (
            f"LLM(model={self.model_config.model!r}, dtype={ready.dtype}, device={ready.device}, "
            f"max_model_len={ready.max_model_len})"
        )

    # ------------------------------------------------------------ control

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes, for example after new weights were loaded."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: level 1 keeps the weights aside, level 2 drops them; unfinished requests are ended."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again: all of it, or what `tags` name ("weights", "kv_cache")."""
        self.llm_engine.wake_up(tags)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method by name, or a function with the worker as first argument; an answer a worker."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with the model; an answer a worker."""
        return self.collective_rpc(lambda worker: func(worker.model_runner.model))

    def shutdown(self) -> None:
        """Stop for good and give all memory back; a second call does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        engine = getattr(self, "llm_engine", None)  # absent when the start failed
        if engine is not None:
            with contextlib.suppress(Exception):  # at the interpreter's end parts of it may be deleted
                engine.shutdown()

    # ------------------------------------------------------------ not served

    beam_search = _refuse("beam_search", "ask for n continuations and their cumulative_logprob with generate")
    encode = _refuse("encode", "this engine serves text generation, no pooling models")
    embed = _refuse("embed", "this engine serves text generation, no pooling models")
    classify = _refuse("classify", "this engine serves text generation; see label_logprobs")
    reward = _refuse("reward", "this engine serves text generation, no pooling models")
    score = _refuse("score", "this engine serves text generation; see score_continuations and label_logprobs")
    get_metrics = _refuse(
        "get_metrics", "llm.llm_engine.get_stats() has the engine's counters; the server has /metrics"
    )
    start_profile = _refuse("start_profile", "use an ordinary profiler; the engine runs in this process")
    stop_profile = _refuse("stop_profile", "use an ordinary profiler; the engine runs in this process")


def _refuse_mm_kwargs(given: Mapping[str, Any] | None) -> None:
    if given:
        raise VLLMUnsupportedError(
            "mm_processor_kwargs is not supported: this engine reads text only", parameter="mm_processor_kwargs"
        )


def _as_final_only(params: Any) -> SamplingParams:
    """Return a copy whose one output comes at the end."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them; got {type(params).__name__}")
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return params
    own = params.clone()
    if own is params:  # skip_clone: reused by us, and still not to be changed
        own = copy.copy(params)
    own.output_kind = RequestOutputKind.FINAL_ONLY
    return own


def _as_conversations(messages: Any) -> Iterable[Conversation]:
    """Return the conversations; one that does not stand in a list is a batch of one."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise TypeError(f"messages must be a list of messages, or a list of such; got {type(messages).__name__}")
    return [list(messages)] if messages and isinstance(messages[0], Mapping) else messages


@contextlib.contextmanager
def _naming_index(what: str, index: int | None) -> Any:
    """Say in a refusal which of several it was."""
    try:
        yield
    except VLLMValidationError as error:
        if index is None:
            raise
        named = type(error)(f"{what}[{index}]: {error.message}", parameter=error.parameter, value=error.value)
        raise named from error
