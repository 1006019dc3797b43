"""lm-eval, unmodified: its numbers with this engine are those that it gets from transformers in float32."""

import json
import pathlib
from typing import Any

import pytest

from tests.clients.programs import MAX_MODEL_LEN, run_program
from tests.entrypoints.openai.client import Client
from vllm.tokenizers.loader import load_tokenizer

pytestmark = pytest.mark.timeout(1800)  # three runs, each with its own imports of everything

TASKS = ("clients_choose", "clients_last_word", "clients_whole_text", "clients_continue")
TASK_FOLDER = pathlib.Path(__file__).parent / "tasks"
WINDOW = MAX_MODEL_LEN - 2  # what lm-eval scores at a time with a model of this length: it keeps two places free

Samples = dict[str, list[dict[str, Any]]]


def evaluate(model: str, arguments: str, batch_size: str, folder: pathlib.Path) -> Samples:
    """Run all tasks on one of lm-eval's models and return its samples by task, in the documents' order."""
    folder.mkdir()
    words = ["--model", model, "--model_args", arguments, "--batch_size", batch_size]
    words += ["--tasks", *TASKS, "--include_path", str(TASK_FOLDER), "--output_path", str(folder), "--log_samples"]
    said = run_program("lm_eval", "run", *words, folder=folder)
    samples = {}
    for task in TASKS:
        (path,) = folder.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda line: line["doc_id"])
        assert samples[task], said
    return samples


@pytest.fixture(scope="module")
def reference(smollm2_folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    arguments = f"pretrained={smollm2_folder},dtype=float32,max_length={WINDOW}"
    return evaluate("hf", arguments, "1", tmp_path_factory.mktemp("hf") / "run")


def assert_same_answers(samples: Samples, reference: Samples, folder: pathlib.Path) -> None:
    tokenizer = load_tokenizer(folder)
    num_values = 0
    for task in TASKS:
        for ours, theirs in zip(samples[task], reference[task], strict=True):
            assert ours["arguments"].keys() == theirs["arguments"].keys()
            for i, request in enumerate(theirs["arguments"].values()):
                one, other = ours["resps"][i][0], theirs["resps"][i][0]
                if task == "clients_continue":
                    assert one == other
                    continue
                # A loglikelihood is a pair with "is it what greedy decoding says"; a rolling one is a number.
                if isinstance(other, list):
                    assert one[1] == other[1], request
                    one, other = one[0], other[0]
                length = len(tokenizer.encode(list(request.values())[-1], add_special_tokens=False))
                assert abs(float(one) - float(other)) <= 1e-3 * max(1, length), request
                num_values += 1
        for metric in ("acc", "acc_norm", "exact_match"):
            assert [s.get(metric) for s in samples[task]] == [s.get(metric) for s in reference[task]], (task, metric)
    assert num_values == 17 + 4 + 3, "the tasks hold so many choices, endings and texts"


def test_in_this_process(reference: Samples, smollm2_folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments = f"pretrained={smollm2_folder},dtype=float32,max_model_len={MAX_MODEL_LEN}"
    samples = evaluate("vllm", arguments, "auto", tmp_path / "run")
    assert_same_answers(samples, reference, smollm2_folder)


def test_over_http(
    reference: Samples, model_server: Client, smollm2_folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    url = f"http://{model_server.host}:{model_server.port}/v1/completions"
    arguments = f"model=smol,base_url={url},tokenizer_backend=huggingface,tokenizer={smollm2_folder}"
    samples = evaluate("local-completions", f"{arguments},max_length={MAX_MODEL_LEN}", "1", tmp_path / "run")
    assert_same_answers(samples, reference, smollm2_folder)
