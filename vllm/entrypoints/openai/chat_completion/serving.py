"""POST /v1/chat/completions: from a conversation to its prompt, and the shape of its answer."""

from typing import Any

from vllm.entrypoints.openai.answer import Answer, Choice, Logprobs, PromptPart
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.context import ServerContext
from vllm.entrypoints.openai.prompts import Prompt
from vllm.entrypoints.openai.usage import make_stream_usage
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers.chat_template import flatten_message


def render_conversation(body: ChatCompletionRequest, server: ServerContext) -> str:
    """Return the text that the chat template makes of the messages.

    Raises:
        VLLMValidationError: a message or a template is not served.
    """
    template = server.choose_chat_template(body.chat_template)
    if server.tokenizer is None:
        raise VLLMValidationError("this server runs without a tokenizer, so it has no chat", parameter="messages")
    return server.tokenizer.apply_chat_template(
        body.messages,
        chat_template=template,
        add_generation_prompt=body.adds_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        **body.template_variables(template),
    )


class ChatAnswer(Answer[ChatCompletionRequest]):
    """The continuations of one conversation."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    logprobs_field = "top_logprobs"
    _text: str  # the rendered template
    _role: str  # of the answer
    _echoed: str  # in front of each choice's content

    async def _read_prompts(self) -> list[Prompt]:
        body, server = self._body, self._server
        self._text = render_conversation(body, server)
        prompt = await server.prompts.read_rendered(body, self._text)
        final = flatten_message(body.messages[-1], len(body.messages) - 1)
        self._role = server.options.response_role if body.adds_generation_prompt else str(final["role"])
        self._echoed = str(final.get("content") or "") if body.echo and final["role"] == self._role else ""
        return [prompt]

    def _write_tokens(self, choice: Choice, completion: CompletionOutput, scores: FlatLogprobs) -> Logprobs:
        return {"content": choice.writer.write_chat(completion.token_ids, scores)}

    def _make_part(self, prompt: Prompt, output: RequestOutput) -> PromptPart:
        part = super()._make_part(prompt, output)
        part.text = self._echoed
        return part

    def _make_choice(self, choice: Choice, completion: CompletionOutput, logprobs: Logprobs) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {
                "role": self._role,
                "content": choice.part.text + completion.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids) if self._ids else None,
            "routed_experts": None,
        }

    def _make_first_chunks(self, part: PromptPart) -> list[dict[str, Any]]:
        """Return each choice's first event, with the role, and the prompt's scores in the very first one."""
        extra: dict[str, Any] = {}
        if self._body.has_continuous_usage:
            extra["usage"] = make_stream_usage(len(part.prompt.token_ids), 0)
        extra |= self._describe_ids(part)
        scores = {} if self._body.prompt_logprobs is None else {"prompt_logprobs": part.prompt_logprobs}
        chunks = []
        for index in range(self._body.num_choices):
            delta = {"role": self._role, "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append({"choices": [choice], **(scores if index == 0 else {}), **extra})
        if part.text:
            for index in range(self._body.num_choices):
                choice = {"index": index, "delta": {"content": part.text}, "logprobs": None, "finish_reason": None}
                chunks.append({"choices": [choice]})
        return chunks

    def _make_chunk(self, choice: Choice, completion: CompletionOutput, logprobs: Logprobs) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": completion.text},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
        }
        if completion.finish_reason is not None:
            chunk["stop_reason"] = completion.stop_reason
        chunk["token_ids"] = list(completion.token_ids) if self._ids else None
        return chunk

    def _describe_prompt(self, part: PromptPart) -> dict[str, Any]:
        return {"prompt_logprobs": part.prompt_logprobs, **self._describe_ids(part)}

    def _describe_ids(self, part: PromptPart) -> dict[str, Any]:
        return {
            "prompt_token_ids": part.prompt.token_ids if self._ids else None,
            "prompt_text": self._text if self._body.return_prompt_text else None,
        }
