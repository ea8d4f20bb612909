"""Each message of the package has one code, and docs/codes.md or docs/warnings.md explains each code."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from lightning_piper import errors
from tests.prose import RULES
from tests.test_warnings import literal, pattern, texts, trees

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
CLASSES = {name for name, cls in vars(errors).items() if isinstance(cls, type)} | {"NoRoom"}
CODE = re.compile(r"\[PIPER-([A-Z](?:\d{3}|\0))\]")
JOINED = re.compile(
    r"; (give|name|use|move|place|remove|set|let|choose|return|put|select|accepted are|otherwise)\b"
)
# Calls whose message comes from another error or function, which has the code.
WRAPPERS = {
    "CaptureError(SKIPPED)",
    "PiperError(SKIPPED)",
    "CaptureError(described(error))",
    "DirectiveError(f'directive {index} {error}')",
    "DirectiveError(f'PiperStrategy({degrees}): {message}')",
    "DirectiveError(f'{found}. {advice[0].upper()}{advice[1:]}')",
    "DirectiveError(f'({self.op}): field {field!r}: {found}. {fix}')",
    "VerificationError(f'after directive {each.index} ({each.name}), {error}')",
    "VerificationError(f'for a batch that is not the last batch of an accumulation: {error}')",
    "PiperError(_refusal(type(self.optimizer).__name__, error, name, compiled))",
    "PiperError(_SKIPPED)",
    "PiperError(_factors_differ([float(factor) for factor in factors]))",
    "PiperError(_factors_differ([factor / scale for factor, scale in found]))",
    "PiperError(f'PiperStrategy: {problem}')",
    "PiperError(problem if rank == 0 else f'rank {rank}: {problem}')",
    "PiperError(text)",
    "NoProgram(f\"search: {counted(len(self._refused), 'program')} of the best candidates failed the check. "
    'Reason for the best candidate: {self._refused[0][1]}")',
    "world.warn(_said(error, step))",
    "self._later.warn(compiled, self._leaves, captured_now, self.programs.traced, own)",
    "before.world.warn(_said(step, before, problem, shards))",
    "self._world.warn(text)",
    "warnings.warn(text, stacklevel=2)",
    "warnings.warn(report, stacklevel=2)",
    "world.warn(f\"{text}{seen}. PiperStrategy(verify='first_batch') measures the difference from one device\")",
}


def calls(modules: Iterable[ast.Module]) -> Iterator[ast.Call]:
    """Yield the calls that make an error or that warn, without deprecations."""
    for module in modules:
        for node in ast.walk(module):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            makes = name in CLASSES or (name == "refuse" and len(node.args) == 3)
            warns = name in ("warn", "rank_zero_warn") and "DeprecationWarning" not in ast.unparse(node)
            if makes or warns:
                yield node


def said(call: ast.Call) -> str:
    return "".join(map(literal, call.args))


def codes(modules: Iterable[ast.Module]) -> set[str]:
    """Return all codes in texts of these modules."""
    nodes = (node for module in modules for node in ast.walk(module) if isinstance(node, ast.expr))
    return {code for node in nodes for code in CODE.findall(literal(node))}


def without_one_code(modules: Iterable[ast.Module]) -> list[str]:
    """Return the calls whose message does not have exactly one code, except for calls that pass a message on."""
    return [
        shown
        for call in calls(modules)
        if len(CODE.findall(said(call))) != 1 and (shown := ast.unparse(call)) not in WRAPPERS
    ]


def badly_written(modules: Iterable[ast.Module]) -> list[str]:
    """Return the messages that join fact and fix by a semicolon, count as "device(s)", or are not American."""
    return [
        text
        for text in map(said, calls(modules))
        if any(rule.search(text) for rule in (JOINED, RULES["American spelling"], RULES["one number"]))
    ]


def sections() -> list[str]:
    return re.findall(
        r"^### PIPER-(\S+)$", (ROOT / "docs/codes.md").read_text(encoding="utf-8"), re.MULTILINE
    )


def rows() -> list[tuple[str, str]]:
    """Return the words and the code of each warning on its page."""
    page = (ROOT / "docs/warnings.md").read_text(encoding="utf-8")
    return re.findall(r'^\| `([^`]+)` \| <span id="piper-w\d+">PIPER-(W\d+)</span> \|', page, re.MULTILINE)


def without_code(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the rows whose words and code are not together in a text of the package."""
    return [
        (words, code)
        for words, code in rows
        if not any(code in CODE.findall(text) and pattern(words).search(text) for text in texts())
    ]


def test_each_message_has_one_code() -> None:
    assert len(list(calls(trees()))) > 600
    assert without_one_code(trees()) == []


def test_wrappers_are_calls_of_the_package() -> None:
    assert {ast.unparse(call) for call in calls(trees())} >= WRAPPERS


def test_messages_without_one_code_are_noticed() -> None:
    module = ast.parse(
        "raise DirectiveError('no code')\n"
        "raise CaptureError(f'two of {them} [PIPER-C001] [PIPER-C002]')\n"
        "self.refuse('devices', '0', 'give 1')\n"
        "world.warn(f'{name} is new')\n"
        "raise PiperError(f'one [PIPER-S001]')\n"
        "self.refuse('devices', '0', 'give 1 [PIPER-D003]')\n"
    )
    wrong = [ast.unparse(node).removeprefix("raise ") for node in module.body[:4]]
    assert sorted(without_one_code([module])) == sorted(wrong)


def test_messages_keep_the_rules_of_the_page_on_style() -> None:
    assert badly_written(trees()) == []
    for text in ("x is 0; give 1", "the behaviour of x", "2 device(s)"):
        assert badly_written([ast.parse(f"raise PiperError('{text} [PIPER-S001]')")]) == [
            f"{text} [PIPER-S001]"
        ]


def test_each_code_is_explained_once_and_used() -> None:
    explained = [*sections(), *(code for _, code in rows())]
    assert len(set(explained)) == len(explained)
    assert codes(trees()) - {"X\0"} == set(explained)


def test_each_warning_has_the_code_of_its_row() -> None:
    assert without_code(rows()) == []
    (first, one), (second, two) = rows()[:2]
    assert without_code([(first, two), (second, one)]) == [(first, two), (second, one)]


def test_an_error_has_the_last_code_of_its_message() -> None:
    inner = errors.CaptureError("train.py:2 (if x:): this line needs the value of a tensor [PIPER-C001]")
    outer = errors.PiperError(f"the step failed: {inner}. Change it [PIPER-S013]")
    assert (inner.code, outer.code) == ("PIPER-C001", "PIPER-S013")
    assert pickle.loads(pickle.dumps(outer)).code == outer.code
    assert errors.DirectiveError("of your own").code is None
