"""Prints the tables of `docs/paper.md`.

python -m benchmarks.paper r1 r2 r3 r4 r5 r6 slope one-stream lines
python -m benchmarks.paper r1 r4 r6 --model 1B
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.paper.contention import r6
from benchmarks.paper.lines import lines
from benchmarks.paper.memory import r3, slope
from benchmarks.paper.one_stream import one_stream
from benchmarks.paper.step_times import MODELS, r1, r2, r4, r5

CLAIMS: dict[str, Callable[[], None]] = {
    "r2": r2,
    "r3": r3,
    "r5": r5,
    "slope": slope,
    "one-stream": one_stream,
    "lines": lines,
}
OF_A_MODEL: dict[str, Callable[[str], None]] = {"r1": r1, "r4": r4, "r6": r6}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claims", nargs="+", choices=sorted({*CLAIMS, *OF_A_MODEL}))
    parser.add_argument("--model", default="9B", choices=MODELS, help="the model of r1, r4 and r6")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.claims:
        start = time.process_time()
        if name in OF_A_MODEL:
            OF_A_MODEL[name](options.model)
        else:
            CLAIMS[name]()
        print(f"\n{name}: {time.process_time() - start:.0f} s of one core\n", flush=True)


if __name__ == "__main__":
    main()
