"""The import rule of docs/architecture.md, read from the source with `ast` (lazy and TYPE_CHECKING imports too)."""

import ast
import pathlib
import re
from collections.abc import Iterable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm"

# The first prefix that matches gives a file's layer. A file may import its own layer or a lower one.
LAYERS: list[tuple[str, int]] = [
    ("vllm.entrypoints", 6),
    ("vllm.benchmarks", 6),
    ("vllm.v1.engine", 5),
    ("vllm.engine", 5),
    ("vllm.v1.core", 4),
    ("vllm.v1.metrics", 4),
    ("vllm.v1.executor", 3),
    ("vllm.v1.worker", 3),
    ("vllm.v1.sample", 2),
    ("vllm.v1.attention", 2),
    ("vllm.model_executor", 2),
    ("vllm.renderers", 2),
    ("vllm._custom_ops", 1),
    ("vllm.ops", 1),
    ("vllm.tokenizers", 1),
    ("vllm.checkpoints", 1),
    ("vllm", 0),
]

# Upward imports that stand, each with its reason.
UPWARD_EXCEPTIONS: dict[tuple[str, str], str] = {}

# Folders that run on either side of the core / worker boundary and never import each other.
STRANGERS = [("vllm.v1.core", "vllm.v1.worker"), ("vllm.v1.core", "vllm.v1.executor")]

TORCH_ALLOWED_LAYERS = {1, 2, 3}
TORCH_ALLOWED_FILES = {"vllm.v1.outputs": "what stays on the device", "vllm.platforms": "asks torch for CUDA, lazily"}
TORCH_FORBIDDEN_PREFIXES = (
    "vllm.tokenizers",
    "vllm.checkpoints",
    "vllm.model_executor.families",  # the front end reads configurations
    "vllm.model_executor.models.registry",
)

# The ops one by one, and programs of them: recorded from modules, run in one call.
OPS_ENTRY_POINTS = {"vllm.ops.api", "vllm.ops.program", "vllm.ops.program_recorder", "vllm.ops.compiled_program"}

# Imports inside functions that stand, each with its reason.
LAZY_EXCEPTIONS: dict[str, str] = {
    "vllm": "public names load on first use",
    "vllm.platforms": "the front end imports this file and never loads torch",
}

# Edges of circles that stand, each with its reason.
CIRCLE_EXCEPTIONS: dict[tuple[str, str], str] = {
    ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"): "run by `python -m`, it is `vllm serve`",
}
# What names all modules, and may: public names load on first use.
NAMES_EVERYTHING = {"vllm"}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    return next(
        layer for prefix, layer in LAYERS if module == prefix or module.startswith((prefix + ".", prefix + "_"))
    )


def source_files() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: pathlib.Path) -> list[tuple[str, ast.stmt, bool]]:
    """Return (module, statement, is at the top of the file) for each import."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found: list[tuple[str, ast.stmt, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module_name(path)}:{node.lineno} imports relatively"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = (ROOT / (inner.replace(".", "/") + ".py")).exists() or (
                    ROOT / inner.replace(".", "/") / "__init__.py"
                ).exists()
                found.append((inner if is_module else base, node, id(node) in top))
    return found


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_a_file_imports_its_own_layer_or_a_lower_one(path: pathlib.Path) -> None:
    module = module_name(path)
    for imported, node, _ in imports_of(path):
        if imported.split(".")[0] != "vllm" or module == "vllm":
            continue
        if (module, imported) in UPWARD_EXCEPTIONS:
            continue
        assert layer_of(imported) <= layer_of(module), f"{module}:{node.lineno} reaches up to {imported}"


@pytest.mark.parametrize(("one", "other"), STRANGERS)
def test_core_and_worker_are_strangers(one: str, other: str) -> None:
    for path in source_files():
        module = module_name(path)
        for imported, node, _ in imports_of(path):
            for here, there in ((one, other), (other, one)):
                crosses = module.startswith(here) and imported.startswith(there)
                assert not crosses, f"{module}:{node.lineno} imports {imported}"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_torch_stays_below_the_core(path: pathlib.Path) -> None:
    module = module_name(path)
    if module in TORCH_ALLOWED_FILES:
        return
    allowed = layer_of(module) in TORCH_ALLOWED_LAYERS and not module.startswith(TORCH_FORBIDDEN_PREFIXES)
    for imported, node, _ in imports_of(path):
        assert allowed or imported.split(".")[0] != "torch", f"{module}:{node.lineno} imports torch"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_ops_are_called_through_their_entry_point(path: pathlib.Path) -> None:
    """Nobody else decides which implementation serves a tensor, or relies on one of them."""
    module = module_name(path)
    if module.startswith("vllm.ops"):
        return
    for imported, node, _ in imports_of(path):
        assert not imported.startswith("vllm.ops.") or imported in OPS_ENTRY_POINTS, (
            f"{module}:{node.lineno} imports {imported}; call vllm.ops.api"
        )


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_http_and_zmq_stay_in_their_places(path: pathlib.Path) -> None:
    module = module_name(path)
    for imported, node, _ in imports_of(path):
        root = imported.split(".")[0]
        if root in {"fastapi", "pydantic", "uvicorn", "starlette"}:
            assert layer_of(module) == 6, f"{module}:{node.lineno} imports {root}"
        if root == "zmq":
            assert module.startswith(("vllm.v1.engine.core_proc", "vllm.v1.engine.core_client")), (
                f"{module}:{node.lineno} imports zmq"
            )


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_our_own_modules_are_imported_at_the_top(path: pathlib.Path) -> None:
    """A lazy import of our own hides a dependency; third-party ones may be late to keep start-up short."""
    module = module_name(path)
    if module in LAZY_EXCEPTIONS:
        return
    for imported, node, at_top in imports_of(path):
        if imported.split(".")[0] == "vllm":
            assert at_top, f"{module}:{node.lineno} imports {imported} inside a function"


def docstrings_of(tree: ast.Module) -> set[int]:
    """Return the ids of the constants that are docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    firsts = [node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and node.body]
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def names_in_strings(tree: ast.Module, modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules that strings name, for `importlib.import_module`, as "module:Class", or as code to run."""
    left_out = docstrings_of(tree)
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in left_out]
    assigned = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):  # with what stands in the file's own constants
            inner = [piece.value if isinstance(piece, ast.FormattedValue) else piece for piece in node.values]
            pieces = [assigned.get(ast.unparse(piece), piece) for piece in inner]
            texts.append("".join(str(piece.value) for piece in pieces if isinstance(piece, ast.Constant)))
    for text in texts:
        if isinstance(text, str):
            yield from (name for name in re.findall(r"\bvllm(?:\.\w+)*", text) if name in modules)


def find_circle(edges: dict[str, set[str]]) -> list[str]:
    """Return modules that name each other in a circle, the first one again at the end; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(edges.get(module, ())):
            if circle := visit(other, [*path, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(edges) if (circle := visit(module, []))), [])


def test_modules_do_not_name_each_other_in_circles() -> None:
    """Also not lazily: of two modules that name each other neither can be read, tested or replaced alone."""
    modules = {module_name(path): path for path in source_files()}
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        if module not in NAMES_EVERYTHING:
            named = {imported for imported, _, _ in imports_of(path)}
            named |= set(names_in_strings(ast.parse(path.read_text()), modules))
            edges[module] = named & modules.keys() - {module}
    for one, other in CIRCLE_EXCEPTIONS:
        edges[one].remove(other)
    assert " → ".join(find_circle(edges)) == ""


def test_circles_are_found_through_imports_and_through_strings() -> None:
    lazy = ast.parse(
        '"""vllm.doc"""\nplace = "vllm"\nmake = resolve_name("vllm.b:Made")\n'
        'run("from vllm.c import main; main()")\ntable = {1: f"{place}.d:Class", 2: f"{unknown}.e"}'
    )
    modules = {"vllm.doc", "vllm.b", "vllm.c", "vllm.d", "vllm.e"}
    assert sorted(names_in_strings(lazy, modules)) == ["vllm.b", "vllm.c", "vllm.d"]
    assert find_circle({"a": {"b", "c"}, "b": {"d"}, "c": {"b"}, "d": set()}) == []
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}) == ["b", "c", "d", "b"]


def test_no_drawer_for_everything() -> None:
    drawers = [
        module_name(path) for path in source_files() if path.stem in {"util", "utils", "misc", "helpers", "common"}
    ]
    assert drawers == []
