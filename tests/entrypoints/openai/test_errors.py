"""Which of our exceptions answers with which status."""

import pytest
from starlette.exceptions import HTTPException

from vllm.entrypoints.openai.errors import ApiError, encodable, to_api_error
from vllm.exceptions import (
    MaxQueuedTokensError,
    QueueOverflowError,
    VLLMNotFoundError,
    VLLMUnsupportedError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (VLLMValidationError("no", parameter="n", value=0), 400, "BadRequestError"),
        (VLLMUnsupportedError("no", parameter="tools"), 400, "BadRequestError"),
        (VLLMNotFoundError("no"), 404, "NotFoundError"),
        (QueueOverflowError("full"), 503, "Service Unavailable"),
        (MaxQueuedTokensError("full"), 503, "Service Unavailable"),
        (EngineDeadError(), 503, "Service Unavailable"),
        (EngineGenerateError("the logits are NaN"), 500, "InternalServerError"),
        (ValueError("a bug of ours"), 500, "InternalServerError"),
        (HTTPException(405, headers={"Allow": "POST"}), 405, "MethodNotAllowedError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_exception_has_its_status(error: Exception, status: int, kind: str) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.kind) == (status, kind)
    assert set(answer.body()["error"]) == {"message", "type", "param", "code"}
    assert ("Retry-After" in answer.headers) == (status == 503)


def test_a_rule_names_its_field_and_a_failed_request_its_cause() -> None:
    assert to_api_error(VLLMValidationError("no", parameter="n")).param == "n"
    assert "NaN" in to_api_error(EngineGenerateError("the logits are NaN")).message


def test_a_bug_of_ours_tells_nothing_of_itself() -> None:
    assert "secret" not in to_api_error(RuntimeError("secret")).message


def test_a_message_with_half_a_character_can_be_sent() -> None:
    assert ApiError(400, encodable("\ud800")).response().body
