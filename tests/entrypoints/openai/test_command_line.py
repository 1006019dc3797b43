"""`vllm serve` before a model is loaded: flags, their file, and what stops it in one line."""

import argparse
import pathlib
import socket
from collections.abc import Iterator

import pytest

from vllm.engine.cli_args import with_dashes
from vllm.entrypoints.cli import main as cli
from vllm.entrypoints.openai.api_server import bind_unix_listener
from vllm.entrypoints.openai.cli_args import add_serve_args, read_chat_template, with_defaults
from vllm.exceptions import VLLMValidationError


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Iterator[object]:
    def run_command(*argv: str) -> tuple[int, str]:
        status = cli.main(["serve", *argv])
        return status, capfd.readouterr().err

    yield run_command


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_args(parser)
    return with_defaults(parser.parse_args(with_dashes(list(argv))))


def test_the_server_listens_to_this_machine_only_unless_told() -> None:
    args = parse("M")
    assert (args.host, args.port, args.model) == ("127.0.0.1", 8000, "M")
    assert args.enable_tokenizer_info_endpoint and not args.trust_request_chat_template


def test_underscores_and_several_values_are_read() -> None:
    args = parse("M", "--max_model_len", "1k", "--served-model-name", "a", "b/c", "--api-key", "k1", "--api-key", "k2")
    assert args.max_model_len == "1k" and args.served_model_name == ["a", "b/c"] and args.api_key == ["k1", "k2"]


def test_flags_from_a_file_stand_behind_those_of_the_command_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: M\nport: 9000\nmax_model_len: 16k\nserved-model-name: [a, b]\nenable-prefix-caching: false\n"
        "enable_prompt_tokens_details: true\nenable-tokenizer-info-endpoint: false\ndownload_dir: null\n"
        'override-generation-config: {"temperature": 0.5}\n'
    )
    for argv in (["--port", "9001", "--config", str(path)], ["--config", str(path), "--port", "9001"]):
        args = parse(*argv)
        assert args.port == 9001 and args.max_model_len == "16k" and args.served_model_name == ["a", "b"]
        assert args.enable_prefix_caching is False and args.enable_prompt_tokens_details is True
        assert args.enable_tokenizer_info_endpoint is False and args.override_generation_config == {"temperature": 0.5}
        assert args.model == "M"
    assert parse("--config", str(path), "--served-model-name", "c").served_model_name == ["c"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 9", "did you mean 'port'"),
        ("- a", "must hold flags"),
        ("a: [", "can't be read"),
        (None, "can't be read"),
    ],
)
def test_a_bad_file_is_told_in_one_line(run: object, tmp_path: pathlib.Path, content: str | None, words: str) -> None:
    path = tmp_path / "serve.yaml"
    if content is not None:
        path.write_text(content)
    status, said = run("M", "--config", str(path))  # type: ignore[operator]
    assert status == 2 and words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["M", "--prot", "1"], "unknown argument '--prot'; did you mean '--port'?"),
        ([], "which model?"),
        (["M", "--model", "N"], "two models"),
        (["M", "--port", "70000"], "at most 65535"),
        (["M", "--enable-auto-tool-choice"], "--enable-auto-tool-choice is not supported"),
        (["M", "-asc", "2"], "--api-server-count is not supported"),
        (["M", "--ssl-keyfile", "/none"], "belong together"),
        (["M", "--ssl-keyfile", "/none", "--ssl-certfile", "/none"], "there is no file /none"),
        (["M", "--chat-template", "/none.jinja"], "--chat-template: /none.jinja can't be read"),
        (["M", "--host", "not.an.address.invalid", "--port", "0"], "--host not.an.address.invalid"),
        (["/there/is/no/model", "--port", "0"], "/there/is/no/model"),
        (["M", "-tp", "2", "--port", "0"], "tensor_parallel_size is not supported"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_can_not_work_stops_in_one_line(run: object, argv: list[str], words: str) -> None:
    status, said = run(*argv)  # type: ignore[operator]
    assert status != 0 and words in said
    assert len(said.strip().splitlines()) == 1 and "Traceback" not in said


def test_a_busy_port_stops_before_the_model_loads(run: object) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        status, said = run("/there/is/no/model", "--port", str(other.getsockname()[1]))  # type: ignore[operator]
    assert status == 2 and "can't listen" in said and "choose another --port" in said and said.count("\n") == 1


def test_a_unix_socket_is_taken_over_from_the_dead_only(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "s")
    bind_unix_listener(path).close()
    with bind_unix_listener(path) as live:
        live.listen()
        with pytest.raises(VLLMValidationError, match="another server"):
            bind_unix_listener(path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(VLLMValidationError):
        bind_unix_listener(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"


def test_a_chat_template_is_a_file_or_the_text_itself(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    assert read_chat_template(str(path)) == read_chat_template("{{ messages }}") == "{{ messages }}"
    assert read_chat_template(None) is None
    with pytest.raises(VLLMValidationError):
        read_chat_template(str(tmp_path / "none"))
