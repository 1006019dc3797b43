"""POST /v1/completions: the shape of its answer."""

from typing import Any

from vllm.entrypoints.openai.answer import Answer, Choice, Logprobs, PromptPart
from vllm.entrypoints.openai.columnar import ColumnarLogprobs
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.echo import EchoedPrompt
from vllm.entrypoints.openai.prompts import Prompt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput


class CompletionAnswer(Answer[CompletionRequest]):
    """The continuations of a list of prompts, their scores, or both."""

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"

    async def _read_prompts(self) -> list[Prompt]:
        return await self._server.prompts.read_all(self._body, self._body.prompt)

    def _make_part(self, prompt: Prompt, output: RequestOutput) -> PromptPart:
        part = super()._make_part(prompt, output)
        if not self._body.echo:
            return part
        is_whole = self._call.params.max_tokens == 0
        echo = EchoedPrompt(self._server.tokenizer, prompt.token_ids, prompt.text, is_whole=is_whole)
        part.text = echo.text
        scores = output.prompt_logprobs
        if isinstance(scores, FlatLogprobs) and self._body.logprobs is not None:
            if self._body.is_columnar:
                part.logprobs = ColumnarLogprobs.of(scores)
            else:
                part.logprobs = echo.write(scores, as_token_ids=self._as_token_ids, max_entries=self._prompt_width)
        return part

    def _choose_best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """Return the n candidates with the largest sum of logprobs, best first; without best_of all, in order."""
        n = self._body.num_choices
        if len(completions) > n:
            completions.sort(key=lambda completion: -(completion.cumulative_logprob or 0.0))  # stable: ties by index
        return completions[:n]

    def _write_tokens(self, choice: Choice, completion: CompletionOutput, scores: FlatLogprobs) -> Logprobs:
        return choice.writer.write_completion(
            completion.token_ids, scores, completion.finish_reason, completion.stop_reason
        )

    def _make_choice(self, choice: Choice, completion: CompletionOutput, logprobs: Logprobs) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.part.text + completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids) if self._ids else None,
            "prompt_logprobs": choice.part.prompt_logprobs,
            "prompt_token_ids": choice.part.prompt.token_ids if self._ids else None,
            "routed_experts": None,
        }

    def _make_chunk(self, choice: Choice, completion: CompletionOutput, logprobs: Logprobs) -> dict[str, Any]:
        is_first, part = not choice.has_started, choice.part
        chunk = {
            "index": choice.index,
            "text": part.text + completion.text if is_first else completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "prompt_token_ids": part.prompt.token_ids if is_first and (self._ids or self._body.echo) else None,
            "token_ids": list(completion.token_ids) if self._ids else None,
        }
        if is_first and self._body.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = part.prompt_logprobs
        return chunk
