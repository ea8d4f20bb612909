"""The table of docs/design.md names every method of Lightning's Strategy that Piper overrides, and the files
that do it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lightning.pytorch.strategies import ParallelStrategy

import lightning_piper as piper

TEXT = (Path(__file__).parents[2] / "docs/design.md").read_text(encoding="utf-8")


LIGHTNINGS = set(dir(ParallelStrategy)) | {"configure_launcher", "set_world_ranks"}


def overridden(strategy: type) -> dict[str, set[str]]:
    """The public methods and properties of Lightning's Strategy that are overridden, and the files of
    `strategy/` that do it.
    """
    found: dict[str, set[str]] = {}
    for each in strategy.__mro__:
        if each.__module__.startswith("lightning_piper."):
            for name in vars(each):
                if not name.startswith("_") and name in LIGHTNINGS:
                    found.setdefault(name, set()).add(each.__module__.rpartition(".")[2] + ".py")
    return found


def table(text: str) -> dict[str, set[str]]:
    section = text.partition("### What Lightning calls")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| (`[^|]+) \|", section, re.MULTILINE)
    return {
        name: set(re.findall(r"`([^`]+)`", files))
        for names, files in rows
        for name in re.findall(r"`([^`]+)`", names)
    }


def test_it_has_every_method() -> None:
    names = overridden(piper.PiperStrategy)
    assert table(TEXT).keys() == names.keys()


@pytest.mark.parametrize("name", sorted(overridden(piper.PiperStrategy)))
def test_it_names_the_files(name: str) -> None:
    assert table(TEXT)[name] == overridden(piper.PiperStrategy)[name]


def test_contributing_names_the_files() -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("### The strategy\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+\.py)` \| (.*) \|$", section, re.MULTILINE)
    there = overridden(piper.PiperStrategy)
    assert {file for file, _ in rows} == set().union(*there.values())
    wrong = [
        (file, name)
        for file, names in rows
        for name in re.findall(r"`(\w+)`", names)
        if file not in there.get(name, ())
    ]
    assert not wrong


def test_a_method_that_is_not_in_it_is_seen() -> None:
    unlisted = min(name for name in LIGHTNINGS - table(TEXT).keys() if not name.startswith("_"))
    another = type(
        "Another",
        (piper.PiperStrategy,),
        {"__module__": "lightning_piper.strategy.another", unlisted: lambda self: None},
    )
    assert overridden(another).keys() - table(TEXT).keys() == {unlisted}
