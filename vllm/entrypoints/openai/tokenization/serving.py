"""POST /tokenize and /detokenize, GET /tokenizer_info."""

import asyncio
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import render_conversation
from vllm.entrypoints.openai.context import ServerContext
from vllm.entrypoints.openai.tokenization.protocol import DetokenizeRequest, TokenizeRequest
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import Tokenizer


async def tokenize(body: TokenizeRequest, server: ServerContext) -> dict[str, Any]:
    """Return the token ids of a text, or of a conversation as the chat template renders it."""
    server.check_model(body.model)
    tokenizer = _get_tokenizer(server)
    if (body.prompt is None) == (body.messages is None):
        raise VLLMValidationError("exactly one of `prompt` and `messages` must be given", parameter="prompt")
    if body.prompt is not None:
        text, adds_special = body.prompt, body.add_special_tokens is not False
    else:
        chat = ChatCompletionRequest(**body.model_dump(exclude={"prompt", "return_token_strs"}))
        chat.check()
        text, adds_special = render_conversation(chat, server), bool(body.add_special_tokens)
    token_ids = await asyncio.to_thread(tokenizer.encode, text, adds_special)
    return {
        "count": len(token_ids),
        "max_model_len": server.max_model_len,
        "tokens": token_ids,
        "token_strs": tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None,
    }


async def detokenize(body: DetokenizeRequest, server: ServerContext) -> dict[str, Any]:
    """Return the text of token ids, special tokens shown."""
    server.check_model(body.model)
    tokenizer = _get_tokenizer(server)
    largest = max(server.vocab_size - 1, tokenizer.max_token_id)
    for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
        if not 0 <= token_id <= largest:
            raise VLLMValidationError(
                f"tokens must hold token ids from 0 to {largest}; got {token_id}", parameter="tokens", value=token_id
            )
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)}


def describe_tokenizer(server: ServerContext) -> dict[str, Any]:
    """Return what a harness needs to build prompts itself: special tokens and the chat template."""
    tokenizer = _get_tokenizer(server)
    settings = tokenizer.settings
    special = {name: token.content for name, token in settings.special_tokens.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        **special,
        "additional_special_tokens": [token.content for token in settings.extra_special_tokens],
        "add_bos_token": settings.add_bos_token,
        "add_eos_token": settings.add_eos_token,
        "model_max_length": server.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": server.options.chat_template or tokenizer.chat_template,
    }


def _get_tokenizer(server: ServerContext) -> Tokenizer:
    if server.tokenizer is None:
        raise VLLMValidationError("this server runs without a tokenizer", parameter="model")
    return server.tokenizer
