"""Measures the time of a simulation as the plans grow. The time should grow linearly.

python benchmarks/simulate.py [--microbatches 256]
"""

from __future__ import annotations

import argparse
import time

import torch
from _chain import Chain

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.simulate import Link, Network, simulate

STAGES, WIDTH = 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=256)
    first = parser.parse_args().microbatches
    module, before = Chain(STAGES, WIDTH), 0.0
    print("microbatches   instructions   simulation s   us per instruction   times the row before")
    for microbatches in (first, 2 * first, 4 * first):
        program = tuple(piper.schedules.one_f_one_b(STAGES, microbatches))
        compiled = compile_step(capture(module, torch.randn(microbatches, WIDTH)), program, verify=False)
        count = sum(len(plan.instructions) for plan in compiled.plans.values())
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            simulate(
                compiled.dag, compiled.plans, {"F": 1.0, "B": 2.0}, Network(Link(latency=0.1, bandwidth=1e3))
            )
            seconds.append(time.perf_counter() - start)
        growth = f"{min(seconds) / before:.2f}" if before else ""
        print(
            f"{microbatches:12} {count:14} {min(seconds):14.3f} {1e6 * min(seconds) / count:20.2f}   "
            f"{growth}",
            flush=True,
        )
        before = min(seconds)


if __name__ == "__main__":
    main()
