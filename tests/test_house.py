"""How the package is cut: which room imports which, how long files and functions may be. The source is read; nothing is run."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "lightning_piper"

# A room is a folder of the package, or a file beside the folders, and imports only rooms before it: so there is no circle between
# rooms. Of what does not import each other, either may come first.
ROOMS = [
    "limits", "errors", "lightning_packages", "regular_files", "garbage_collection", "user_files", "routing", "sample_gathering",
    "totals", "batch_norms", "grouped_matmul", "averages",
    "cache", "accelerators",
    "ir", "placements", "annotate", "capture", "huggingface", "ops",
    "directives", "schedules", "plan", "passes", "verify",
    "runtime", "simulate", "viz", "compiler", "tensor_parallel",
    "profile", "search", "degrees",
    "processes", "holdings", "checkpoint", "session", "strategy", "targets", "cli_search", "cli", "testing",
    "lightning_piper",
]  # fmt: skip

FILE, FUNCTION = 600, 60  # lines
TOO_LONG: set[str] = set()


class Arrow(NamedTuple):
    """One module imports another. `late` arrows are not followed while modules are imported: they are inside of a function, or for
    type annotations alone."""

    source: str
    target: str
    late: bool
    line: int


def modules(root: Path) -> dict[str, Path]:
    """The modules of a package by their names."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(node: ast.AST, late: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from imports(child, late or inside or typing)


def arrows(root: Path) -> list[Arrow]:
    """All imports of modules of a package by modules of it."""
    there = modules(root)
    found = []
    for source, path in there.items():
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        for statement, late in imports(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _names(statement, package):
                target = name if name in there else name.rpartition(".")[0]  # what is imported from a module is not a module
                if target in there and target != source:
                    found.append(Arrow(source, target, late, statement.lineno))
    return found


def _names(statement: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
    return [".".join([*above, *filter(None, [statement.module]), alias.name]) for alias in statement.names]


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def against(order: list[str], found: list[Arrow]) -> list[str]:
    """Arrows that go to a room which does not come before. Late ones count: a room knows what it imports, whenever it does."""
    places = {name: place for place, name in enumerate(order)}
    pairs = [(arrow, room(arrow.source), room(arrow.target)) for arrow in found]
    return [f"{a.source}:{a.line} imports {a.target}" for a, one, other in pairs if one != other and places[other] > places[one]]


def fitting(found: list[Arrow]) -> list[str]:
    """An order of the rooms in which all arrows go one way.

    Raises:
        graphlib.CycleError: there is none.
    """
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for arrow in found:
        if room(arrow.source) != room(arrow.target):
            sorter.add(room(arrow.source), room(arrow.target))
    return list(sorter.static_order())


def circle(found: list[Arrow]) -> list[str]:
    """Modules that import each other in a circle, each the next one; none if there is no circle.

    Late arrows are left out: nothing follows them while the modules are imported, and within a room two modules may name each other
    in annotations.
    """
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for arrow in found:
        if not arrow.late:
            sorter.add(arrow.source, arrow.target)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def too_long(root: Path, file: int = FILE, function: int = FUNCTION) -> dict[str, int]:
    """Lines of files and functions that have too many: `path`, `path:function`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > file:
            found[name] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.lineno + 1) > function:
                    found[f"{name}:{node.name}"] = lines
    return found


@pytest.fixture(scope="module")
def found() -> list[Arrow]:
    return arrows(ROOT)


def test_imports_run_one_way(found: list[Arrow]) -> None:
    rooms = {room(name) for name in modules(ROOT)}
    assert rooms == set(ROOMS) and len(ROOMS) == len(rooms), f"ROOMS, from below; this order would do: {' '.join(fitting(found))}"
    assert not against(ROOMS, found)
    assert len({(room(a.source), room(a.target)) for a in found}) > 100, "hardly anything was read"


def test_no_modules_import_each_other(found: list[Arrow]) -> None:
    assert not circle(found)


def test_files_and_functions_fit() -> None:
    found = too_long(ROOT)
    assert not found.keys() - TOO_LONG, {name: lines for name, lines in found.items() if name not in TOO_LONG}
    assert not TOO_LONG - found.keys(), f"they fit now, and need no exception: {TOO_LONG - found.keys()}"


# What the tests above would find


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Three rooms, `low`, `middle` and `high`, in this order."""
    root = tmp_path / "house"
    for path, text in {
        "__init__.py": "from house.high import top\n",
        "low/__init__.py": "",
        "low/floor.py": "import json\n",
        "middle.py": "from house.low import floor\n",
        "high/__init__.py": "",
        "high/top.py": "import house.middle\nfrom . import step\n",
        "high/step.py": "from ..low.floor import json\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


ORDER = ["low", "middle", "high", "house"]


def test_every_form_of_import_is_an_arrow(package: Path) -> None:
    found = arrows(package)
    assert {(arrow.source, arrow.target) for arrow in found} == {
        ("house", "house.high.top"),
        ("house.middle", "house.low.floor"),
        ("house.high.top", "house.middle"),
        ("house.high.top", "house.high.step"),
        ("house.high.step", "house.low.floor"),
    }
    assert not against(ORDER, found) and not circle(found) and fitting(found) == ORDER


@pytest.mark.parametrize("text", [
    "from house.high.step import json\n",
    "def later():\n    from house import high\n",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..high import step\n",
])  # fmt: skip
def test_an_arrow_against_the_flow_is_found(package: Path, text: str) -> None:
    (package / "low" / "floor.py").write_text(text)
    (wrong,) = against(ORDER, arrows(package))
    assert wrong.startswith(f"house.low.floor:{len(text.splitlines())} imports house.high")
    with pytest.raises(graphlib.CycleError):  # no other order would do: `high` imports `low`
        fitting(arrows(package))


def test_a_circle_within_a_room_is_found(package: Path) -> None:
    step = package / "high" / "step.py"
    step.write_text("def later():\n    from house.high import top\n")
    assert not circle(arrows(package)), "only what is imported at once goes round"
    step.write_text("from house.high import top\n")
    found = arrows(package)
    assert sorted(set(circle(found))) == ["house.high.step", "house.high.top"] and not against(ORDER, found)


def test_what_is_too_long_is_found(package: Path) -> None:
    line = "        pass\n"
    fits = f"def fits():\n{line * (FUNCTION - 1)}"
    long = f"class A:\n    async def long(self):\n{line * FUNCTION}"
    (package / "middle.py").write_text(fits + long)
    (package / "high" / "top.py").write_text("\n" * FILE)
    (package / "high" / "step.py").write_text("\n" * (FILE + 1))
    assert too_long(package) == {"middle.py:long": FUNCTION + 1, "high/step.py": FILE + 1}
