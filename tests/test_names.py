"""Names in the package: each class name is defined once, and files are named by nouns. The source is read;
nothing is run.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1] / "lightning_piper"

# A file may not be named by one of these words alone, nor may its name end in one of them.
PREPOSITIONS = {
    "about", "above", "across", "after", "against", "along", "among", "around", "at", "before", "behind",
    "below", "beneath",
    "beside", "besides", "between", "beyond", "by", "during", "for", "from", "in", "inside", "into", "near",
    "of", "off", "on",
    "onto", "out", "outside", "over", "since", "through", "till", "to", "toward", "under", "until", "up",
    "upon", "with",
    "within", "without",
}  # fmt: skip
ADVERBS = {
    "again", "ahead", "alone", "alike", "also", "apart", "away", "back", "beforehand", "both", "each",
    "early", "either",
    "elsewhere", "else", "enough", "ever", "first", "here", "instead", "last", "late", "later", "long",
    "meanwhile", "never",
    "not", "now", "often", "once", "only", "other", "rest", "same", "several", "some", "soon", "then",
    "there", "together",
    "too", "twice", "when", "where", "whole",
}  # fmt: skip
PARTICIPLES = {
    "attending", "cached", "calling", "capturing", "carried", "changed", "changing", "choosing", "comparing",
    "computed",
    "counting", "deferred", "divided", "evaluating", "executed", "finding", "fitted", "following", "found",
    "gathered", "given",
    "grouped", "held", "interleaved", "issuing", "joined", "joining", "kept", "known", "laid", "launching",
    "left", "listed",
    "listing", "lost", "made", "mapped", "measured", "measuring", "meeting", "moved", "named", "numbered",
    "opened", "pinning",
    "placed", "prepared", "proposing", "raised", "reading", "recomputed", "recorded", "replayed", "returned",
    "riding", "routed",
    "said", "searching", "selected", "sharded", "shared", "swallowed", "taken", "told", "traced", "trying",
    "unchanged",
    "uncaptured", "undoing", "used", "waiting", "walking", "watched", "weighing", "writing", "written",
}  # fmt: skip
NO_NOUNS = PREPOSITIONS | ADVERBS | PARTICIPLES


def classes(root: Path) -> dict[str, list[str]]:
    """Return the files that define each class name of a package at the top level of a module, including
    private names.
    """
    found = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(root).as_posix())
    return found


def several_definitions(root: Path) -> dict[str, list[str]]:
    """Return the class names that a package defines more than once."""
    return {name: files for name, files in classes(root).items() if len(files) > 1}


def no_nouns(root: Path) -> list[str]:
    """Return the files and folders whose names begin with a preposition, or end in a word that is not a noun."""
    found = []
    for path in sorted(root.rglob("*")):
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            words = path.stem.strip("_").split("_")
            if words[0] in PREPOSITIONS or words[-1] in NO_NOUNS:
                found.append(path.relative_to(root).as_posix())
    return found


def test_each_class_name_is_defined_once() -> None:
    assert not several_definitions(ROOT)
    assert len(classes(ROOT)) > 400, "most of the package was not read"


def test_files_are_named_by_nouns() -> None:
    assert not no_nouns(ROOT)


# Controls: the tests above can fail


def made(root: Path, files: dict[str, str]) -> Path:
    """Make a package with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_two_definitions_of_a_class_are_found(tmp_path: Path) -> None:
    root = made(tmp_path, {
        "one.py": "class A: ...\nclass _B: ...\nclass C: ...\n",
        "inner/two.py": "class _B: ...\nclass D:\n    class C: ...\n",
        "inner/three.py": "from one import A\nA = A\ndef a():\n    class A: ...\n",
    })  # fmt: skip
    assert several_definitions(root) == {"_B": ["inner/two.py", "one.py"]}
    (root / "inner/three.py").write_text("class A: ...\n")
    assert several_definitions(root) == {"_B": ["inner/two.py", "one.py"], "A": ["inner/three.py", "one.py"]}


def test_files_without_a_noun_are_found(tmp_path: Path) -> None:
    good = [
        "background.py",
        "_torch.py",
        "shared_memory.py",
        "no_sync_plan.py",
        "fit/__init__.py",
        "all_to_all.py",
    ]
    wrong = [
        "behind.py",
        "elsewhere/state.py",
        "fit/kept.py",
        "fit/on_simulated.py",
        "fit/not_last.py",
        "in_parts.py",
    ]
    root = made(tmp_path, dict.fromkeys([*good, *wrong], ""))
    assert no_nouns(root) == [
        "behind.py",
        "elsewhere",
        "fit/kept.py",
        "fit/not_last.py",
        "fit/on_simulated.py",
        "in_parts.py",
    ]
