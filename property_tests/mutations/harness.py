"""Tries the layers of verification on a mutation, cheapest first, and tells which one catches it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_piper.errors import PiperError
from property_tests.mutations import (
    arguments,
    backward,
    borders,
    buckets,
    drivers,
    executors,
    gathered,
    layers,
    losses,
    offloaded,
    places,
    plans,
    processes,
    recomputed,
    rewrites,
    routed,
    shards,
    totals,
    zero,
)
from property_tests.mutations.scenarios import SCENARIOS, Scenario
from property_tests.mutations.table import TABLE, Mutation

# What fills the table.
FILES = (rewrites, borders, arguments, backward, places, zero, plans, executors, shards, routed, drivers,
    losses, totals, gathered,
         recomputed, offloaded, buckets)  # fmt: skip
LAYERS = ("static", "interpreter", "plans", "property", "distributed")


@dataclass(frozen=True)
class Caught:
    """Attributes:
    layer: the first of `LAYERS` that noticed.
    message: what it said.
    scenario: where.
    """

    layer: str
    message: str
    scenario: str


def first_layer(mutation: Mutation) -> Caught | None:
    """The first layer short of real processes that notices a mutation; None if none does.

    Raises:
        AssertionError: it never did anything wrong, so that there was nothing to notice.
    """
    fixed = SCENARIOS.values() if mutation.scenario is None else [SCENARIOS[mutation.scenario]]
    for scenario in fixed if not mutation.processes else ():
        with mutation.patch() as seeded:
            caught = caught_on(scenario, mutation)
        if caught is not None:
            assert seeded.hits, f"{mutation.name} did nothing, yet {caught}"
            return caught
        if seeded.hits:
            break
    with mutation.patch() as seeded:
        caught = _by_property()
    assert seeded.hits or mutation.processes, f"{mutation.name} did nothing wrong anywhere"
    return caught


def caught_on(scenario: Scenario, mutation: Mutation) -> Caught | None:
    """Return the layer, short of real processes, that notices a mutation on one scenario; None if none does."""
    try:
        built = layers.static(scenario, mutation.recapture)
    except PiperError as error:  # nothing else: a static check that stumbles has not found anything
        return Caught("static", str(error), scenario.name)
    for name, layer in (("interpreter", layers.interpreter), ("plans", layers.plans)):
        try:
            layer(built)
        except Exception as error:
            return Caught(name, str(error), scenario.name)
    return None


def _by_property() -> Caught | None:
    try:
        layers.random_programs()
    except Exception as error:
        return Caught("property", str(error), "random programs")
    return None


def on_processes(mutation: Mutation, ranks: Sequence[processes.Ran | Exception]) -> Caught | None:
    """Did real processes notice? `ranks` is what they have."""
    assert any(isinstance(ran, Exception) or ran.hits for ran in ranks), (
        f"{mutation.name} did nothing wrong in any process"
    )
    scenario = processes.scenario_of(mutation)
    try:
        processes.compare(scenario, ranks)
    except Exception as error:
        return Caught("distributed", str(error), scenario.name)
    return None


def control(scenario: Scenario) -> None:
    """All layers without a mutation; raises what the first one finds."""
    built = layers.static(scenario)
    layers.interpreter(built)
    layers.plans(built)


def summary(found: dict[str, Caught]) -> list[str]:
    """The table: a line a mutation, and how many each layer caught."""
    rows = [("mutation", "where", "caught by", "with")]
    for name, caught in found.items():
        rows.append((name, TABLE[name].where, caught.layer, _short(caught.message)))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    counts = {layer: sum(caught.layer == layer for caught in found.values()) for layer in LAYERS}
    return [
        *lines,
        f"{len(found)} seeded bugs caught: "
        + ", ".join(f"{n} by {layer}" for layer, n in counts.items() if n),
    ]


def _short(message: str) -> str:
    """What is wrong, without the headline and the code."""
    message = re.sub(r"\s*\[PIPER-\w+\]", "", message)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = lines[1] if len(lines) > 1 and lines[0].endswith(":") else lines[0] if lines else "?"
    return text if len(text) <= 110 else text[:107] + "..."


__all__ = [
    "FILES",
    "LAYERS",
    "TABLE",
    "Caught",
    "caught_on",
    "control",
    "first_layer",
    "on_processes",
    "summary",
]
