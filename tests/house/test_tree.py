"""docs/architecture.md names each file of the package, and every folder of it is a package."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_source_file_has_its_clause_in_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    files = [p for p in sorted((ROOT / "vllm").rglob("*.py")) if p.name != "__init__.py"]
    missing = [str(p.relative_to(ROOT)) for p in files if f"`{p.name}`" not in page and f"/{p.name}`" not in page]
    assert missing == []


def test_every_folder_with_code_is_a_package() -> None:
    folders = {p.parent for p in (ROOT / "vllm").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_docs_link_to_files_that_exist() -> None:
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for part in page.read_text().split("](")[1:]:
            target = part.split(")", 1)[0].split("#", 1)[0]
            if target and "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
