"""What the benchmarks ask for."""

import argparse
import json
import pathlib
from typing import Any, Literal

import pytest

from tests.tiny_tokenizers import write_tiny_tokenizer
from vllm.benchmarks.datasets import SampleRequest, add_dataset_flags, check_dataset_flags, make_requests
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import Tokenizer, load_tokenizer


def make_tokenizer(folder: pathlib.Path, kind: Literal["byte_level", "metaspace"] = "byte_level") -> Tokenizer:
    write_tiny_tokenizer(folder, kind=kind)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def read_flags(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_dataset_flags(parser)
    args = parser.parse_args(flags)
    check_dataset_flags(args)
    return args


def sample(tokenizer: Tokenizer | None, *flags: str, seed: int = 0, **options: Any) -> list[SampleRequest]:
    return make_requests(read_flags(*flags), tokenizer, seed=seed, **options)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_random_texts_have_exactly_the_tokens_asked_for(
    tmp_path: pathlib.Path, kind: Literal["byte_level", "metaspace"]
) -> None:
    own = make_tokenizer(tmp_path, kind)
    requests = sample(own, "--num-prompts", "20", "--input-len", "50", "--output-len", "7")
    assert len({request.prompt for request in requests}) == 20
    for request in requests:
        assert isinstance(request.prompt, str)
        assert len(own.encode(request.prompt)) == request.prompt_len == 50, "with the tokens that the server adds"
        assert request.output_len == 7


def test_lengths_vary_by_the_ratio(tokenizer: Tokenizer) -> None:
    flags = (
        "--num-prompts",
        "60",
        "--random-input-len",
        "20",
        "--random-output-len",
        "10",
        "--random-range-ratio",
        ".5",
    )
    requests = sample(tokenizer, *flags)
    assert {request.prompt_len for request in requests} <= set(range(10, 31))
    outputs = {request.output_len for request in requests}
    assert outputs <= set(range(5, 16)) and len(outputs) > 5


def test_a_prefix_is_shared_and_comes_on_top(tokenizer: Tokenizer) -> None:
    flags = ("--num-prompts", "4", "--input-len", "6", "--random-prefix-len", "32")
    requests = sample(tokenizer, *flags, as_token_ids=True)
    assert len({tuple(request.prompt[:32]) for request in requests}) == 1
    assert len({tuple(request.prompt) for request in requests}) == 4
    assert {request.prompt_len for request in requests} == {38}


def test_a_seed_repeats_the_prompts(tokenizer: Tokenizer) -> None:
    flags = ("--num-prompts", "3", "--input-len", "9", "--random-range-ratio", "0.3")
    assert sample(tokenizer, *flags, seed=5) == sample(tokenizer, *flags, seed=5) != sample(tokenizer, *flags, seed=6)


def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    for request in sample(None, "--num-prompts", "3", "--input-len", "12"):
        assert isinstance(request.prompt, list) and len(request.prompt) == 12 and max(request.prompt) < 256


def write_sharegpt(path: pathlib.Path, pairs: list[tuple[str, str]]) -> str:
    turns = [[{"from": "human", "value": a}, {"from": "gpt", "value": b}] for a, b in pairs]
    path.write_text(json.dumps([*({"conversations": turn} for turn in turns), {"conversations": turns[0][:1]}]))
    return str(path)


def test_conversations_are_asked_at_the_length_of_their_answers(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    question, answer = "what is the way to go", "you can see that it is not there"
    path = write_sharegpt(
        tmp_path / "s.json", [(question, answer), ("hi", answer), ("the " * 5000, answer), (answer, "a")]
    )
    flags = ("--dataset-name", "sharegpt", "--dataset-path", path, "--num-prompts", "5")
    requests = sample(tokenizer, *flags)
    assert len(requests) == 5, "a small file comes again"
    for request in requests:
        assert request == SampleRequest(question, len(tokenizer.encode(question)), len(tokenizer.encode(answer)))
    fixed = sample(tokenizer, *flags, "--sharegpt-output-len", "3")
    assert {request.output_len for request in fixed} == {3}
    assert {request.prompt for request in fixed} == {question, answer}, "a given length lets short answers in"
    with pytest.raises(VLLMValidationError, match="tokenizer"):
        sample(None, *flags)


def test_a_file_of_one_s_own(tmp_path: pathlib.Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "the way", "output_tokens": 5}\n\n{"prompt": [4, 5, 6]}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(path))
    found = sample(tokenizer, *flags, "--num-prompts", "4")
    wanted = [SampleRequest("the way", len(tokenizer.encode("the way")), 5), SampleRequest([4, 5, 6], 3, 256)]
    assert sorted(found, key=str) == sorted(wanted * 2, key=str)
    assert sample(None, *flags, "--num-prompts", "9", "--custom-output-len", "-1").count(
        SampleRequest([4, 5, 6], 3, None)
    ) in (4, 5)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("custom", "{", "line 1 is not JSON"),
        ("custom", '{"prompt": "a"}\n{"prompt": [1, "b"]}', "line 2"),
        ("custom", '{"text": "a"}', "line 1"),
        ("custom", '{"prompt": "a", "output_tokens": "5"}', "output_tokens"),
        ("custom", "\n", "no prompt"),
        ("sharegpt", "[]", "no prompt"),
        ("sharegpt", '{"a": 1}', "ShareGPT"),
        ("sharegpt", "x", "ShareGPT"),
        ("sharegpt", None, "can't be read"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: pathlib.Path, tokenizer: Tokenizer, name: str, content: str | None, words: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(VLLMValidationError, match=words):
        sample(tokenizer, "--dataset-name", name, "--dataset-path", str(path))


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-prompts", "0"),
        ("--input-len", "0"),
        ("--random-range-ratio", "1"),
        ("--dataset-name", "custom"),
        ("--dataset-path", "x"),
    ],
)
def test_flags_that_contradict_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(VLLMValidationError, match="--"):
        read_flags(*flags)
