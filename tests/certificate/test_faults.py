"""Seeded faults in certificates: the checker finds each one that changes what the devices do."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_piper_cli.certificate.checker import Checker
from lightning_piper_cli.certificate.memory import DeviceMemory
from lightning_piper_cli.certificate.operations import Operations
from tests.certificate.families import certificate
from tests.certificate.faults import KINDS, outcome
from tests.certificate.test_certificate import FAST

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
# Families in which every kind of instruction occurs.
MANY = (
    *FAST, "ZeRO-2", "HSDP", "interleaved", "PP x DP", "gathered samples", "experts", "tensor parallel", "recompute", "offload",
)  # fmt: skip
EACH = 18  # faults of each kind


def outcomes(kind: str, families: tuple[str, ...], count: int) -> Counter[str]:
    """Return the outcomes of `count` faults of a kind, in certificates that a fixed seed chooses."""
    found: Counter[str] = Counter()
    for k in range(40 * count):  # few families have a place for some kinds
        draw = random.Random(f"{kind} {k}")
        family = draw.choice(families)
        made = outcome(certificate(family), kind, draw)
        assert made != "missed", f"the checker accepts fault {k} of kind {kind!r} in {family}"
        found[made or "no place"] += 1
        if found["caught"] + found["same meaning"] == count:
            return found
    raise AssertionError(f"there are only {found} places for {kind!r}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_checker_finds_some_faults(kind: str) -> None:
    if kind != "another placement":  # the families with placements take longer to capture
        assert outcomes(kind, FAST, 2)["caught"]


@pytest.mark.long
def test_the_table_of_the_page_is_true() -> None:
    lines = ["| fault | seeded | caught | same work |", "|---|---|---|---|"]
    total: Counter[str] = Counter()
    for kind in KINDS:
        found = outcomes(kind, MANY, EACH)
        total += found
        lines.append(f"| {kind} | {EACH} | {found['caught']} | {found['same meaning']} |")
    lines.append(f"| together | {EACH * len(KINDS)} | {total['caught']} | {total['same meaning']} |")
    assert EACH * len(KINDS) >= 300
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8"), "the page needs\n" + "\n".join(lines)


def _nothing(*given: Any) -> None:
    return None


@pytest.mark.parametrize(
    "owner, rule, kind",
    [
        (Checker, "weighs", "another weight"),
        (Checker, "typed", "other samples"),
        (DeviceMemory, "is_made", "another event"),
        (DeviceMemory, "end", "a slot is freed early or never"),
        (Operations, "same", "another operation"),
    ],
)
def test_without_one_rule_the_checker_misses_faults(
    owner: type[Any], rule: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accepted() -> int:
        found = 0
        for k in range(12):
            draw = random.Random(f"{kind} {k}")
            family = draw.choice(FAST)
            found += outcome(certificate(family), kind, draw) in ("missed", "same meaning")
        return found

    with_all_rules = accepted()
    monkeypatch.setattr(owner, rule, _nothing)
    assert accepted() > with_all_rules
