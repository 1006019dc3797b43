"""What `vllm chat` and `vllm complete` share: whom they ask, a line from the keyboard, an answer as it comes.

Every answer is a stream of OpenAI's events, from a server somewhere or from the same application in this process.
"""

import argparse
import asyncio
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import uvloop
from rich.console import Console
from rich.text import Text

from vllm import envs
from vllm.entrypoints.cli.local_args import add_local_flags
from vllm.entrypoints.cli.tables import printable
from vllm.entrypoints.http_client import EventReader, HttpClient, Sender, make_key_header
from vllm.exceptions import VLLMError, VLLMValidationError

DEFAULT_URL = "http://127.0.0.1:8000/v1"
INTERRUPTED = 130

# Least probability of a token → how it looks. Rare ones differ by more than their colour.
_STYLES = ((0.9, "green"), (0.5, "cyan"), (0.2, "yellow"), (0.05, "red"), (0.0, "bold underline magenta"))

# flag → the type of its value and what it does; each goes into the request's body as it is
_SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "smallest set of tokens with this much probability"),
    "top_k": (int, "this many most likely tokens; 0: all"),
    "min_p": (float, "tokens at least this likely, relative to the best"),
}


def add_dialogue_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of both sub-commands, and the engine's."""
    group = parser.add_argument_group("whom to ask")
    group.add_argument("--url", help=f"a server (default: {DEFAULT_URL})")
    group.add_argument("--api-key", metavar="KEY", help="the server's key (default: OPENAI_API_KEY or VLLM_API_KEY)")
    group.add_argument("--model-name", metavar="NAME", help="the server's model (default: the first that it lists)")
    group = parser.add_argument_group("answers", "what is not given is left to the model")
    group.add_argument("-q", "--quick", metavar="TEXT", help="ask this, print the answer and leave")
    group.add_argument("--logprobs", action="store_true", help="colour each token by its probability")
    group.add_argument("--max-tokens", type=int, metavar="INT", help="longest answer")
    for name, (kind, help_text) in _SAMPLING_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=help_text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer")
    add_local_flags(parser)


def make_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a request that the flags set."""
    names = ("max_tokens", "seed", "stop", *_SAMPLING_FLAGS)  # --seed is among the engine's flags
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


class Answered(NamedTuple):
    """An answer that was shown."""

    text: str
    logprobs: list[float]


class Dialogue:
    """One model that is asked again and again."""

    def __init__(self, args: argparse.Namespace, *, console: Console | None = None) -> None:
        """Reach the server, or load the model.

        Raises:
            VLLMError: neither is there.
        """
        self._args = args
        self._console = console or Console(highlight=False)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._sender: Sender | None = None
        try:
            self._sender, self._prefix = self._find_sender(args)
            self.model = args.model_name or self._runner.run(_find_model(self._sender, self._prefix))
        except BaseException:
            self.close()
            raise

    def _find_sender(self, args: argparse.Namespace) -> tuple[Sender, str]:
        has_model = bool(getattr(args, "model", None))
        if has_model and args.url:
            raise VLLMValidationError("--url and --model say two things: a server somewhere, or a model loaded here")
        if has_model:
            module = importlib.import_module("vllm.entrypoints.cli.local_server")  # the engine's front end
            return module.LocalServer(args), "/v1"
        key = args.api_key or envs.openai_api_key() or envs.api_key()
        url = (args.url or DEFAULT_URL).rstrip("/")
        return HttpClient(url, headers=make_key_header(key)), "" if url.endswith("/v1") else "/v1"

    def ask(self, path: str, body: Mapping[str, Any]) -> Answered:
        """Stream an answer to the screen. Ctrl-C ends it; what came is kept, and KeyboardInterrupt raised.

        Raises:
            VLLMError: the server refuses, or the stream breaks.
        """
        assert self._sender is not None
        shown = _Shown(self._console, self._args.logprobs)
        try:
            self._runner.run(_stream(self._sender, self._prefix + path, {"model": self.model, **body}, shown))
        finally:
            shown.finish()
        return Answered("".join(shown.texts), shown.logprobs)

    def say(self, text: str) -> None:
        """Print something that is not an answer."""
        self._console.print(printable(text), style="dim")

    def close(self) -> None:
        """Close the connections, or end the engine."""
        if self._sender is not None:
            self._runner.run(self._sender.close())
            self._sender = None
        self._runner.close()

    def __enter__(self) -> "Dialogue":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def hold_dialogue(
    args: argparse.Namespace, greeting: str, make_answer: Callable[[Dialogue], Callable[[str], None]]
) -> int:
    """Answer `--quick`, or line after line until the input ends, and return the exit status.

    `make_answer` gets the dialogue and returns what answers one line. Ctrl-C ends an answer, or at the prompt the
    dialogue; a refusal of one line is shown and the next one read.
    """
    with Dialogue(args) as dialogue:
        answer = make_answer(dialogue)
        if args.quick is not None:
            answer(args.quick)
            return 0
        is_typed = sys.stdin.isatty()
        if is_typed:
            dialogue.say(f"{dialogue.model} — {greeting}")
        status = 0
        for line in read_lines(is_typed):
            try:
                answer(line)
            except KeyboardInterrupt:
                if not is_typed:
                    raise
                dialogue.say("(interrupted)")
            except VLLMError as error:
                print(f"vllm: {error}", file=sys.stderr)
                status = 0 if is_typed else 1
        return status


def read_lines(is_typed: bool) -> Iterator[str]:
    """Yield the lines of the input that hold something, until it ends."""
    if is_typed:
        importlib.import_module("readline")  # arrow keys and history, by being there
    while True:
        try:
            line = input("> " if is_typed else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print()
            return
        if line.strip():
            yield line


async def _find_model(sender: Sender, prefix: str) -> str:
    answer = await sender.send("GET", f"{prefix}/models")
    if not answer.is_ok:
        raise VLLMValidationError(f"the server does not list its models: {answer.describe_refusal()}")
    try:
        return str(msgspec.json.decode(answer.body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise VLLMValidationError("the server lists no models; give --model-name") from None


async def _stream(sender: Sender, path: str, body: Mapping[str, Any], shown: "_Shown") -> None:
    events = EventReader(shown.take_event)
    answer = await sender.send("POST", path, {**body, "stream": True}, on_data=events.feed)
    if not answer.is_ok:
        raise VLLMValidationError(answer.describe_refusal())
    if shown.error:
        raise VLLMError(shown.error)


class _Shown:
    """One answer on the screen, as it grows."""

    def __init__(self, console: Console, has_colours: bool) -> None:
        self._console = console
        self._has_colours = has_colours
        self.texts: list[str] = []
        self.logprobs: list[float] = []
        self.error = ""

    def take_event(self, data: bytes, _: float) -> None:
        """Show what one event adds."""
        if data == b"[DONE]":
            return
        event = msgspec.json.decode(data)
        if error := event.get("error"):
            self.error = str(error.get("message") if isinstance(error, dict) else error)
            return
        for choice in event.get("choices") or ():
            text = (choice.get("delta") or {}).get("content") if "delta" in choice else choice.get("text")
            tokens = read_tokens(choice.get("logprobs"))
            self.logprobs += [logprob for _, logprob in tokens]
            self.texts.append(text or "")
            self._console.print(
                colour(text or "", tokens) if self._has_colours else printable(text or ""), end="", soft_wrap=True
            )

    def finish(self) -> None:
        """End the answer's line, and say what it cost."""
        if self.texts:
            self._console.print()
        if self._has_colours and self.logprobs:
            total = sum(self.logprobs)
            perplexity = math.exp(min(700.0, -total / len(self.logprobs)))
            note = f"{len(self.logprobs)} tokens, cumulative logprob {total:.2f}, perplexity {perplexity:.2f}   "
            legend = Text(note, style="dim")
            for least, style in _STYLES:
                legend.append(f"≥{least:g}" if least else f"<{_STYLES[-2][0]:g}", style=style).append(" ")
            self._console.print(legend)


def read_tokens(logprobs: Mapping[str, Any] | None) -> list[tuple[str, float]]:
    """Return the tokens of an event with their logprobs, in the form of completions or that of chats."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"] or ()]
    values = logprobs.get("token_logprobs") or ()
    pairs = zip(logprobs.get("tokens") or (), values, strict=False)
    return [(token, value) for token, value in pairs if value is not None]


def colour(text: str, tokens: list[tuple[str, float]]) -> Text:
    """Return the text with each token in the style of its probability.

    Where the tokens don't spell the text (a character that took several, a stop string that was cut off) all of it has
    the style of the least likely one.
    """
    if not tokens:
        return printable(text)
    if "".join(token for token, _ in tokens) != text:
        tokens = [(text, min(logprob for _, logprob in tokens))]
    shown = Text()
    for token, logprob in tokens:
        part = printable(token)
        part.stylize(find_style(logprob))
        shown.append_text(part)
    return shown


def find_style(logprob: float) -> str:
    """Return how a token of this logprob looks."""
    probability = math.exp(min(0.0, logprob))
    return next(style for least, style in _STYLES if probability >= least)
