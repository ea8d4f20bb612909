"""The rooms of the package: imports run one way, Lightning stays in its own, and its private names in two
files.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning.pytorch.strategies.parallel as parallel
import lightning.pytorch.strategies.strategy as strategy
import pytest

import lightning_piper

ROOT = Path(lightning_piper.__file__).parent
PRIVATE = ("strategy/_lightning.py", "strategy/spares/_lightning.py")
ONLY = {
    "lightning.pytorch.utilities.seed.isolate_rng"
}  # other packages above the runtime may use these names of Lightning
BEHIND = ("processes", "holdings", "checkpoint", "session")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def files() -> list[Path]:
    return [path for path in ROOT.rglob("*.py") if "plugin" not in path.parts]


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield dotted names, including the imported name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    """Return the package of a file: its folder, or the file itself if it is not in a folder."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def arrows(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return a map: package -> packages that it imports."""
    rooms = {room_of(path) for path in files()} - {"__init__"}
    return {
        room: {y for x in names if (y := [*x.split("."), ""][1]) in rooms and y != room}
        for room, names in found.items()
    }


def by_room() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in files():
        names = {name for name in imported(parsed(path)) if name.startswith("lightning_piper.")}
        found.setdefault(room_of(path), set()).update(names)
    return found


def test_imports_run_one_way() -> None:
    found = by_room()
    order = list(graphlib.TopologicalSorter(arrows(found)).static_order())
    behind = [room for room in order if room in ("runtime", *BEHIND, "strategy")]
    assert (behind[0], behind[1], behind[-1]) == ("runtime", "processes", "strategy"), behind
    assert sum(map(len, arrows(found).values())) > 50
    found["processes"].add("lightning_piper.session.process_runtime.ProcessRuntime")
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(arrows(found)).static_order())


def of_lightning(name: str) -> bool:
    return name.split(".")[0] in (
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "pytorch_lightning",
        "torchmetrics",
    )


def test_lightning_stays_in_its_room() -> None:
    known = {
        name
        for path in files()
        if room_of(path) in BEHIND
        for name in imported(parsed(path))
        if of_lightning(name)
    }
    assert known == ONLY


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(module: object) -> set[str]:
    """Return the private attributes that Lightning's strategies have."""
    tree = parsed(Path(str(vars(module)["__file__"])))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {x.attr for x in attributes if isinstance(x.value, ast.Name) and x.value.id == "self"}
    return {
        name
        for name in names | {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
        if is_private(name)
    }


def private_names(tree: ast.Module) -> set[str]:
    """Return private names of Lightning, also in strings: imported names, or attributes of other objects or
    of Lightning's strategies.
    """
    known = own_names(strategy) | own_names(parallel)
    found = {name for name in imported(tree) if of_lightning(name) and any(map(is_private, name.split(".")))}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in known:
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            found.add(node.value)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "torch")
            if not own or node.attr in known:
                found.add(node.attr)
    return found


def test_private_names_of_lightning_are_in_two_files() -> None:
    for path in files():
        if str(path.relative_to(ROOT)) not in PRIVATE:
            names = imported(parsed(path))
            assert not [
                name for name in names if of_lightning(name) and any(map(is_private, name.split(".")))
            ], path
            assert room_of(path) != "strategy" or not private_names(parsed(path)), path
    assert {"_launcher", "_layer_sync", "_throughputs", "_configure_launcher"} <= private_names(
        parsed(ROOT / PRIVATE[0])
    )


def test_lightnings_room_is_small() -> None:
    assert len(list((ROOT / "strategy").glob("*.py"))) <= 15
    assert all(
        len(path.read_text().splitlines()) <= 600
        for room in (*BEHIND, "strategy")
        for path in (ROOT / room).glob("*.py")
    )
