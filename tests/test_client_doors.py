"""Names that clients import at start-up: they must be there, and say no by name where they are used."""

import ipaddress
from types import SimpleNamespace
from typing import Any

import pytest

from vllm import PoolingParams, initialize_ray_cluster
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from vllm.exceptions import VLLMUnsupportedError
from vllm.lora.request import LoRARequest
from vllm.renderers.hf import resolve_chat_template
from vllm.utils import random_uuid
from vllm.utils.network_utils import get_ip


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda: LoRARequest("adapter", 1, "/adapter"), "LoRA"),
        (lambda: LoRARequest(lora_name="adapter", lora_int_id=1, lora_path="/adapter"), "LoRA"),
        (lambda: PoolingParams(), "pooling"),
        (lambda: PoolingParams(dimensions=3), "pooling"),
        (lambda: trainer_init({"master_address": "x"}), "NCCL"),
        (lambda: packed_nccl_broadcast_producer(iterator=[], group=None, src=0), "NCCL"),
        (lambda: initialize_ray_cluster(None), "Ray"),
    ],
)
def test_what_is_not_served_can_be_imported_and_is_refused_by_name(use: Any, what: str) -> None:
    with pytest.raises(VLLMUnsupportedError, match=what):
        use()


@pytest.mark.parametrize(
    ("given", "own", "tools", "resolved"),
    [
        ("given", "own", None, "given"),
        (None, "own", None, "own"),
        (None, None, None, None),
        (None, {"default": "d", "tool_use": "t"}, None, "d"),
        (None, {"default": "d", "tool_use": "t"}, [{}], "t"),
        (None, {"default": "d"}, [{}], "d"),
    ],
)
def test_the_chat_template_that_counts(given: str | None, own: Any, tools: Any, resolved: str | None) -> None:
    tokenizer = SimpleNamespace(chat_template=own)
    assert resolve_chat_template(tokenizer, given, tools, model_config=None) == resolved
    assert resolve_chat_template(tokenizer=object(), chat_template=given, tools=None, model_config=None) == given


def test_uuids_differ_and_are_hex() -> None:
    one, two = random_uuid(), random_uuid()
    assert one != two and len(one) == 32 and int(one, 16) >= 0


def test_the_address_is_one() -> None:
    assert ipaddress.ip_address(get_ip())
