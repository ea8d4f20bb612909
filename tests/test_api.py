"""docs/api.md says of each public name what it is, and the reference shows it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"
ROW = re.compile(r"^\| `(lightning_piper[.\w]*)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
PACKAGES = {
    name: [re.findall(r"`(\w+)`", kind) for kind in kinds]
    for name, *kinds in ROW.findall((DOCS / "api.md").read_text())
}
SHOWN = set(
    re.findall(
        r"^::: ([\w.]+)",
        "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md")),
        re.MULTILINE,
    )
)


def documented() -> set[str]:
    """Return the packages of which the reference shows names."""
    packages = {"lightning_piper"}
    for name in SHOWN:
        parts = name.split(".")
        packages |= {".".join(parts[:2])} if len(parts) > 2 else set()
    return {name for name in packages if hasattr(importlib.import_module(name), "__all__")}


def imported() -> set[tuple[str, str]]:
    """Return the packages and names that the pages import, except errors."""
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    pattern = re.compile(r"^\s*(?:>>> )?from (lightning_piper[.\w]*) import (\([^)]*\)|.*)", re.MULTILINE)
    found = {
        (package, name)
        for page in pages
        for package, names in pattern.findall(page.read_text())
        for name in re.findall(r"\w+", re.sub("#.*", "", names))
    }
    return {(package, name) for package, name in found if package != "lightning_piper.errors"}


def is_shown(package: ModuleType, name: str) -> bool:
    """Return whether the reference shows a name itself, under another name, or as a part of a module that it
    shows as a whole.
    """
    wanted = getattr(package, name)
    for entry in SHOWN:
        above, _, attribute = entry.rpartition(".")
        found = getattr(importlib.import_module(above), attribute)
        own = (
            isinstance(found, ModuleType)
            and getattr(wanted, "__module__", entry) == entry
            and name in vars(found)
        )
        if found is wanted or own:
            return True
    return False


def test_every_documented_package_has_a_row() -> None:
    assert set(PACKAGES) == documented() and len(PACKAGES) >= 9


def test_what_the_pages_import_is_public() -> None:
    missing = [
        f"{package}.{name}"
        for package, name in sorted(imported())
        if package not in PACKAGES or name not in (*PACKAGES[package][0], *PACKAGES[package][1])
    ]
    assert not missing, f"docs/api.md does not have {missing} as public names"
    assert ("lightning_piper.huggingface", "use_piper_experts") in imported()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_row_has_every_name_once(package: str) -> None:
    named = [name for kind in PACKAGES[package] for name in kind]
    assert sorted(named) == sorted(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_shows_what_is_public(package: str) -> None:
    stable, experimental, _ = PACKAGES[package]
    module = importlib.import_module(package)
    hidden = [
        n
        for n in (*stable, *experimental)
        if not isinstance(getattr(module, n), ModuleType) and not is_shown(module, n)
    ]
    assert not hidden, f"docs/reference lacks {hidden}"


def test_what_is_internal_is_not_shown() -> None:
    """The negative control of the test before: a name that the reference lacks is noticed."""
    for package, (_, _, internal) in PACKAGES.items():
        module = importlib.import_module(package)
        assert not [name for name in internal if is_shown(module, name)]
    assert sum(len(internal) for _, _, internal in PACKAGES.values()) > 20
