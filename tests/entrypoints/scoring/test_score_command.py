"""`vllm score`: records, windows, bad lines, and going on after a kill."""

import io
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.tiny_tokenizers import WORDS
from vllm import LLM
from vllm.entrypoints.cli.main import main


def make_text(seed: int, num_words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def make_lines(count: int) -> list[str]:
    lines = []
    for i in range(count):
        if i % 3 == 2:
            item: dict[str, Any] = {"context": make_text(0, 20) + make_text(i, 3), "choices": [" they", " he said"]}
            item["answer"] = i % 2
        else:
            item = {"text": make_text(i, 2 + i % 40), "id": f"text-{i}"}
        lines.append(json.dumps(item))
    return lines


def engine_flags(folder: pathlib.Path) -> list[str]:
    return ["--model", str(folder), "--max-model-len", "64", "--kv-cache-memory-bytes", "4M", "--disable-tqdm"]


def score(folder: pathlib.Path, source: pathlib.Path | str, out: pathlib.Path, *flags: str) -> int:
    return main(["score", str(source), "--out", str(out), *engine_flags(folder), *flags])


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("score") / "in.jsonl"
    lines = make_lines(20)
    path.write_text("\n".join([*lines[:5], "", *lines[5:]]) + "\n")  # line 6 is empty
    return path


@pytest.fixture(scope="module")
def whole(folder: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    """The answers of a run that nothing interrupted."""
    out = source.with_name("whole.jsonl")
    assert score(folder, source, out, "--batch-size", "4", "--window", "16", "--stride", "8") == 0
    return out


def assert_same_records(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys() and (a["line"], a["digest"]) == (b["line"], b["digest"])
        if a["type"] == "text":
            assert a["logprobs"][1:] == pytest.approx(b["logprobs"][1:], abs=1e-4)
        else:
            for left, right in zip(a["scores"], b["scores"], strict=True):
                assert left["logprobs"] == pytest.approx(right["logprobs"], abs=1e-4)


def test_a_record_a_line_in_order_with_the_values_of_the_llm(
    llm: LLM, source: pathlib.Path, whole: pathlib.Path
) -> None:
    records = read(whole)
    assert [record["line"] for record in records] == [*range(1, 6), *range(7, 22)]
    lines = [line for line in source.read_text().splitlines() if line]
    for record, line in zip(records, lines, strict=True):
        item = json.loads(line)
        if "text" in item:
            ids = llm.llm_engine.tokenizer.encode(item["text"])
            assert (record["type"], record["id"], record["token_ids"]) == ("text", item["id"], ids)
            assert (record["num_tokens"], record["num_scored_tokens"]) == (len(ids), len(ids) - 1)
            assert record["num_words"] == len(item["text"].split()) and record["num_bytes"] == len(item["text"])
            assert record["num_windows"] == 1 + max(0, math.ceil((len(ids) - 16) / 8))
            assert record["logprob"] == pytest.approx(sum(record["logprobs"][1:]))
        else:
            (scores,) = llm.score_continuations(item["context"], item["choices"])
            got = [score["logprob"] for score in record["scores"]]
            assert got == pytest.approx([score.logprob for score in scores], abs=1e-4)
            assert record["best"] == max(range(2), key=got.__getitem__)
            assert record["is_correct"] == (record["best"] == item["answer"])


def test_the_summary_follows_from_the_records(
    folder: pathlib.Path, source: pathlib.Path, whole: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run over a file that is complete scores nothing and says the same."""
    before = whole.read_bytes()
    assert score(folder, source, whole, "--window", "16", "--stride", "8", "--summary", "json") == 0
    summary = json.loads(capsys.readouterr().out)
    records = read(whole)
    texts = [record for record in records if record["type"] == "text"]
    total = sum(record["logprob"] for record in texts)
    assert summary["token_perplexity"] == pytest.approx(math.exp(-total / sum(r["num_scored_tokens"] for r in texts)))
    assert summary["byte_perplexity"] == pytest.approx(math.exp(-total / sum(r["num_bytes"] for r in texts)))
    assert summary["word_perplexity"] == pytest.approx(math.exp(-total / sum(r["num_words"] for r in texts)))
    assert (summary["texts"], summary["choice_items"], summary["errors"]) == (14, 6, 0)
    assert (summary["window"], summary["stride"], summary["overlap"]) == (16, 8, 8)
    assert summary["accuracy"] == sum(r["is_correct"] for r in records if r["type"] == "choices") / 6
    assert whole.read_bytes() == before


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.55, 0.8, 0.999])
def test_a_run_goes_on_where_the_file_ends_even_in_the_middle_of_a_line(
    folder: pathlib.Path, source: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path, cut: float
) -> None:
    out = tmp_path / "out.jsonl"
    data = whole.read_bytes()
    out.write_bytes(data[: int(cut * len(data))])
    (tmp_path / "out.jsonl.meta.json").write_bytes(whole.with_name("whole.jsonl.meta.json").read_bytes())
    kept = out.read_bytes().rpartition(b"\n")[0]
    assert score(folder, source, out, "--window", "16", "--stride", "8", "--summary", "none") == 0
    assert_same_records(read(out), read(whole))
    assert out.read_bytes().startswith(kept), "nothing that stood there was written anew"


def test_other_settings_other_input_and_foreign_files_are_refused(
    folder: pathlib.Path,
    source: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    same = ("--window", "16", "--stride", "8")
    before = whole.read_bytes()
    assert score(folder, source, whole, "--window", "32") == 2
    assert "window was 16, is 32" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([*source.read_text().splitlines()[:2], '{"text": "the way"}']))
    assert score(folder, other, whole, *same) == 2
    assert "part at line 3" in capsys.readouterr().err
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine\n")
    assert score(folder, source, foreign) == 2
    assert "not written by vllm score" in capsys.readouterr().err and foreign.read_text() == "mine\n"
    assert score(folder, source, foreign, "--overwrite", "--summary", "none") == 0
    assert len(read(foreign)) == 20 and whole.read_bytes() == before


BAD_LINES = [
    ('{"text": ', "not JSON"),
    ("[1]", "must be a JSON object; got list"),
    ('{"text": ""}', "`text`"),
    ('{"prompt": "a"}', "must have `text`, or `context` and `choices`; has prompt"),
    ('{"text": "a", "context": "b"}', "must have `text`, or"),
    ('{"context": "a", "choices": []}', "`choices`"),
    ('{"context": "a", "choices": ["b", ""]}', r"choices[1] is empty"),
    ('{"context": [5, 9999], "choices": ["b"]}', "9999"),
    ('{"context": "a", "choices": ["b"], "answer": 1}', "`answer` must be the number of a choice, from 0 to 0"),
]


def test_bad_lines_are_skipped_with_their_numbers_or_stop_the_run(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = '{"text": "the way"}'
    source.write_text("\n".join([good, *(line for line, _ in BAD_LINES), good]))
    assert score(folder, source, out, "--on-error", "skip", "--summary", "json") == 0
    records = read(out)
    assert [record["line"] for record in records] == list(range(1, 12))
    for record, (_, message) in zip(records[1:-1], BAD_LINES, strict=True):
        assert message in record["error"]
    assert json.loads(capsys.readouterr().out)["errors"] == len(BAD_LINES)
    assert "logprob" in records[0] and "logprob" in records[-1]

    stopped = tmp_path / "stopped.jsonl"
    assert score(folder, source, stopped) == 2
    assert "line 2: not JSON" in capsys.readouterr().err
    assert [record["line"] for record in read(stopped)] == [1]


def test_texts_a_line_and_a_text_a_file(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("the way they look\n\nall of the words\r\nsaid\n")
    assert score(folder, source, tmp_path / "lines.jsonl", "--summary", "none", "--top-k", "1") == 0
    lines = read(tmp_path / "lines.jsonl")
    assert [record["line"] for record in lines] == [1, 3, 4] and lines[1]["num_bytes"] == len("all of the words")
    assert [row and len(row) for row in lines[0]["top_logprobs"]] == [None, *[1] * (lines[0]["num_tokens"] - 1)]
    flags = ("--format", "whole", "--summary", "none", "--sums-only")
    assert score(folder, source, tmp_path / "whole.jsonl", *flags) == 0
    (record,) = read(tmp_path / "whole.jsonl")
    assert record["num_bytes"] == source.stat().st_size and "logprobs" not in record


def test_what_the_command_can_t_do_is_said_before_a_model_loads(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.csv").write_text("a")
    out = tmp_path / "out.jsonl"
    for source, flags, message in (
        (tmp_path / "in.csv", (), "--format must say"),
        (tmp_path / "no.jsonl", (), "can't be read"),
        (tmp_path / "in.csv", ("--format", "lines", "--batch-size", "0"), "--batch-size"),
        (tmp_path / "in.csv", ("--format", "lines", "--top-k", "-1"), "--top-k"),
    ):
        assert score(tmp_path / "no-model", source, out, *flags) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()


def test_the_standard_input_is_jsonl(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(make_lines(3)).encode())))
    assert score(folder, "-", tmp_path / "out.jsonl", "--summary", "none") == 0
    assert [record["type"] for record in read(tmp_path / "out.jsonl")] == ["text", "text", "choices"]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "flags"), [(0, ()), (1, ()), (2, ("--batch-invariant",))])
def test_killed_at_a_random_moment_and_run_again(
    folder: pathlib.Path, tmp_path: pathlib.Path, seed: int, flags: tuple[str, ...]
) -> None:
    source, out, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    source.write_text("\n".join(make_lines(600)))
    assert score(folder, source, whole, "--summary", "none", *flags) == 0
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "score", str(source), "--out", str(out)]
    rng = random.Random(seed)
    for _ in range(3):
        process = subprocess.Popen(
            [*command, *engine_flags(folder), "--batch-size", "8", *flags],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        size = out.stat().st_size if out.exists() else 0
        while process.poll() is None and (not out.exists() or out.stat().st_size == size):
            time.sleep(0.01)
        time.sleep(rng.random())
        before = out.read_bytes().rpartition(b"\n")[0]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert out.read_bytes().startswith(before)
    assert score(folder, source, out, "--batch-size", "8", "--summary", "none", *flags) == 0
    assert out.read_bytes().startswith(before)
    if flags:  # to the bit
        assert read(out) == read(whole)
    else:
        assert_same_records(read(out), read(whole))


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_lines(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "in.txt"
    script = (
        "import resource, sys\n"
        "from vllm.entrypoints.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    for count in (500, 10_000):
        source.write_text("\n".join(make_text(i, 12) for i in range(count)))
        arguments = ["score", str(source), "--out", str(tmp_path / f"{count}.jsonl"), *engine_flags(folder)]
        run = subprocess.run(
            [sys.executable, "-c", script, *arguments, "--summary", "none"],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        )
        peaks.append(int(run.stdout) / 1024)
    assert peaks[1] - peaks[0] < 16, f"MiB at the peak: {peaks}"
