"""docs/architecture.md says what each file is for, every folder of code is a package, and links lead somewhere."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_architecture_page_holds_each_files_clause() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / ".ci" / "architecture_tree.py", "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


def test_every_folder_with_code_is_a_package() -> None:
    folders = {p.parent for p in (ROOT / "vllm").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_docs_link_to_files_that_exist() -> None:
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for part in page.read_text().split("](")[1:]:
            target = part.split(")", 1)[0].split("#", 1)[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
