"""`vllm run-batch` and `vllm collect-env`."""

import asyncio
import json
import pathlib
from typing import Any

import msgspec
import pytest

from tests.entrypoints.openai.client import Client, assert_same
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.cli.run_batch import answer_all
from vllm.entrypoints.http_client import Answer, OnData


def make_line(custom_id: Any, body: Any, **changes: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | changes)


COMPLETION = {"prompt": "the way", "max_tokens": 4, "temperature": 0, "logprobs": 2}
CHAT = {"messages": [{"role": "user", "content": "the way"}], "max_tokens": 4, "temperature": 0, "logprobs": True}


@pytest.fixture(scope="module")
def answers(model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("batch")
    lines = [
        make_line("a", COMPLETION),
        make_line("b", CHAT, url="/v1/chat/completions"),
        make_line("c", COMPLETION | {"temperature": 9}),
        "",
        "{not json",
        make_line("d", COMPLETION, url="/v1/embeddings"),
        make_line("e", COMPLETION | {"stream": True}),
        make_line("a", COMPLETION),
        make_line(7, COMPLETION),
        make_line("f", COMPLETION | {"n": 3, "temperature": 1, "max_tokens": 2, "seed": 1}),
        make_line("g", COMPLETION | {"model": "other"}),
    ]
    (folder / "in.jsonl").write_text("\n".join(lines))
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--disable-tqdm")
    engine = ("--model", str(model), "--max-model-len", "256", "--kv-cache-memory-bytes", "8M")
    assert main(["run-batch", *files, *engine, "--max-concurrency", "3"]) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_answers_come_in_the_order_of_the_requests_and_name_them(answers: list[dict[str, Any]]) -> None:
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c", None, "d", "e", "a", None, "f", "g"]
    assert len({answer["id"] for answer in answers}) == len(answers)
    for answer in answers:
        assert list(answer) == ["id", "custom_id", "response", "error"]
        assert (answer["response"] is None) != (answer["error"] is None)


def test_an_answer_is_the_server_s(answers: list[dict[str, Any]], server: Client) -> None:
    for answer, path, body in ((answers[0], "completions", COMPLETION), (answers[1], "chat/completions", CHAT)):
        assert answer["response"]["status_code"] == 200
        served = server.send("POST", f"/v1/{path}", body).json
        own = answer["response"]["body"]
        assert answer["response"]["request_id"] == own["id"]
        assert_same(own["choices"], served["choices"])
        assert own["usage"] == served["usage"]
    assert len(answers[8]["response"]["body"]["choices"]) == 3


def test_a_refusal_by_the_api_is_a_response(answers: list[dict[str, Any]]) -> None:
    assert answers[2]["response"]["status_code"] == 400
    assert answers[2]["response"]["body"]["error"]["param"] == "temperature"
    assert answers[9]["response"]["status_code"] == 404


def test_a_line_that_is_no_request_has_an_error(answers: list[dict[str, Any]]) -> None:
    said = {place: answers[place]["error"]["message"] for place in (3, 4, 5, 6, 7)}
    assert "/v1/chat/completions" in said[4] and "stream" in said[5]
    assert "used before" in said[6] and "custom_id" in said[7]


def test_no_more_requests_are_open_than_allowed_and_order_is_kept() -> None:
    class Slow:
        num_open = max_open = 0

        async def send(self, method: str, path: str, body: Any = None, *, on_data: OnData | None = None) -> Answer:
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            await asyncio.sleep(0.002 * (body["place"] % 3))
            self.num_open -= 1
            return Answer(200, {}, msgspec.json.encode(body))

        async def close(self) -> None: ...

    async def run(sender: Slow) -> list[int]:
        lines = [make_line(str(place), {"place": place}).encode() for place in range(20)]
        return [answer["response"]["body"]["place"] async for answer in answer_all(sender, lines, 4)]

    sender = Slow()
    assert asyncio.run(run(sender)) == list(range(20)) and sender.max_open == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-i", "/nowhere/in", "-o", "out"], "/nowhere/in"),
        (["-i", "EMPTY", "-o", "out"], "holds no request"),
        (["-i", "FULL", "-o", "/nowhere/out"], "/nowhere/out"),
        (["-i", "FULL", "-o", "out"], "which model"),
        (["-i", "FULL", "-o", "out", "--max-concurrency", "0"], "--max-concurrency"),
        (["-i", "FULL"], "-o"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("EMPTY").write_text("\n\n")
    pathlib.Path("FULL").write_text(make_line("a", COMPLETION))
    assert main(["run-batch", *flags]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and "Traceback" not in shown.err


def test_the_environment_is_described_without_its_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "do-not-show")
    monkeypatch.setenv("HF_TOKEN", "do-not-show")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert "do-not-show" not in text
    assert found["environment"]["VLLM_API_KEY"] == "(set)" and found["environment"]["OMP_NUM_THREADS"] == "1"
    assert found["torch"]["version"] == found["packages"]["torch"]
    assert "missing" not in found["packages"].values()
