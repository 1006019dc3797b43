"""`vllm chat` and `vllm complete`."""

import asyncio
import io
import math
import pathlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.benchmarks.paced_server import Event, PacedServer, Refusal, choice, delta
from tests.benchmarks.test_serve import wait_until
from vllm.entrypoints.cli.dialogue import colour, find_style, read_tokens
from vllm.entrypoints.cli.main import main


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


async def answer_ok(body: dict[str, Any]) -> AsyncIterator[Event]:
    if "messages" in body:
        yield delta(role="assistant", content="")
        yield delta(content="o")
        yield delta("stop", content="k")
    else:
        yield choice("ok", finish="stop")


def test_a_conversation_remembers_its_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "one", "", "two")
    with PacedServer(answer_ok) as server:
        flags = ("--system-prompt", "be short", "--max-tokens", "9", "--temperature", "0", "--seed", "4")
        assert main(["chat", "--url", f"{server.url}/v1", *flags]) == 0
    first = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one"}]
    assert [body["messages"] for body in server.bodies] == [
        first,
        [*first, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "two"}],
    ]
    sent = {"model": "paced", "max_tokens": 9, "temperature": 0.0, "seed": 4, "stream": True}
    assert {name: server.bodies[0][name] for name in sent} == sent and "logprobs" not in server.bodies[0]
    assert capsys.readouterr().out == "ok\nok\n"


def test_a_turn_that_is_refused_did_not_take_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse_once(body: dict[str, Any]) -> AsyncIterator[Event]:
        if body["messages"][-1]["content"] == "bad":
            raise Refusal(400, "too long")
        async for event in answer_ok(body):
            yield event

    type_lines(monkeypatch, "bad", "good")
    with PacedServer(refuse_once) as server:
        assert main(["chat", "--url", server.url]) == 1
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "good"}]
    shown = capsys.readouterr()
    assert shown.out == "ok\n" and "HTTP 400: too long" in shown.err


def test_each_line_is_continued_by_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    type_lines(monkeypatch, "one", "two")
    with PacedServer(answer_ok) as server:
        assert main(["complete", "--url", server.url, "--stop", "x", "--stop", "y", "--model-name", "mine"]) == 0
    assert [body["prompt"] for body in server.bodies] == ["one", "two"]
    assert (server.bodies[0]["stop"], server.bodies[0]["model"]) == (["x", "y"], "mine")
    assert capsys.readouterr().out == "ok\nok\n"


def test_our_server_and_our_engine_answer_alike(
    url: str, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ("--model", str(model), "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    for command in ("chat", "complete"):
        shown = []
        for whom in (("--url", url), local):
            flags = ("-q", "the way", "--max-tokens", "6", "--temperature", "0", "--logprobs")
            assert main([command, *whom, *flags]) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1]
        assert "cumulative logprob -" in shown[0] and "perplexity" in shown[0]


def test_tokens_have_the_colour_of_their_probability(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for command in ("chat", "complete"):
        assert main([command, "--url", url, "-q", "the way", "--max-tokens", "6", "--logprobs"]) == 0
        coloured = capsys.readouterr().out
        assert main([command, "--url", url, "-q", "the way", "--max-tokens", "6"]) == 0
        assert "\x1b[" in coloured.splitlines()[0] and "\x1b[" not in capsys.readouterr().out


def test_every_probability_has_a_style() -> None:
    styles = [find_style(math.log(p)) for p in (1.0, 0.9, 0.6, 0.3, 0.1, 0.01)]
    assert styles[0] == styles[1] and len(set(styles)) == 5
    assert find_style(-9999.0) == styles[-1] and "underline" in styles[-1]


def test_tokens_are_read_in_both_forms() -> None:
    completion = {"tokens": ["a", "b", "c"], "token_logprobs": [None, -0.5, -1.0], "top_logprobs": [None, {}, {}]}
    assert read_tokens(completion) == [("b", -0.5), ("c", -1.0)]
    assert read_tokens({"content": [{"token": "a", "logprob": -2.0, "top_logprobs": []}]}) == [("a", -2.0)]
    assert read_tokens(None) == read_tokens({"content": None}) == []


def test_a_text_that_its_tokens_do_not_spell_has_the_style_of_the_rarest() -> None:
    shown = colour("é", [("\ufffd", -0.01), ("", -5.0)])
    assert shown.plain == "é" and {str(span.style) for span in shown.spans} == {find_style(-5.0)}
    apart = colour("ab", [("a", -0.01), ("b", -5.0)])
    assert [str(span.style) for span in apart.spans] == [find_style(-0.01), find_style(-5.0)]


def test_an_answer_can_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    async def attack(body: dict[str, Any]) -> AsyncIterator[Event]:
        yield choice("\x1b[2J[bold]x", finish="stop")

    with PacedServer(attack) as server:
        assert main(["complete", "--url", server.url, "-q", "a"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "[bold]x" in shown


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--url", "http://127.0.0.1:1", "-q", "x"], 1, "can't connect"),
        (["--url", "http://127.0.0.1:1", "--model", "m", "-q", "x"], 2, "--url and --model"),
        (["--model", "/nowhere/at/all", "-q", "x"], 1, "/nowhere/at/all"),
        (["--quik", "x"], 2, "did you mean '--quick'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], status: int, words: str
) -> None:
    assert main(["chat", *flags]) == status
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err and shown.out == ""


def test_ctrl_c_ends_the_answer_and_the_request() -> None:
    async def for_ever(body: dict[str, Any]) -> AsyncIterator[Event]:
        while True:
            yield choice("x " * 200)
            await asyncio.sleep(0.01)

    with PacedServer(for_ever) as server:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "complete", "--url", server.url, "-q", "a"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: server.num_open == 1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=10)
        wait_until(lambda: server.num_open == 0)
    assert process.returncode == 130 and said.splitlines() == ["vllm: interrupted"]
