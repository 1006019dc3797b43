"""Answers as tables for people: a token a line, with its log-probability, its rank and the alternatives."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

MAX_SHOWN_ALTERNATIVES = 8


def print_tables(
    outputs: Sequence[RequestOutput], *, shows_probabilities: bool = True, console: Console | None = None
) -> None:
    """Print the answers. `shows_probabilities` is false where the values are logits."""
    console = console or Console()
    for output in outputs:
        prompt = output.prompt if output.prompt is not None else f"{len(output.prompt_token_ids or ())} token ids"
        console.rule(printable(f"prompt: {prompt}"))
        if output.prompt_logprobs is not None:
            tokens = output.prompt_token_ids or ()
            console.print(make_token_table("prompt", tokens, output.prompt_logprobs, shows_probabilities))
        for choice in output.outputs:
            _print_choice(console, choice, shows_probabilities)
        if len(output.outputs) > 1:
            console.print(make_choice_table(output.outputs))


def make_token_table(title: str, token_ids: Sequence[int], positions: Any, shows_probabilities: bool = True) -> Table:
    """Return the table of one scored sequence."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("token")
    table.add_column("id", justify="right")
    table.add_column("logprob" if shows_probabilities else "logit", justify="right")
    if shows_probabilities:
        table.add_column("prob", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("most likely")
    cells: list[str | Text]
    for place, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
        if position is None:
            cells = [str(place), "—", str(token_id), "—", *(["—"] if shows_probabilities else []), "—", ""]
        else:
            entry = position[token_id]
            probability = [f"{math.exp(entry.logprob):.4f}"] if shows_probabilities else []
            cells = [str(place), _show_token(entry), str(token_id), f"{entry.logprob:.4f}", *probability]
            cells += [str(entry.rank), _show_alternatives(position)]
        table.add_row(*cells)
    return table


def make_choice_table(choices: Sequence[CompletionOutput]) -> Table:
    """Return the table that compares the choices of one prompt."""
    table = Table(title=Text("choices"), title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("cumulative logprob", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("finished by")
    table.add_column("text")
    for choice in choices:
        total = "—" if choice.cumulative_logprob is None else f"{choice.cumulative_logprob:.4f}"
        cells: list[str | Text] = [
            str(choice.index),
            total,
            str(len(choice.token_ids)),
            choice.finish_reason or "",
            printable(choice.text),
        ]
        table.add_row(*cells)
    return table


def _print_choice(console: Console, choice: CompletionOutput, shows_probabilities: bool) -> None:
    if choice.token_ids:
        console.print(printable(choice.text))
    if choice.logprobs is None or not choice.token_ids:
        return
    title = f"choice {choice.index}"
    if choice.cumulative_logprob is not None:
        title += f", cumulative logprob {choice.cumulative_logprob:.4f}"
    console.print(make_token_table(title, choice.token_ids, choice.logprobs, shows_probabilities))


def printable(text: str) -> Text:
    """Return text whose control characters show their names: a model's answer must not steer the terminal."""
    return Text("".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text))


def _show_token(entry: Logprob) -> Text:
    return Text("" if entry.decoded_token is None else repr(entry.decoded_token))


def _show_alternatives(position: Mapping[int, Logprob]) -> Text:
    """Return the row's entries by rank, the chosen one among them; a long row is cut."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    shown = [
        f"{token_id if entry.decoded_token is None else repr(entry.decoded_token)} {entry.logprob:.2f}"
        for token_id, entry in ranked[:MAX_SHOWN_ALTERNATIVES]
    ]
    if len(ranked) > MAX_SHOWN_ALTERNATIVES:
        shown.append(f"… {len(ranked)} in all")
    return Text("  ".join(shown))
