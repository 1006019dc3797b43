"""What the benchmarks ask for: random tokens, a file of conversations (ShareGPT's form), or a file of one's own."""

import argparse
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vllm.engine.cli_args import check_at_least
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import Tokenizer

DATASET_NAMES = ("random", "sharegpt", "custom")
DEFAULT_INPUT_LEN = 1024
DEFAULT_OUTPUT_LEN = 128
DEFAULT_CUSTOM_OUTPUT_LEN = 256

# Which of ShareGPT's turns are left out: the usual bounds, so that figures compare.
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048

# Without a tokenizer: ids that every vocabulary holds, past the first ones, which are often special.
_SAFE_IDS = range(16, 256)

_MAX_ROUNDS = 10  # of mending a random text whose length came out wrong
_PLAIN_WORD = re.compile(rb" [a-zA-Z]+")
_MIN_PLAIN_WORDS = 64


class SampleRequest(NamedTuple):
    """One request of a benchmark."""

    prompt: str | list[int]
    prompt_len: int  # tokens, as far as the tokenizer here knows
    output_len: int | None  # None: as long as the server likes


def add_dataset_flags(parser: argparse.ArgumentParser, *, num_prompts: int = 1000) -> None:
    """Give `parser` the flags that say what is asked for."""
    group = parser.add_argument_group("what is asked for")
    group.add_argument("--dataset-name", choices=DATASET_NAMES, default="random", help="(default: random)")
    group.add_argument(
        "--dataset-path", metavar="FILE", help="sharegpt: JSON; custom: a JSON object with prompt a line"
    )
    group.add_argument(
        "--num-prompts", type=int, default=num_prompts, metavar="INT", help=f"requests (default: {num_prompts})"
    )
    group.add_argument("--input-len", type=int, metavar="INT", help="random: tokens of a prompt")
    group.add_argument("--output-len", type=int, metavar="INT", help="tokens of an answer")
    group.add_argument("--random-input-len", type=int, metavar="INT", help=f"(default: {DEFAULT_INPUT_LEN})")
    group.add_argument("--random-output-len", type=int, metavar="INT", help=f"(default: {DEFAULT_OUTPUT_LEN})")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are drawn from (1 - R) to (1 + R) times the given ones (default: 0)",
    )
    group.add_argument(
        "--random-prefix-len", "--prefix-len", type=int, default=0, metavar="INT", help="tokens that all prompts share"
    )
    group.add_argument("--sharegpt-output-len", type=int, metavar="INT", help="in place of the real answers' lengths")
    group.add_argument(
        "--custom-output-len",
        type=int,
        metavar="INT",
        help=f"where a line has no output_tokens; -1: the server's choice (default: {DEFAULT_CUSTOM_OUTPUT_LEN})",
    )


def check_dataset_flags(args: argparse.Namespace) -> None:
    """Raise for flags that contradict each other.

    Raises:
        VLLMValidationError: it names the flag.
    """
    if not 0 <= args.random_range_ratio < 1:
        raise VLLMValidationError(f"--random-range-ratio must be at least 0 and below 1; got {args.random_range_ratio}")
    check_at_least(args, num_prompts=1, input_len=1, random_input_len=1, random_prefix_len=0)
    check_at_least(args, output_len=1, random_output_len=1, sharegpt_output_len=1)
    if args.dataset_name != "random" and not args.dataset_path:
        raise VLLMValidationError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    if args.dataset_name == "random" and args.dataset_path:
        raise VLLMValidationError("--dataset-path is of no use to random prompts; which --dataset-name?")


def make_requests(
    args: argparse.Namespace, tokenizer: Tokenizer | None, *, seed: int, as_token_ids: bool = False
) -> list[SampleRequest]:
    """Return the requests that the flags describe; the same for the same seed.

    Random prompts are texts that have the wanted number of tokens, or token ids with `as_token_ids` and without a
    tokenizer.

    Raises:
        VLLMValidationError: a file can't be read, or holds nothing that fits.
    """
    rng = np.random.default_rng(seed)
    if args.dataset_name == "random":
        return _make_random(args, tokenizer, rng, as_token_ids)
    path = pathlib.Path(args.dataset_path)
    found = _read_sharegpt(path, args, tokenizer) if args.dataset_name == "sharegpt" else _read_custom(path, args)
    return [_with_length(request, tokenizer) for request in _take(found, args.num_prompts, rng)]


# ---------------------------------------------------------------- random


def _make_random(
    args: argparse.Namespace, tokenizer: Tokenizer | None, rng: np.random.Generator, as_token_ids: bool
) -> list[SampleRequest]:
    input_len = args.input_len or args.random_input_len or DEFAULT_INPUT_LEN
    output_len = args.output_len or args.random_output_len or DEFAULT_OUTPUT_LEN
    input_lens = _draw_lengths(input_len, args.random_range_ratio, args.num_prompts, rng)
    output_lens = _draw_lengths(output_len, args.random_range_ratio, args.num_prompts, rng)
    pool = np.asarray(_SAFE_IDS) if tokenizer is None else find_plain_tokens(tokenizer)
    prefix = rng.choice(pool, args.random_prefix_len).tolist()
    requests = []
    for own_len, wanted_output in zip(input_lens, output_lens, strict=True):
        ids = prefix + rng.choice(pool, own_len).tolist()
        if tokenizer is None or as_token_ids:
            requests.append(SampleRequest(ids, len(ids), wanted_output))
        else:
            text, length = make_text(ids, tokenizer, pool, rng)
            requests.append(SampleRequest(text, length, wanted_output))
    return requests


def _draw_lengths(length: int, ratio: float, num: int, rng: np.random.Generator) -> list[int]:
    low, high = max(1, int(length * (1 - ratio))), int(np.ceil(length * (1 + ratio)))
    drawn: list[int] = rng.integers(low, high + 1, num).tolist()
    return drawn


def find_plain_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Return ids whose text, put together, becomes the same tokens again: words that begin with a space.

    A vocabulary without enough of them gives all tokens that are whole characters.
    """
    token_bytes = tokenizer.token_bytes
    ids = sorted(set(tokenizer.get_vocab().values()) - tokenizer.all_special_ids)
    words = [token_id for token_id in ids if _PLAIN_WORD.fullmatch(token_bytes[token_id])]
    if len(words) < _MIN_PLAIN_WORDS:
        words = [token_id for token_id in ids if _is_printable(token_bytes[token_id])]
    if not words:
        raise VLLMValidationError("this tokenizer has no tokens to make random prompts of; use --skip-tokenizer-init")
    return np.asarray(words)


def _is_printable(data: bytes) -> bool:
    try:
        return bool(data) and data.decode().isprintable()
    except UnicodeDecodeError:
        return False


def make_text(ids: Sequence[int], tokenizer: Tokenizer, pool: np.ndarray, rng: np.random.Generator) -> tuple[str, int]:
    """Return a text of `len(ids)` tokens that begins like `ids`, and how many tokens it really has.

    The tokens that the tokenizer puts around every text count: the server will put them there.
    """
    wanted = len(ids)
    own = list(ids[: wanted - len(tokenizer.encode(""))])
    text, length = "", 0
    for _ in range(_MAX_ROUNDS):
        text = tokenizer.decode(own)
        length = len(tokenizer.encode(text))
        if length == wanted or not own:
            break
        if length > wanted:  # cut what is there now: another cut of the same text might not end
            own = tokenizer.encode(text, add_special_tokens=False)
            own = own[: max(1, len(own) - (length - wanted))]
        else:
            own += rng.choice(pool, wanted - length).tolist()
    return text, length


# ---------------------------------------------------------------- files


def _read_sharegpt(path: pathlib.Path, args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[SampleRequest]:
    """Return each conversation's first message, to be answered at the length of the real answer."""
    if tokenizer is None:
        raise VLLMValidationError("--dataset-name sharegpt needs a tokenizer to know the lengths; give --tokenizer")
    try:
        document = json.loads(_read_text(path))
        turns = [entry.get("conversations") or entry.get("conversation") or [] for entry in document]
        pairs = [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in turns if len(turn) >= 2]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise VLLMValidationError(f"{path} is not ShareGPT's form (a list of conversations): {error}") from None
    fixed = args.output_len or args.sharegpt_output_len
    requests = []
    for question, answer in pairs:
        prompt_len = len(tokenizer.encode(question))
        answer_len = fixed or len(tokenizer.encode(answer, add_special_tokens=False))
        is_long = prompt_len > _MAX_PROMPT_TOKENS or prompt_len + answer_len > _MAX_TOTAL_TOKENS
        is_short = prompt_len < _MIN_TOKENS or (fixed is None and answer_len < _MIN_TOKENS)
        if not (is_long or is_short):
            requests.append(SampleRequest(question, prompt_len, answer_len))
    return _some(requests, path)


def _read_custom(path: pathlib.Path, args: argparse.Namespace) -> list[SampleRequest]:
    """Return a request a line: {"prompt": text or token ids, "output_tokens": a number if you like}."""
    given = args.output_len or args.custom_output_len or DEFAULT_CUSTOM_OUTPUT_LEN
    requests = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise VLLMValidationError(f"{path}, line {number} is not JSON: {error}") from None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        is_ids = isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise VLLMValidationError(f'{path}, line {number} must be like {{"prompt": "a text, or token ids"}}')
        output_len = entry.get("output_tokens", given)
        if type(output_len) is not int:
            raise VLLMValidationError(f"{path}, line {number}: output_tokens must be a whole number")
        requests.append(SampleRequest(prompt, 0, output_len if output_len > 0 else None))
    return _some(requests, path)


def _some(requests: list[SampleRequest], path: pathlib.Path) -> list[SampleRequest]:
    if not requests:
        raise VLLMValidationError(f"{path} holds no prompt that fits")
    return requests


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VLLMValidationError(f"--dataset-path: {path} can't be read: {error}") from None


def _take(requests: list[SampleRequest], num: int, rng: np.random.Generator) -> Iterator[SampleRequest]:
    """Yield `num` of the requests in random order; where there are fewer, each comes again before any a third time."""
    taken = 0
    while taken < num:
        for place in rng.permutation(len(requests))[: num - taken]:
            yield requests[place]
            taken += 1


def _with_length(request: SampleRequest, tokenizer: Tokenizer | None) -> SampleRequest:
    if request.prompt_len or isinstance(request.prompt, list):
        return request._replace(prompt_len=request.prompt_len or len(request.prompt))
    length = len(tokenizer.encode(request.prompt)) if tokenizer is not None else 0
    return request._replace(prompt_len=length)
