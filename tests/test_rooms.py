"""The architecture as a test: who may import whom, how long a file may be, where a policy's name may stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sparsam"
LINES = 500  # of a file
MODULES = 15  # beside the sub-packages

LAYERS = [  # of the core: each may import itself and what stands above it here
    ("errors",),
    ("settings", "checks", "randomness", "inventory"),
    ("selection", "perturbation", "distributed"),
    ("passes", "share"),
    ("fisher", "replay", "batchnorm"),
    ("masks", "ascents", "rho"),
    ("schedules",),
    ("sam",),
    ("thrifty", "step_cost", "cuda_graph"),
    ("__init__",),
]
CORE = set().union(*LAYERS)
MAY_IMPORT = {  # besides itself
    **{name: set().union(*LAYERS[: level + 1]) for level, layer in enumerate(LAYERS) for name in layer},
    "integrations": CORE,
    "models": CORE,
    "data": CORE,
    "runs": CORE | {"models", "data"},
    "training": CORE | {"models", "data", "runs"},
    "analysis": CORE | {"models", "data", "runs"},
    "report": CORE | {"runs", "analysis"},
    "reproduce": CORE | {"models", "data", "runs", "training", "analysis", "report"},
    "cli": CORE | {"models", "data", "runs", "training", "analysis", "report", "reproduce"},
}

BASES = {"Mask", "Ascent", "Schedule"}
POLICIES = ("masks/*.py", "ascents/*.py", "schedules/*.py")
ASKING = {"isinstance", "issubclass", "hasattr", "getattr"}

FILES = sorted(file for suffix in ("py", "js", "css", "html") for file in SOURCE.rglob(f"*.{suffix}"))
PYTHON = [file for file in FILES if file.suffix == ".py"]


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def room(module: str) -> str:
    """Return where a dotted name of sparsam lies: in which package, or module beside the packages."""
    first = module.split(".")[1] if "." in module else ""
    return first if first in {file.stem for file in SOURCE.iterdir()} else "__init__"


def imports(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno} is a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "sparsam")


def where(file: Path, line: int) -> str:
    return f"{file.relative_to(SOURCE)}:{line}"


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_imports_go_downwards(name):
    own = [file for file in PYTHON if (SOURCE / name in file.parents) or file == SOURCE / f"{name}.py"]
    wrong = [
        f"{where(file, line)} imports {module}"
        for file in own
        for line, module in imports(file)
        if room(module) not in MAY_IMPORT[name] | {name} and module != "sparsam.__version__"
    ]
    assert wrong == []


def test_every_room_is_in_the_table():
    assert {folder.parent.name for folder in SOURCE.glob("*/__init__.py")} <= MAY_IMPORT.keys()


def test_contributing_shows_the_core_as_it_is():
    rows = re.findall(r"^\| (`.*?`) \| ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    shown = [set(re.findall(r"`(\w+)(?:\.py|/)`", row)) for row in rows]
    missing = [layer for layer in LAYERS if layer != ("__init__",) and set(layer) not in shown]
    assert missing == []


def test_no_file_is_long():
    lengths = {str(file.relative_to(SOURCE)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > LINES} == {}


def test_few_modules_lie_beside_the_packages():
    modules = sorted(file.name for file in SOURCE.glob("*.py") if not file.name.startswith("__"))
    assert len(modules) <= MODULES, modules


def policies() -> dict[str, Path]:
    """Return the class of each mask, ascent and schedule, and its file."""
    files = [file for pattern in POLICIES for file in SOURCE.glob(pattern)]
    classes = [(node.name, file) for file in files for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef)]
    return {name: file for name, file in classes if name not in BASES and not name.startswith("_")}


def names(node: ast.AST) -> set[str]:
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def questions(file: Path) -> Iterator[tuple[int, str]]:
    """Yield what a file asks about the type or the attributes of a policy."""
    known = policies()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKING and node.args:
            about, *rest = node.args
            asked = set().union(*map(names, rest)) & known.keys()
            by_name = node.func.id in ("hasattr", "getattr") and any(isinstance(arg, ast.Constant) for arg in rest)
            subject = about.attr if isinstance(about, ast.Attribute) else getattr(about, "id", "")
            if by_name and subject.lstrip("_") in ("mask", "ascent", "schedule"):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
            asked = names(node) & known.keys()
        else:
            continue
        if any(known[name] != file for name in asked):
            yield node.lineno, ast.unparse(node)


def test_nobody_asks_for_the_type_of_a_policy():
    assert [f"{where(file, line)} asks {text}" for file in PYTHON for line, text in questions(file)] == []
