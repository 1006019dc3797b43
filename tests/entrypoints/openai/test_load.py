"""Many clients at once, and clients that behave badly: each gets its own answer, and nothing is left behind."""

import contextlib
import json
import pathlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.entrypoints.openai.client import Answer, Client, assert_same, find_children, serve
from tests.entrypoints.openai.test_streams import join_completion, open_stream
from tests.memory import MIB, read_memory

KINDS: list[dict[str, Any]] = [
    {},
    {"n": 3, "logprobs": 2},
    {"stream": True},
    {"stream": True, "n": 2, "logprobs": 1, "max_tokens": 9},
    {"prompt_logprobs": 1, "prompt": "and of the way was on", "max_tokens": 2},
    {"stream": True, "prompt_logprobs": 0, "echo": True, "logprobs": 1, "prompt": ["a", "the"]},
    {"max_tokens": 0, "prompt_logprobs": 1},
    {"temperature": 0, "n": 2, "max_tokens": 12},
]


def read_choices(answer: Answer, kind: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer, whole or streamed."""
    assert answer.status == 200, answer.text
    if not kind.get("stream"):
        return list(answer.json["choices"])
    *events, done = answer.events
    assert done == "[DONE]"
    joined = join_completion(events)
    return [joined[index] for index in sorted(joined)]


def assert_nothing_left(server: Client) -> None:
    server.wait_until_closed()
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.get("/load").json == {"server_load": 0}


def test_two_hundred_clients_at_once_each_get_their_own_answer(server: Client) -> None:
    alone = [read_choices(server.complete(**kind), kind) for kind in KINDS]
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda i: server.complete(**KINDS[i % len(KINDS)]), range(200)))
    for i, answer in enumerate(answers):
        kind = KINDS[i % len(KINDS)]
        assert_same(read_choices(answer, kind), alone[i % len(KINDS)], f"request {i}")
    assert_nothing_left(server)


def test_clients_that_leave_at_any_moment_disturb_nobody_else(server: Client) -> None:
    """A third of the clients leave: before the first token, in the middle, some while their prompt is computed."""
    expected = server.complete(seed=5, logprobs=1).json["choices"]

    def leave(i: int) -> None:
        fields = {"n": 4, "max_tokens": 200, "prompt": "the way of " * (1 + 5 * (i % 4)), "prompt_logprobs": i % 2}
        connection = open_stream(server, stream=i % 3 > 0, **fields)
        if i % 3 == 2:
            connection.getresponse().read(500 * (i % 5))
        else:
            time.sleep(0.01 * (i % 7))
        connection.close()

    with ThreadPoolExecutor(60) as pool:
        leaving = [pool.submit(leave, i) for i in range(30)]
        staying = [pool.submit(server.complete, seed=5, logprobs=1) for _ in range(30)]
        for future in leaving:
            future.result()
        for answered in staying:
            assert_same(answered.result().json["choices"], expected)
    assert_nothing_left(server)


def test_a_reader_that_sleeps_gets_merged_pieces_and_all_of_them(server: Client) -> None:
    """Its connection takes little, so the server can't send: what comes meanwhile is merged, by choice, in order."""
    fields: dict[str, Any] = {"prompt": "the way", "n": 2, "seed": 3, "ignore_eos": True, "max_tokens": 120}
    fields |= {"logprobs": -1}
    whole = server.complete(**fields).json["choices"]
    before = server.metric("generation_tokens_total")
    with contextlib.closing(server.connect()) as connection:
        connection.sock = socket.socket()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sock.connect((server.host, server.port))
        body = json.dumps(fields | {"stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        while server.metric("generation_tokens_total") - before < 240:
            time.sleep(0.05)
        server.wait_until_idle()  # a slow reader does not hold the engine up
        text = connection.getresponse().read().decode()
    *events, done = Answer(200, {}, text).events
    assert done == "[DONE]"
    most = max(len(piece["logprobs"]["tokens"]) for event in events for piece in event["choices"])
    assert most > 1 and len(events) < 240, "nothing was merged: the reader was not slow enough"
    joined = join_completion(events)
    for choice in whole:
        assert joined[choice["index"]]["text"] == choice["text"]
        assert_same(joined[choice["index"]]["logprobs"], choice["logprobs"])
    assert_nothing_left(server)


def test_a_queue_that_others_have_filled_is_503_and_empties_again(server: Client) -> None:
    """A family counts with all its choices and is refused as a whole; what runs is not disturbed."""
    server.wait_until_idle()
    with contextlib.closing(open_stream(server, n=300, max_tokens=200)) as connection:
        connection.getresponse().read(10)
        refused = server.complete(n=390, max_tokens=1)
        assert refused.status == 503 and refused.headers["retry-after"] == "1"
        assert refused.error["code"] == 503 and "max_num_queued_reqs" in refused.error["message"]
        end = time.monotonic() + 10
        while server.metric("num_requests_running") == 0:
            assert time.monotonic() < end, "the family that filled the queue runs no more"
        assert server.complete(max_tokens=1).status == 200
    assert_nothing_left(server)
    assert len(server.complete(n=390, max_tokens=1).json["choices"]) == 390


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_requests(tiny_model: pathlib.Path) -> None:
    # A small cache: the pages of a large one are touched for the first time one after another, for long.
    with serve(tiny_model, "--disable-uvicorn-access-log", "--kv-cache-memory-bytes", str(2 * MIB)) as server:
        assert server.process is not None
        pids = [server.process.pid, *find_children(server.process.pid)]
        sizes = []
        with ThreadPoolExecutor(8) as pool:
            for start in range(0, 3000, 1000):
                jobs = range(start, start + 1000)
                answers = pool.map(lambda i: server.complete(**KINDS[i % len(KINDS)] | {"seed": i}).status, jobs)
                assert set(answers) == {200}
                sizes.append([read_memory(pid) for pid in pids])
        growth = [after - before for before, after in zip(*sizes[-2:], strict=True)]
        assert sum(growth) <= 5 * MIB, [[size / MIB for size in row] for row in sizes]
        assert_nothing_left(server)
