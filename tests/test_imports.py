"""What an import of the package loads. Names, registries and pickles are complete without further imports."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import pickle
import rlcompleter
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper.common.lazy_imports import make_lazy, when_imported
from lightning_piper.directives import known
from lightning_piper.ops.base import OPERATIONS

LAZY = ["lightning_piper", "lightning_piper.strategy"]
# Modules of the classes that a command line knows.
CLASSES = {
    "lightning_piper.strategy.strategy",
    "lightning_piper.strategy.spikes",
    "lightning_piper.profile.profiler",
}
SHOW = """
large = {"lightning_piper", "torch", "lightning", "pytorch_lightning", "networkx", "numpy"}
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] in large)))
"""
BOTH_NAMES = """
found = []
for package in (lightning.pytorch, pytorch_lightning):
    made = package.strategies.StrategyRegistry.get("piper")
    found += [type(made).__module__, isinstance(made, package.strategies.ParallelStrategy)]
print(json.dumps(found))
"""


def printed(*code: str) -> Any:
    """Run Python code in a new process. Return the JSON on the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(["import json, sys", *code])],
        check=True, capture_output=True, text=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_an_import_loads_almost_nothing() -> None:
    assert printed("import lightning_piper", SHOW) == [
        "lightning_piper",
        "lightning_piper.common",
        "lightning_piper.common.garbage_collection",
        "lightning_piper.common.lazy_imports",
        "lightning_piper.strategy",
    ]


def test_a_name_loads_what_it_needs() -> None:
    """The negative control of the test before; a name does not load the whole package either."""
    used = set(printed("import lightning_piper", "lightning_piper.annotate", SHOW))
    assert {"torch", "lightning_piper.annotate"} <= used
    assert not {"lightning.pytorch", "lightning_piper.capture", "lightning_piper.strategy.strategy"} & used


def test_the_strategy_loads_no_compiler() -> None:
    used = set(printed("import lightning_piper", "lightning_piper.PiperStrategy", SHOW))
    assert {"lightning.pytorch", "lightning_piper.capture", "torch._functorch"} <= used
    assert not {"torch._functorch.aot_autograd", "torch._functorch.partitioners", "pytorch_lightning"} & used


def written_imports(package: str) -> dict[str, str]:
    """Return the imports in a package's `__init__` that only type checkers read: name -> module."""
    file = importlib.import_module(package).__file__
    assert file is not None
    blocks = [node for node in ast.parse(Path(file).read_text()).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("package", LAZY)
def test_names_are_what_type_checkers_see(package: str) -> None:
    module, written = importlib.import_module(package), written_imports(package)
    assert set(module.__all__) == written.keys() and set(module.__all__) <= set(dir(module))
    for name, source in written.items():
        own = importlib.import_module(f"{source}.{name}" if source == package else source)
        assert getattr(module, name) is (own if source == package else getattr(own, name)), name


def test_a_star_import_has_all_names() -> None:
    names: dict[str, Any] = {}
    exec("from lightning_piper import *", names)
    assert set(piper.__all__) <= names.keys() and names["search"] is piper.search


def own(names: Mapping[str, type]) -> list[str]:
    """Return the names of classes of this package."""
    return sorted(name for name, kind in names.items() if kind.__module__.startswith("lightning_piper."))


def test_registries_are_complete() -> None:
    directives = printed("from lightning_piper.directives import known", "print(json.dumps(sorted(known())))")
    assert directives == own(known()) and len(directives) >= 10
    nodes = printed(
        "from lightning_piper.ops import base",
        "print(json.dumps(sorted(node.__qualname__ for node in base.OPERATIONS)))",
    )
    assert nodes == own({node.__qualname__: node for node in OPERATIONS}) and len(nodes) >= 20


def test_a_new_process_reads_pickles() -> None:
    given = [piper.Split(2), piper.annotate, piper.PiperStrategy("zero1")]
    read = f"import pickle; made = pickle.loads({pickle.dumps(given)!r})"
    shown = printed(read, "print(json.dumps([repr(each).split(' at ')[0] for each in made]))")
    assert shown == [repr(each).split(" at ")[0] for each in given]


@pytest.mark.parametrize(
    "order",
    [
        "import lightning_piper, lightning.pytorch, pytorch_lightning",
        "import lightning.pytorch, pytorch_lightning, lightning_piper",
        "import lightning_piper; lightning_piper.PiperStrategy; import lightning.pytorch, pytorch_lightning",
    ],
)
def test_both_packages_of_lightning_get_the_strategy(order: str) -> None:
    assert printed(order, BOTH_NAMES) == ["lightning_piper.strategy.strategy", True] * 2


@pytest.mark.parametrize(
    "order", ["lightning_piper, lightning.pytorch.cli", "lightning.pytorch.cli, lightning_piper"]
)
def test_a_command_line_knows_the_classes(order: str) -> None:
    """LightningCLI has short names for the classes that are imported."""
    loaded = printed(f"import {order}", "assert callable(lightning_piper.annotate)", SHOW)
    assert set(loaded) >= CLASSES


def test_without_a_command_line_the_classes_wait() -> None:
    assert not CLASSES & set(printed("import lightning_piper, lightning.pytorch", SHOW))


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a sub-package `rooms`, and with a function `rooms` in the module `house.plan`."""
    files: Mapping[str, str] = {
        "__init__.py": "",
        "plan.py": "def rooms(): return 3\n",
        "rooms/__init__.py": "doors = 2\n",
        "garden.py": "trees = 1\n",
    }
    for path, text in files.items():
        (tmp_path / "house" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "house"]:
        del sys.modules[name]


@pytest.mark.parametrize("before", [True, False])
def test_a_name_stays_when_its_sub_package_is_imported(house: Path, before: bool) -> None:
    package = importlib.import_module("house")
    if before:
        importlib.import_module("house.rooms")
        assert not callable(package.rooms)  # Python's own rule, without which there would be nothing to test
    make_lazy("house", {"house": ["garden"], "house.plan": ["rooms"]})
    assert "house.plan" not in sys.modules and {"rooms", "garden"} <= set(dir(package))
    assert importlib.import_module("house.rooms").doors == 2
    assert package.rooms() == 3 and package.garden.trees == 1
    package.rooms = 4
    assert package.rooms == 4
    del package.rooms
    assert package.rooms() == 3
    with pytest.raises(AttributeError, match="roof"):
        _ = package.roof


def test_a_module_is_reported_once_whenever_it_is_imported(house: Path) -> None:
    before, told = list(sys.meta_path), []
    for name in ("house", "house.plan"):
        when_imported(
            name, lambda module: told.append((module.__name__, callable(getattr(module, "rooms", 0))))
        )
    assert not told and importlib.util.find_spec("house") is not None and not told
    importlib.import_module("house.plan")
    assert told == [("house", False), ("house.plan", True)] and sys.meta_path == before
    module = sys.modules["house.plan"]
    assert module.__spec__ is not None and module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    when_imported("house.plan", lambda module: told.append(("again", True)))
    assert told[2:] == [("again", True)] and sys.meta_path == before


# A package waits until another thread imports the other package, or 0.3 s if no thread does. Then it needs a module
# of the other package.
CYCLE = """
import threading, house
try:
    house.both.wait(0.3)
except threading.BrokenBarrierError:
    pass
import house.{other}.inner
"""


@pytest.mark.parametrize("lazy", [True, False])
def test_threads_may_read_names_for_the_first_time_at_once(house: Path, lazy: bool) -> None:
    """Python ends imports of a cycle that two threads begin at once with an error, as the second case shows."""
    for name, other in (("left", "right"), ("right", "left")):
        (house / "house" / name).mkdir()
        (house / "house" / name / "__init__.py").write_text(CYCLE.format(other=other))
        (house / "house" / name / "inner.py").write_text(f"{name}_name = 2\n")
    package: Any = importlib.import_module("house")
    package.both = threading.Barrier(2)
    make_lazy("house", {f"house.{name}.inner": [f"{name}_name"] for name in ("left", "right")})
    found: list[str] = []

    def read(name: str) -> None:
        try:
            if lazy:
                assert getattr(package, f"{name}_name") == 2
            else:
                importlib.import_module(f"house.{name}.inner")
        except Exception as error:
            found.append(type(error).__name__)

    threads = [threading.Thread(target=read, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == (set() if lazy else {"_DeadlockError"})


def test_the_shell_completes_names_of_the_package() -> None:
    completer = rlcompleter.Completer({"piper": piper})
    assert completer.complete("piper.PiperStrat", 0) == "piper.PiperStrategy("
    assert completer.complete("piper.sched", 0) == "piper.schedules"
    assert completer.complete("piper.nothing", 0) is None
