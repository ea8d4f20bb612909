"""Prints the tables of `docs/paper.md`.

python -m benchmarks.paper r1 r2 r3 r4 r5 r6 slope lines
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.paper.contention import r6
from benchmarks.paper.lines import lines
from benchmarks.paper.memory import r3, slope
from benchmarks.paper.step_times import r1, r2, r4, r5

CLAIMS: dict[str, Callable[[], None]] = {
    **{"r1": r1, "r2": r2, "r3": r3, "r4": r4, "r5": r5, "r6": r6},
    **{"slope": slope, "lines": lines},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claims", nargs="+", choices=CLAIMS)
    torch.set_num_threads(1)
    for name in parser.parse_args().claims:
        start = time.process_time()
        CLAIMS[name]()
        print(f"\n{name}: {time.process_time() - start:.0f} s of one core\n", flush=True)


if __name__ == "__main__":
    main()
