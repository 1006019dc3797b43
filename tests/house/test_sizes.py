"""Files and functions stay small enough to read."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
SOURCES = sorted(
    [*(ROOT / "vllm").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]pp"), *(ROOT / "benchmarks").rglob("*.py")]
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_stays_under_its_size(path: pathlib.Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines < MAX_FILE_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it by reason"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.suffix == ".py"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_function_fits_on_a_screen(path: pathlib.Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines < MAX_FUNCTION_LINES, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"
