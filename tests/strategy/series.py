"""Series of losses in trainings with spares, at random ranks and moments. Each training must end with the bits of an
undisturbed one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.distributed.processes import Ended, launch_trainings, run_ranks
from tests.strategy import spared
from tests.strategy.fitting import sharing_captures, trace, traced_once
from tests.strategy.scenarios import equal
from tests.strategy.spared import (
    ADDING,
    ALONG_AXES,
    BATCHES,
    EPOCHS,
    MOMENTS,
    MORE,
    PROGRAMS,
    RESULTS,
    Loss,
    train_along_axes,
)

# (kind of the training, number of processes)
TRAININGS = (
    ("replicas", 3),
    ("zero1", 3),
    ("zero2", 3),
    ("zero3", 3),
    ("stages", 2),
    ("stages of replicas", 4),
    ("uncaptured", 3),
    ("manual", 3),
    ("averages converted", 3),
    ("rare copies", 3),
    ("replicas divided", 3),
    ("stages of replicas divided", 4),
    ("sequences", 4),
    ("experts", 4),
)
LIMIT = timedelta(seconds=1500)  # a training that takes longer hangs, also on a slow machine


@traced_once
@sharing_captures
def train(
    rank: int, folder: Path, size: int, moment: str, kind: str, losses: Sequence[Loss] = ()
) -> dict[str, Any]:
    if kind in ALONG_AXES:
        return train_along_axes(rank, folder, kind, losses)
    return spared.train(rank, folder, size, moment, kind, losses)


def prepare(folder: Path, size: int, moment: str, kind: str, losses: Sequence[Loss] = ()) -> None:
    """Trace the steps once for all processes."""
    if kind in ("uncaptured", "manual", "averages converted", *ALONG_AXES):
        return
    samples = 4 * PROGRAMS.get(kind.removesuffix(" divided"), {}).get("dp", size)
    for step, *loader in ("training_step",), ("validation_step", None):
        module = spared.Net(norms=True)
        module.setup("fit")
        trace(module, spared.samples(samples), [samples, 4, 2], step, *loader, precision="64-true")


def draw(kind: str, size: int, count: int, chance: random.Random) -> list[Loss]:
    """Draw losses in `count` different batches: one rank, two ranks at once, or a second loss while the processes
    connect again or repeat the batch."""
    losses: list[Loss] = []
    batches = 10 if kind in ALONG_AXES else EPOCHS * BATCHES
    for batch in sorted(chance.sample(range(2, batches - 1), count)):
        loss = _draw(kind, size, batch, chance)
        losses.append(loss)
        number, second = len(losses) - 1, chance.random()
        if second < 0.2:
            losses.append(_draw(kind, size, batch, chance, number))
        elif second < 0.4:
            milliseconds = round(10 ** chance.uniform(0, 3.5))
            losses.append(Loss(chance.randrange(1, size), "connecting", batch, milliseconds, number))
        elif second < 0.6 and size > 2:
            rank = chance.choice([each for each in range(1, size) if each != loss.rank])
            losses.append(Loss(rank, loss.moment, batch, loss.position))
    return losses


def _draw(kind: str, size: int, batch: int, chance: random.Random, after: int | None = None) -> Loss:
    moments = [each for each in (*MOMENTS, *MORE) if each != "connecting"]
    if kind.endswith("divided"):
        moments += [ADDING] * 8
    if batch % 2 == 0 or kind in ALONG_AXES:  # no validation follows
        moments = [each for each in moments if each not in ("validation", "save")]
    if (batch + 1) % BATCHES or kind in ALONG_AXES:
        moments.remove("epoch")
    if kind in ALONG_AXES:
        moments.remove("data")
    return Loss(chance.randrange(1, size), chance.choice(moments), batch, chance.randrange(1, 40), after)


def undisturbed(folder: Path, kind: str, size: int) -> dict[str, Any]:
    found: dict[str, Any] = launch_trainings(size, train, folder, folder, size, "", kind, prepare=prepare)[0]
    return found


def suffer(
    folder: Path, kind: str, size: int, losses: list[Loss], wanted: dict[str, Any], spares: int | None = None
) -> tuple[int, list[str]]:
    """Train with losses, and a spare for each unless a number of spares is given. Return how many processes were lost,
    and the conditions that do not hold, in words."""
    given = folder, size, "", kind, losses
    processes = size + (len(losses) if spares is None else spares)
    ends = run_ranks(processes, train, folder, *given, prepare=prepare, joined=False, limit=LIMIT)
    lost = sum(end.exitcode is not None and end.exitcode < 0 for end in ends)
    return lost, [*_wrong(ends, size, wanted)]


def _wrong(ends: list[Ended], size: int, wanted: dict[str, Any]) -> Iterator[str]:
    done = Counter(type(end.result) for end in ends)[dict]
    if done != size:
        yield f"{done} of {size} processes have finished"
    for rank, end in enumerate(ends):
        if end.exitcode is None:
            yield f"process {rank} hangs: {end.said[-3000:]}"
        elif isinstance(end.result, dict):
            same = [name for name in RESULTS if name not in wanted or end.result[name] == wanted[name]]
            if len(same) < len(RESULTS) or not equal(end.result["values"], wanted["values"]):
                yield f"process {rank} has other results; the same are {same}"
        elif end.exitcode > 0 or (end.exitcode == 0 and end.result is not None):
            yield f"process {rank} has failed: {end.said[-3000:]}"
