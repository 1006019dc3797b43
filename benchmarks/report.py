"""What the benchmarks share: a table on the screen, a JSON file, and what machine it was."""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from vllm import platforms


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file too")


def describe_machine() -> dict[str, object]:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    flags = platforms.get_cpu_flags()
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "simd": [flag for flag in ("avx2", "avx512f", "avx512_bf16") if flag in flags],
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    path: pathlib.Path | None,
    details: object = None,
) -> None:
    """Print a table, and write it with the machine's description, and details, as JSON when asked to."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=160).print(table)
    if path is not None:
        figures = [dict(zip(columns, row, strict=True)) for row in rows]
        report = {"title": title, "machine": describe_machine(), "rows": figures}
        if details is not None:
            report["details"] = details
        path.write_text(json.dumps(report, indent=1))
