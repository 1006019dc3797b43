"""Score a file on a local model: texts (perplexity) or contexts with choices (accuracy), a line of JSON for each."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from tqdm import tqdm

from vllm.engine.arg_utils import EngineArgs
from vllm.engine.cli_args import check_at_least
from vllm.entrypoints.cli.local_args import make_engine_args
from vllm.entrypoints.llm import LLM
from vllm.entrypoints.scoring.items import JSONL, LINES, WHOLE, SourceLine, find_kind, open_source, read_lines
from vllm.entrypoints.scoring.journal import Journal
from vllm.entrypoints.scoring.line_scorer import LineScorer
from vllm.entrypoints.scoring.pairs import JOINT, TOKENIZATIONS
from vllm.entrypoints.scoring.summary import Summary
from vllm.entrypoints.scoring.windows import check_window
from vllm.exceptions import VLLMValidationError

DEFAULT_BATCH_SIZE = 64  # lines that are scored together, and at most lost by a kill
_MAX_BATCH_BYTES = 1 << 20  # a batch of long lines ends earlier

SUMMARIES = ("table", "json", "none")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags of this sub-command."""
    parser.usage = "%(prog)s FILE --out FILE.jsonl --model MODEL [flags]; --help lists them, docs/scoring.md the schema"
    parser.add_argument("file", metavar="FILE", help=".jsonl, .txt (a text a line) or - (the standard input)")
    group = parser.add_argument_group("scoring")
    group.add_argument("--out", required=True, metavar="FILE", help="an answer a line; what is there already is kept")
    group.add_argument("--overwrite", action="store_true", help="start anew where OUT exists")
    group.add_argument("--format", choices=(JSONL, LINES, WHOLE), help="what FILE holds, in place of its name's ending")
    group.add_argument("--window", type=int, metavar="INT", help="tokens run together (default: the model's length)")
    group.add_argument(
        "--stride", type=int, metavar="INT", help="tokens from one window to the next (default: half a window)"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="INT", help="alternatives of each token (default: 0)")
    group.add_argument("--sums-only", action="store_true", help="leave the values of single tokens out")
    group.add_argument("--tokenization", choices=TOKENIZATIONS, default=JOINT, help="of context and choice")
    group.add_argument(
        "--add-special-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put the model's start token in front of a text (default: yes, where the model has one)",
    )
    group.add_argument("--on-error", choices=("skip", "stop"), default="stop", help="what a bad line does")
    group.add_argument(
        "--batch-size",
        type=int,
        default=DEFAULT_BATCH_SIZE,
        metavar="INT",
        help=f"lines scored and written together (default: {DEFAULT_BATCH_SIZE})",
    )
    group.add_argument("--summary", choices=SUMMARIES, default="table", help="at the end; json: on standard output")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    EngineArgs.add_cli_args(parser, leave_out=("logprobs_mode",))


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status: 0 also where lines were skipped, as the file reports."""
    check_at_least(args, batch_size=1, top_k=0)
    kind = find_kind(args.file, args.format)
    with contextlib.closing(open_source(args.file)) as stream:
        engine_args = make_engine_args(args)
        engine_args.disable_log_stats = True
        with LLM.from_engine_args(engine_args) as llm:
            window, stride = check_window(args.window, args.stride, llm.model_config.max_model_len)
            settings = {
                "format": "vllm-score/1",
                "model": args.model,
                "dtype": llm.llm_engine.engine_core.ready.dtype,
                "source_format": kind,
                "window": window,
                "stride": stride,
                "overlap": window - stride,
                "top_k": args.top_k,
                "sums_only": args.sums_only,
                "tokenization": args.tokenization,
                "add_special_tokens": args.add_special_tokens,
            }
            with contextlib.closing(Journal(args.out, settings, overwrites=args.overwrite)) as journal:
                scorer = LineScorer(llm, settings)
                summary = _score_all(args, read_lines(stream, kind), scorer, journal)
    _show_summary(args, {"out": args.out, **settings, **summary.to_dict()})
    return 0


def _score_all(args: argparse.Namespace, lines: Iterator[SourceLine], scorer: LineScorer, journal: Journal) -> Summary:
    """Go past the lines that are answered, score the others batch by batch; return the totals of all."""
    summary = Summary()
    total = os.path.getsize(args.file) if os.path.isfile(args.file) else None
    with tqdm(total=total, unit="B", unit_scale=True, disable=args.disable_tqdm, file=sys.stderr) as bar:
        for record in journal.read_back():
            line = next(lines, None)
            if line is None or (line.number, line.digest) != (record["line"], record.get("digest")):
                raise VLLMValidationError(
                    f"{args.file} is not what --out {args.out} was made from: they part at line {record['line']}. Name "
                    "another file, or --overwrite it"
                )
            summary.add(record)
            bar.update(line.end - bar.n)
        for batch in _make_batches(lines, args.batch_size):
            scored = scorer.score(batch)
            records = scored.records if args.on_error == "skip" else scored.records_before_bad
            journal.write(records)
            for record in records:
                summary.add(record)
            if scored.first_error is not None and args.on_error == "stop":
                raise VLLMValidationError(f"{args.file}: {scored.first_error}")
            bar.update(batch[-1].end - bar.n)
    return summary


def _make_batches(lines: Iterator[SourceLine], batch_size: int) -> Iterator[list[SourceLine]]:
    batch: list[SourceLine] = []
    num_bytes = 0
    for line in lines:
        batch.append(line)
        num_bytes += len(line.raw)
        if len(batch) == batch_size or num_bytes >= _MAX_BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _show_summary(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    if args.summary == "json":
        print(msgspec.json.encode(summary).decode())
    elif args.summary == "table":
        for name, value in summary.items():
            if value is not None:
                shown = f"{value:.6g}" if isinstance(value, float) else value
                print(f"{name.replace('_', ' '):<22} {shown}", file=sys.stderr)
