"""Rewrites the tree in docs/architecture.md: each source file with the first sentence of its docstring or head comment.

    python .ci/architecture_tree.py [--check]

With --check nothing is written; the exit status says whether the page is up to date.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- tree: make format keeps it -->", "<!-- end of the tree -->"


def read_clause(path: pathlib.Path) -> str:
    """Return the first paragraph of what a file says about itself, as one line, up to its first full stop."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = text.splitlines()
        end = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
        text = " ".join(line[2:].strip() for line in lines[:end])
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!])\s+(?=[A-Z`])", paragraph)[0]
    return sentence.rstrip(".").replace("|", "\\|")


def make_tree() -> str:
    """Return the tables, a folder each, in alphabetical order."""
    sources = [*(ROOT / "vllm").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    folders: dict[str, list[pathlib.Path]] = {}
    for path in sorted(sources):
        if path.name != "__init__.py":
            folders.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)
    parts = []
    for folder, files in sorted(folders.items()):
        rows = "\n".join(f"| `{path.name}` | {read_clause(path)} |" for path in files)
        parts.append(f"**{folder}/**\n\n| file | what it holds |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def main() -> None:
    page = PAGE.read_text()
    head, rest = page.split(START)
    fresh = f"{head}{START}\n\n{make_tree()}\n{END}{rest.split(END)[1]}"
    if "--check" in sys.argv:
        sys.exit(0 if fresh == page else "docs/architecture.md: the tree is out of date (make format)")
    PAGE.write_text(fresh)


if __name__ == "__main__":
    main()
