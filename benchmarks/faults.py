"""Injects faults into processes of a training run and checks the outcome.

    `python benchmarks/faults.py [count] [seed] [behind | spares | fewer]`

The training is PP2 x DP2 with ZeRO-3 and ZeRO-1 stages on four processes. A fault is a random rank, kind and
moment. After each fault, all other processes must end in time and name the right rank, and no process and no
damaged checkpoint may remain. A training that continues from the last checkpoint must end bitwise like an
undisturbed one. With `behind`, checkpoints are written asynchronously. See `tests/strategy/faults.py`.

Prints the seconds from each fault until the last other process ended, by kind and moment. The exit status is
1 if anything was wrong.

With `spares`, `count` trainings of several programs each lose processes at random moments, which spares replace. Each
training must end bitwise like an undisturbed one. See `tests/strategy/series.py`.

With `fewer`, the trainings have one spare each, so most losses leave fewer replicas. Each training must end bitwise like
fits that resume with these numbers of replicas. See `tests/strategy/fewer_series.py`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.strategy import fewer_series, series
from tests.strategy.faults import KINDS, MOMENTS, Outcome, draw, inject, undisturbed


def table(outcomes: list[Outcome]) -> str:
    lines = [f"{'':14}" + "".join(f"{kind:>14}" for kind in KINDS)]
    for moment in MOMENTS:
        cells = []
        for kind in KINDS:
            found = [o for o in outcomes if (o.fault.kind, o.fault.moment) == (kind, moment)]
            cells.append(" ".join(f"{o.seconds:.1f}" + ("!" if o.wrong else "") for o in found) or "-")
        lines.append(f"{moment:14}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def main(count: int, seed: int, behind: bool) -> int:
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        wanted = undisturbed(Path(folder, "undisturbed"))
        for i, fault in enumerate(draw(count, seed, behind)):
            began = time.monotonic()
            outcome = inject(fault, Path(folder, str(i)), wanted)
            outcomes.append(outcome)
            print(
                f"{i}: {fault}: {outcome.seconds:.1f} s ({time.monotonic() - began:.0f} s in all)", flush=True
            )
            for text in outcome.wrong:
                print(f"   WRONG: {text}", flush=True)
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"\nseconds until all other processes had ended ('!': something was wrong)\n\n{table(outcomes)}")
    print(f"\n{len(outcomes)} faults, {wrong} with something wrong")
    return bool(wrong)


def with_spares(series: Any, losses_each: int, count: int, seed: int) -> int:
    chance, wanted, all_lost, all_wrong = random.Random(seed), dict[tuple[str, int], Any](), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            kind, size = series.TRAININGS[i % len(series.TRAININGS)]
            if (kind, size) not in wanted:
                path = Path(folder, "undisturbed", f"{kind} {size}")
                wanted[kind, size] = series.undisturbed(path, kind, size)
            began = time.monotonic()
            losses = series.draw(kind, size, losses_each, chance)
            lost, wrong = series.suffer(Path(folder, str(i)), kind, size, losses, wanted[kind, size])
            all_lost, all_wrong = all_lost + lost, all_wrong + bool(wrong)
            taken = time.monotonic() - began
            print(f"{i}: {kind}, {size} processes: {lost} lost ({taken:.0f} s)", flush=True)
            for text in wrong:
                print(f"   WRONG: {text}\n   {losses}", flush=True)
    print(f"\n{all_lost} processes lost in {count} trainings, {all_wrong} trainings with something wrong")
    return bool(all_wrong)


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:] if text.isdigit()]
    number, first = given[0] if given else 8, given[1] if given[1:] else 0
    if "spares" in sys.argv:
        sys.exit(with_spares(series, 5, number, first))
    if "fewer" in sys.argv:
        sys.exit(with_spares(fewer_series, 3, number, first))
    sys.exit(main(number, first, "behind" in sys.argv))
