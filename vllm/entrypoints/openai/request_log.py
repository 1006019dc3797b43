"""Lines in the log about requests and answers: only where they are asked for, since they hold people's text."""

import logging
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.openai.context import AnswerOptions
from vllm.entrypoints.openai.engine_calls import Call
from vllm.outputs import RequestOutput

logger = logging.getLogger(__name__)


def log_request(options: AnswerOptions, call: Call) -> None:
    """Log what a request asks for."""
    if not options.enable_log_requests:
        return
    for prompt in call.prompts:
        text = None if prompt.text is None else _cut(prompt.text, options.max_log_len)
        token_ids = _cut(prompt.token_ids, options.max_log_len)
        logger.info("request %s: prompt %r, token ids %s, %s", call.request_id, text, token_ids, call.params)


def log_answer(options: AnswerOptions, request_id: str, outputs: Sequence[RequestOutput]) -> None:
    """Log what was answered."""
    if not options.enable_log_outputs:
        return
    for output in outputs:
        for completion in output.outputs:
            text = _cut(completion.text, options.max_log_len)
            logger.info("answer %s: choice %d, %r, %s", request_id, completion.index, text, completion.finish_reason)


def _cut(value: Any, limit: int | None) -> Any:
    return value if limit is None else value[:limit]
