"""How the package is divided: which sub-package imports which, how long files and functions are. The tests
only read the source.
"""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1] / "lightning_piper"

# The sub-packages of each package, in an order in which each one imports only sub-packages before it. A file
# beside the folders counts as a sub-package. Two sub-packages that do not import each other may stand in
# either order.
PACKAGES = {
    "lightning_piper": [
        "errors",
        "common",
        "routing",
        "sample_gathering",
        "totals",
        "batch_norms",
        "grouped_matmul",
        "averages",
        "cache",
        "accelerators",
        "ir",
        "placements",
        "linear_cross_entropy",
        "annotate",
        "capture",
        "huggingface",
        "ops",
        "directives",
        "schedules",
        "plan",
        "passes",
        "verify",
        "certificate",
        "runtime",
        "simulate",
        "viz",
        "summary",
        "compiler",
        "tensor_parallel",
        "profile",
        "search",
        "degrees",
        "processes",
        "holdings",
        "checkpoint",
        "session",
        "strategy",
        "pretrained",
        "cli_search",
        "cli",
        "testing",
        "__init__",
    ],
    "lightning_piper.capture": [
        "torch_private",
        "user_code",
        "joint",
        "proxies",
        "metrics",
        "python_state",
        "graph_cache",
        "tracing",
        "losses",
        "tensor_sharding",
        "cutting",
        "steps",
        "eager",
        "__init__",
    ],
    "lightning_piper.search": [
        "costs",
        "rows",
        "accounting",
        "space",
        "program_writer",
        "links",
        "stage_costs",
        "coarse_bounds",
        "estimate",
        "bounds",
        "inequalities",
        "report",
        "choices",
        "joint_bounds",
        "branch_and_bound",
        "best_candidate",
        "arguments",
        "proposal",
        "comparison",
        "__init__",
    ],
    "lightning_piper.session": [
        "hook_code",
        "program",
        "step_times",
        "token_accumulation",
        "local_sgd",
        "available_memory",
        "concurrent_measurement",
        "program_cache",
        "verification",
        "metric_objects",
        "variants",
        "checksums",
        "auto_search",
        "replay",
        "process_runtime",
        "first_operation",
        "determinism",
        "pending_step",
        "programs",
        "evaluation",
        "eager",
        "__init__",
    ],
    "lightning_piper.runtime": [
        "inplace_grads",
        "messages",
        "step_outputs",
        "connections",
        "groups",
        "wire",
        "same_machine",
        "collectives",
        "piggyback",
        "process",
        "transport",
        "simulated_transport",
        "chunk_graphs",
        "watching",
        "chunks",
        "gradient_buffer",
        "streams",
        "executor",
        "local_transport",
        "shards",
        "simulated_steps",
        "__init__",
    ],
    "lightning_piper.directives": [
        "base",
        "sequence",
        "program",
        "rewrites",
        "split",
        "place",
        "offload",
        "order",
        "chunk_loss",
        "recompute",
        "replicate",
        "group_sharding",
        "member_tensors",
        "shard_experts",
        "tensor_shards",
        "__init__",
    ],
    "lightning_piper.plan": [
        "instructions",
        "columns",
        "no_sync",
        "accumulation",
        "gathers",
        "overlap",
        "irecv",
        "lifetimes",
        "matching",
        "plan",
        "send_completion",
        "streams",
        "order",
        "graphs",
        "no_sync_plan",
        "device",
        "checks",
        "lowering",
        "compilation",
        "__init__",
    ],
    "lightning_piper.ops": [
        "facts",
        "instruction",
        "reference",
        "base",
        "host",
        "order",
        "samples",
        "update",
        "communication",
        "early_update",
        "results",
        "weights",
        "arguments",
        "chunk",
        "metrics",
        "build",
        "__init__",
    ],
}

FILE, FUNCTION = 600, 70  # lines
FOLDER = 20  # files, without __init__.py
TOO_LONG: set[str] = set()


class Arrow(NamedTuple):
    """An import of one module by another module. `late` arrows are not followed while modules are imported:
    they are inside of a function, or only for type annotations.
    """

    source: str
    target: str
    late: bool
    line: int


def modules(root: Path) -> dict[str, Path]:
    """Return the modules of a package by their names."""
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
    """Return all imports of modules of a package by modules of the same package."""
    there = modules(root)
    found = []
    for source, path in there.items():
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        for statement, late in imports(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _names(statement, package):
                target = (
                    name if name in there else name.rpartition(".")[0]
                )  # other imports from a module are not modules
                if target in there and target != source:
                    found.append(Arrow(source, target, late, statement.lineno))
    return found


def _names(statement: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
    return [".".join([*above, *filter(None, [statement.module]), alias.name]) for alias in statement.names]


def within(found: list[Arrow], parent: str) -> list[Arrow]:
    """Return the arrows between modules of the package `parent`."""
    return [arrow for arrow in found if all(f"{module}.".startswith(f"{parent}.") for module in arrow[:2])]


def package(module: str, parent: str) -> str:
    """Return the sub-package of `parent` that a module of `parent` belongs to. The module `parent` itself
    is "__init__".
    """
    names, depth = module.split("."), len(parent.split("."))
    return names[depth] if len(names) > depth else "__init__"


def against(order: list[str], found: list[Arrow], parent: str) -> list[str]:
    """Return the arrows to a sub-package of `parent` that does not come before. Late arrows count, because
    they are dependencies, too.
    """
    places = {name: place for place, name in enumerate(order)}
    pairs = [
        (a, places[package(a.source, parent)], places[package(a.target, parent)])
        for a in within(found, parent)
    ]
    return [f"{a.source}:{a.line} imports {a.target}" for a, source, target in pairs if target > source]


def fitting(found: list[Arrow], parent: str) -> list[str]:
    """An order of the sub-packages of `parent` in which all arrows go one way.

    Raises:
        graphlib.CycleError: there is none.
    """
    sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for arrow in within(found, parent):
        source, target = package(arrow.source, parent), package(arrow.target, parent)
        if source != target:
            sorter.add(source, target)
    return list(sorter.static_order())


def circle(found: list[Arrow]) -> list[str]:
    """Modules that import each other in a circle, each the next one; none if there is no circle.

    Late arrows are left out: nothing follows them while the modules are imported, and two modules of one
    sub-package may name each other in annotations.
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
    """Return the lines of files and functions that have too many lines: `path`, `path:function`. For a
    function, its body without the docstring counts.
    """
    found = {}
    for path in sorted(root.rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > file:
            found[name] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if (lines := node.end_lineno - node.body[0].lineno + 1 - docstring_lines(node)) > function:
                    found[f"{name}:{node.name}"] = lines
    return found


def too_many(root: Path, most: int = FOLDER) -> dict[str, int]:
    """Return the folders that have too many files, with the number of their files."""
    folders = Counter(path.parent for path in root.rglob("*.py") if path.name != "__init__.py")
    return {folder.relative_to(root).as_posix(): files for folder, files in folders.items() if files > most}


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(function, clean=False) is None:
        return 0
    first = function.body[0]
    assert first.end_lineno is not None
    return first.end_lineno - first.lineno + 1


def shared_class_names(root: Path) -> set[str]:
    """Return the names of classes that several modules define. A class inside of another class or of a
    function does not count.
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))]
    names = [
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    return {name for name in names if names.count(name) > 1}


@pytest.fixture(scope="module")
def found() -> list[Arrow]:
    return arrows(ROOT)


@pytest.mark.parametrize("parent, least", [(parent, 100 if "." not in parent else 10) for parent in PACKAGES])
def test_imports_run_one_way(found: list[Arrow], parent: str, least: int) -> None:
    order = PACKAGES[parent]
    names = {package(name, parent) for name in modules(ROOT) if f"{name}.".startswith(f"{parent}.")}
    assert names == set(order) and len(order) == len(names), (
        f"this order would do: {' '.join(fitting(found, parent))}"
    )
    assert not against(order, found, parent)
    between = {(package(a.source, parent), package(a.target, parent)) for a in within(found, parent)}
    assert len(between) > least, "hardly any import was read"


def test_no_modules_import_each_other(found: list[Arrow]) -> None:
    assert not circle(found)


def test_files_and_functions_fit() -> None:
    found = too_long(ROOT)
    assert not found.keys() - TOO_LONG, {name: lines for name, lines in found.items() if name not in TOO_LONG}
    assert not TOO_LONG - found.keys(), f"they fit now, and need no exception: {TOO_LONG - found.keys()}"


def test_folders_fit() -> None:
    assert not too_many(ROOT)


def test_no_two_public_classes_have_one_name() -> None:
    assert not shared_class_names(ROOT)


# What the tests above would find


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Make a package of three sub-packages, `low`, `middle` and `high`, in this order. `high` has modules of
    its own.
    """
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


ORDER = ["low", "middle", "high", "__init__"]


def test_every_form_of_import_is_an_arrow(house: Path) -> None:
    found = arrows(house)
    assert {(arrow.source, arrow.target) for arrow in found} == {
        ("house", "house.high.top"),
        ("house.middle", "house.low.floor"),
        ("house.high.top", "house.middle"),
        ("house.high.top", "house.high.step"),
        ("house.high.step", "house.low.floor"),
    }
    assert not against(ORDER, found, "house") and not circle(found) and fitting(found, "house") == ORDER


@pytest.mark.parametrize("text", [
    "from house.high.step import json\n",
    "def later():\n    from house import high\n",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..high import step\n",
])  # fmt: skip
def test_an_arrow_against_the_flow_is_found(house: Path, text: str) -> None:
    (house / "low" / "floor.py").write_text(text)
    (wrong,) = against(ORDER, arrows(house), "house")
    assert wrong.startswith(f"house.low.floor:{len(text.splitlines())} imports house.high")
    with pytest.raises(graphlib.CycleError):  # no other order would do: `high` imports `low`
        fitting(arrows(house), "house")


def test_a_circle_within_a_sub_package_is_found(house: Path) -> None:
    step = house / "high" / "step.py"
    step.write_text("def later():\n    from house.high import top\n")
    assert not circle(arrows(house)), "only what is imported at once goes round"
    step.write_text("from house.high import top\n")
    found = arrows(house)
    assert sorted(set(circle(found))) == ["house.high.step", "house.high.top"] and not against(
        ORDER, found, "house"
    )


def test_an_arrow_against_the_flow_within_a_sub_package_is_found(house: Path) -> None:
    found = arrows(house)
    assert fitting(found, "house.high") == ["step", "top"] and not against(
        ["step", "top", "__init__"], found, "house.high"
    )
    (wrong,) = against(["top", "step", "__init__"], found, "house.high")
    assert wrong == "house.high.top:2 imports house.high.step"


def test_what_is_too_long_is_found(house: Path) -> None:
    line = "        pass\n"
    fits = f'def fits():\n        """A docstring\n        of two lines."""\n{line * FUNCTION}'
    long = f"class A:\n    async def long(self):\n{line * (FUNCTION + 1)}"
    (house / "middle.py").write_text(fits + long)
    (house / "high" / "top.py").write_text("\n" * FILE)
    (house / "high" / "step.py").write_text("\n" * (FILE + 1))
    assert too_long(house) == {"middle.py:long": FUNCTION + 1, "high/step.py": FILE + 1}


def test_folders_with_too_many_files_are_found(house: Path) -> None:
    assert not too_many(house, 2)
    (house / "high" / "third.py").write_text("")
    assert too_many(house, 2) == {"high": 3}


def test_classes_with_one_name_are_found(house: Path) -> None:
    for path in ("middle.py", "high/top.py"):
        (house / path).write_text("class Step:\n    class Inner: ...\n\nclass _Run: ...\n")
    assert shared_class_names(house) == {"Step"}
