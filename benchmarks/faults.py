"""Injects faults into processes of a training run and checks the outcome.

    `python benchmarks/faults.py [count] [seed] [behind]`

The training is PP2 x DP2 with ZeRO-3 and ZeRO-1 stages on four processes. A fault is a random rank, kind and
moment. After each fault, all other processes must end in time and name the right rank, and no process and no
damaged checkpoint may remain. A training that continues from the last checkpoint must end bitwise like an
undisturbed one. With `behind`, checkpoints are written asynchronously. See `tests/strategy/faults.py`.

Prints the seconds from each fault until the last other process ended, by kind and moment. The exit status is
1 if anything was wrong.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

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


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:] if text.isdigit()]
    sys.exit(main(given[0] if given else 8, given[1] if given[1:] else 0, "behind" in sys.argv))
