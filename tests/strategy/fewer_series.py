"""Series of losses in trainings that have one spare, so that most losses leave fewer replicas. Each training must end
with the bits of fits that resume, one after another, with these numbers of replicas from checkpoints of these steps."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.distributed.processes import Ended, launch_trainings, run_ranks
from tests.strategy.fewer import EPOCHS, SAMPLES, train
from tests.strategy.scenarios import equal
from tests.strategy.series import LIMIT
from tests.strategy.spared import Loss, samples

# (kind of the training, number of processes)
TRAININGS = tuple(
    (f"{kind} in order", size)
    for kind, size in (
        ("0", 3),
        ("uncaptured", 3),
        ("3", 4),
        ("1", 3),
        ("3 averages", 3),
        ("0", 4),
        ("2", 3),
        ("uncaptured", 4),
    )
)
MOMENTS = ("data", "copy", "copied", "soon", "forward", "step", "update", "between", "validation")
AT = re.compile(r"continues on (\d+) process.* before batch (\d+)")


def draw(kind: str, size: int, count: int, chance: random.Random) -> list[Loss]:
    """Draw losses in `count` different batches: one rank, two ranks at once, or a second loss while the processes
    connect again or repeat the batch. A loss of a rank that the training does not have any more does not happen."""
    losses: list[Loss] = []
    for batch in sorted(chance.sample(range(2, 13), count)):
        moment, position = chance.choice(MOMENTS if batch % 2 else MOMENTS[:-1]), chance.randrange(1, 40)
        losses.append(Loss(chance.randrange(1, size), moment, batch, position))
        number, rank, second = len(losses) - 1, chance.randrange(1, size), chance.random()
        if second < 0.2:
            losses.append(Loss(rank, chance.choice(MOMENTS), batch, position, number))
        elif second < 0.4:
            losses.append(Loss(rank, "connecting", batch, round(10 ** chance.uniform(0, 3.5)), number))
        elif second < 0.6:
            losses.append(Loss(rank, moment, batch, position))
    return losses


def undisturbed(folder: Path, kind: str, size: int) -> dict[str, Any]:
    return _resumed(folder, kind, size, None)


def suffer(
    folder: Path, kind: str, size: int, losses: list[Loss], wanted: dict[str, Any]
) -> tuple[int, list[str]]:
    """Train with losses and one spare. Return how many processes were lost, and the conditions that do not hold, in
    words."""
    lost = folder / "lost"
    ends = run_ranks(size + 1, train, lost, lost, size, kind, losses, joined=False, limit=LIMIT)
    if isinstance(first := ends[0].result, dict):
        wanted = resumed_as(folder, kind, size, first["told"], wanted)
    return sum((end.exitcode or 0) < 0 for end in ends), [*_wrong(ends, size, wanted)]


def resumed_as(
    folder: Path, kind: str, size: int, told: Sequence[str], wanted: dict[str, Any]
) -> dict[str, Any]:
    """Return the result of fits that resume as the warnings of a training with losses say.

    Args:
        kind, size: The kind of the training, and its number of processes before the losses.
        told: The warnings.
        wanted: The result of `undisturbed`.
    """
    path, begun, left = wanted["saved"], 0, size
    for each in told:
        found = AT.search(each)
        assert found is not None, each
        after, number = map(int, found.groups())
        if after < left:
            if begun and number > begun:
                path = _resumed(folder / str(number), kind, left, path / f"step={begun}.ckpt")["saved"]
            begun, left = number, after
    return _resumed(folder / "end", kind, left, path / f"step={begun}.ckpt") if begun else wanted


def _resumed(folder: Path, kind: str, size: int, path: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = launch_trainings(size, train, folder, folder, size, kind, (), path)[0]
    return found | {"saved": folder / "saved"}


def _wrong(ends: list[Ended], size: int, wanted: dict[str, Any]) -> Iterator[str]:
    results = [end.result for end in ends if isinstance(end.result, dict)]
    if len(results) != wanted["devices"]:
        yield f"{len(results)} of {wanted['devices']} processes have finished"
    for rank, end in enumerate(ends):
        if end.exitcode is None:
            yield f"process {rank} hangs: {end.said[-3000:]}"
        elif end.exitcode > 0 or isinstance(end.result, Exception):
            yield f"process {rank} has failed: {end.said[-3000:]}"
    for result in results:
        same = [
            name for name in ("values", "steps", "devices", "validated") if equal(result[name], wanted[name])
        ]
        if len(same) < 4:
            yield f"a process has other results; the same are {same}"
    # A few samples repeat at the end of an epoch if the number of replicas does not divide the samples that are left.
    most, x = SAMPLES + (size > 3) * size * (size - 1) // 2, samples(SAMPLES)[1]
    for epoch in results[0]["epochs"] if results and results[0]["told"] else ():
        if not SAMPLES <= epoch["count"] <= most or epoch["largest"] != float(x.max()):
            yield f"an epoch has other logged values: {epoch}"
        if most == SAMPLES and abs(epoch["mean"] - float(x.mean())) > 1e-12:
            yield f"an epoch has another mean: {epoch}"
    if results and len(results[0]["epochs"]) < EPOCHS:
        yield f"{len(results[0]['epochs'])} epochs have ended"
