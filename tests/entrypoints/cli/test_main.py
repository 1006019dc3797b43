"""The `vllm` command."""

import json
import pathlib
import subprocess
import sys

import pytest

import vllm
from tests.tiny_models import write_tiny_model
from vllm.entrypoints.cli import tables
from vllm.entrypoints.cli.generate import describe_positions
from vllm.entrypoints.cli.main import SUBCOMMANDS, main
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-for-cli"))


def run_generate(folder: pathlib.Path, *arguments: str) -> int:
    return main(["generate", "--model", str(folder), "--kv-cache-memory-bytes", "4M", *arguments])


def read_strictly(text: str) -> dict:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == vllm.__version__


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from vllm.entrypoints.cli.main import main; status = main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'rich', 'tqdm'} & set(sys.modules)\n"
        "print(status, sorted(heavy))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "0 []"
    for name in SUBCOMMANDS:
        assert name in found.stdout


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "commands:" in capsys.readouterr().out


def test_a_misspelt_command_or_flag_is_one_line_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, near in (
        (["genrate"], "'generate'"),
        (["generate", "--modle", "x"], "'--model'"),
        (["--versoin"], ""),
    ):
        assert main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and near in shown.err
        assert shown.err.count("\n") == 1 and "Traceback" not in shown.err


def test_json_is_one_strict_document(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_generate(
        folder, "--prompt", "hello", "--prompt", "you", "--n", "2", "--seed", "3", "--max_tokens", "4",
        "--logprobs", "3", "--prompt-logprobs=0", "--temperature", "0.7", "--top-k", "2", "--json",
        "--logprobs-mode", "processed_logprobs", "--ignore-eos",
    )  # fmt: skip
    assert status == 0
    document = read_strictly(capsys.readouterr().out)
    assert (document["model"], document["logprobs_mode"]) == (str(folder), "processed_logprobs")
    assert [output["prompt"] for output in document["outputs"]] == ["hello", "you"]
    for output in document["outputs"]:
        assert output["prompt_logprobs"][0] is None
        assert [row[0]["token_id"] for row in output["prompt_logprobs"][1:]] == output["prompt_token_ids"][1:]
        assert [choice["index"] for choice in output["choices"]] == [0, 1]
        for choice in output["choices"]:
            assert len(choice["token_ids"]) == len(choice["logprobs"]) == 4
            for token_id, row in zip(choice["token_ids"], choice["logprobs"], strict=True):
                assert row[0]["token_id"] == token_id and row[0]["rank"] <= 2
                assert row[2]["logprob"] is None, "what top-k removed is -inf, which JSON can't hold"
            total = sum(row[0]["logprob"] for row in choice["logprobs"])
            assert choice["cumulative_logprob"] == pytest.approx(total)


def test_the_sampling_seed_repeats_an_answer(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for seed in ("5", "5", "6"):
        run_generate(folder, "--prompt", "a", "--max-tokens", "12", "--temperature", "2", "--seed", seed, "--json")
        answers.append(read_strictly(capsys.readouterr().out)["outputs"][0]["choices"][0]["token_ids"])
    assert answers[0] == answers[1] != answers[2]


def test_the_table_has_a_line_a_token_and_compares_the_choices(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run_generate(folder, "--prompt", "hello", "--logprobs", "2", "--n", "2", "--prompt-logprobs", "1") == 0
    shown = capsys.readouterr().out
    for word in ("prompt: hello", "logprob", "prob", "rank", "most likely", "choice 1, cumulative logprob", "choices"):
        assert word in shown


def test_scoring_alone_is_a_table_of_the_prompt(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate(folder, "--prompt", "hello", "--max-tokens", "0", "--prompt-logprobs", "0") == 0
    shown = capsys.readouterr().out
    assert "rank" in shown and "choice" not in shown


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "/nowhere/at/all", "--prompt", "x"], 1, "/nowhere/at/all"),
        (["--prompt", "x"], 2, "model"),
        (["--model", "FOLDER"], 2, "--prompt"),
        (["--model", "FOLDER", "--prompt", "x", "--temperature", "9"], 2, "temperature"),
        (["--model", "FOLDER", "--prompt", "x", "--tensor-parallel-size", "2"], 2, "tensor_parallel_size"),
        (["--model", "FOLDER", "--prompt", "x", "--n", "many"], 2, "--n"),
        (["--model", "FOLDER", "--prompt", ""], 2, "empty"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_without_a_traceback(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    assert main(["generate", *(str(folder) if word == "FOLDER" else word for word in arguments)]) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err and "Traceback" not in shown.err


def test_ctrl_c_is_an_exit_status(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm.entrypoints.llm.LLM.generate", interrupt)
    assert run_generate(folder, "--prompt", "x") == 130


def test_numbers_that_json_lacks_are_null() -> None:
    entries = {5: Logprob(float("-inf"), 1, "a"), 6: Logprob(-1.5, 2, None)}
    assert describe_positions([None, entries]) == [
        None,
        [
            {"token_id": 5, "token": "a", "logprob": None, "rank": 1},
            {"token_id": 6, "token": None, "logprob": -1.5, "rank": 2},
        ],
    ]


def test_an_answer_can_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    row = {5: Logprob(-0.5, 1, "\x1b[2J")}
    choice = CompletionOutput(0, "\x1b[2J[bold]x", [5], -0.5, [row], finish_reason="length")
    tables.print_tables([RequestOutput("0", "\x1b[31mred", [5], [row], [choice, choice], True)])
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown and "\x1b[31m" not in shown
    assert "[bold]x" in shown, "markup in a text is text"
