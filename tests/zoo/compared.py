"""What became of a kind at a level: trained as the level says, refused, or other numbers. As a script, says
it of some kinds.

python -m tests.zoo.compared [kinds ...] [--levels one,replicate]
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.zoo.kinds import Kind
from tests.zoo.train import KINDS, PROGRAMS, Outcome, outcomes

Found = Mapping[tuple[str, str], list[Outcome]]
LEVELS = ["one", *PROGRAMS]
# Relative to the largest value of a tensor. The largest distance measured is 2.6e-10, for biases of
# attention: their gradients are zero except for rounding, which Adam turns into steps. Without these biases
# it is 5e-16.
ROUNDING = 2e-9
SINGLE = 1e-6  # Lightning keeps what `validate` logs in single precision
PROVED, EXCEPT, EXECUTED = "proved", "verified except", "executed"


def references(level: str) -> list[str]:
    """The levels with which a level is compared: plain training on one device for `one` and `stages`,
    otherwise DDP, and plain training on the whole batches.
    """
    return ["plain"] if level in ("one", "stages") else ["ddp", "whole"]


def verdict(kind: Kind, level: str, found: Found) -> tuple[str, str]:
    """The verdict on a training in a few words, and the explanation.

    A training that is proved is compared with plain training on one device with the whole batch. One that is
    executed, or verified except for something, is compared with DDP, which takes the mean of what the
    replicas compute.
    """
    ranks = found[kind.name, level]
    if "OneModule" in ranks[0].get("error", ""):
        return "-", ""
    errors = [outcome for outcome in ranks if "error" in outcome]
    if errors:
        # A process whose peer has failed only says that the connection is closed.
        said = min(errors, key=lambda outcome: "Connection closed by peer" in outcome["error"])["error"]
        lightning = any(outcome.get("error") == said for outcome in found[kind.name, references(level)[0]])
        return ("refused" if lightning or all(outcome.get("known") for outcome in ranks) else "fails"), said
    how = manner(ranks[0])
    wanted = (
        "plain"
        if level in ("one", "stages")
        else "whole"
        if kind.drifts or (how == PROVED and not kind.mixes)
        else "ddp"
    )
    one, other, replicas = (
        mean([seen(x) for x in found[kind.name, at]]) for at in (level, wanted, references(level)[0])
    )
    if kind.predict and "predicted" in replicas:  # each process has its own predictions
        other["predicted"] = replicas["predicted"]
    left_out = kind.of_batch if how == EXCEPT else ()
    far = {
        way: d
        for way, d in distances(one, other).items()
        if d > (SINGLE if way.startswith("/validated") or way.rpartition("/")[2] in kind.single else ROUNDING)
        and way.rpartition("/")[2] not in left_out
    }
    if far:
        return "differs", f"{how}, but from {wanted} by " + ", ".join(
            f"{way}: {d:.1e}" for way, d in list(far.items())[:4]
        )
    return how, " ".join(ranks[0]["warned"])


def manner(outcome: Outcome) -> str:
    """How the package made sure that a training is right, told from its warnings."""
    said = " ".join(outcome["warned"])
    if "runs uncaptured" in said or "captured in part" in said:
        return EXECUTED
    return (
        EXCEPT
        if any(
            words in said
            for words in ("verified except", "not a sum of means", "mixes samples, or indexes into the batch")
        )
        else PROVED
    )


def seen(outcome: Outcome) -> Outcome:
    return {k: v for k, v in outcome.items() if k not in ("warned", "seconds")}


def mean(ranks: Sequence[Any]) -> Any:
    """The mean of the processes' numbers. Values that are no numbers are taken from the first process."""
    if isinstance(ranks[0], dict):
        return {k: mean([rank[k] for rank in ranks]) for k in ranks[0]}
    if isinstance(ranks[0], list):
        return [mean(list(parts)) for parts in zip(*ranks, strict=True)]
    if isinstance(ranks[0], float | torch.Tensor) and torch.as_tensor(ranks[0]).is_floating_point():
        return sum(torch.as_tensor(x).double() for x in ranks) / len(ranks)
    return ranks[0]


def distances(found: Any, wanted: Any, where: str = "") -> dict[str, float]:
    """The relative distances of all numbers, by the path to each; infinite where the structures or other
    values differ.
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        pairs = [
            distances(found.get(k), wanted.get(k), f"{where}/{k}") for k in sorted({*wanted, *found}, key=str)
        ]
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        pairs = [distances(x, y, f"{where}/{i}") for i, (x, y) in enumerate(zip(found, wanted, strict=True))]
    elif isinstance(wanted, float | torch.Tensor) and isinstance(found, float | torch.Tensor):
        x, y = torch.as_tensor(found).detach().double(), torch.as_tensor(wanted).detach().double()
        if x.shape != y.shape or not torch.equal(x.isfinite(), y.isfinite()):
            return {where: float("inf")}
        x, y = x.nan_to_num(), y.nan_to_num()
        return {where: float((x - y).abs().max() / y.abs().max().clamp_min(1e-3)) if x.numel() else 0.0}
    else:
        return {where: 0.0 if found == wanted else float("inf")}
    return {way: d for pair in pairs for way, d in pair.items()}


def cases(kinds: Sequence[str], levels: Sequence[str]) -> list[tuple[str, str]]:
    """The cases of these kinds at these levels, and the cases with which they are compared."""
    needed = {name: sorted({*levels, *(r for level in levels for r in references(level))}) for name in kinds}
    return [(name, level) for name in kinds for level in needed[name]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--levels", default=",".join(LEVELS))
    chosen = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    kinds, levels = chosen.kinds or list(KINDS), chosen.levels.split(",")
    with tempfile.TemporaryDirectory() as folder:
        found = outcomes(cases(kinds, levels), Path(folder))
    for name in kinds:
        for level in levels:
            short, long = verdict(KINDS[name], level, found)
            seconds = found[name, level][0].get("seconds", 0.0)
            print(
                f"{name:20} {level:10} {seconds:4.1f} s  {short}: {' '.join(long.split())[:400]}", flush=True
            )


if __name__ == "__main__":
    main()
