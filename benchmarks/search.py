"""Measures the time of a search and the gap that it proves. Models and machines are given as data.

For each case, it prints the time, the best step found, and the maximum distance from the best step of the
space.

    python benchmarks/search.py [--case NAME] [--gap SHARE] [--budget N]
"""

from __future__ import annotations

import argparse
import time

from lightning_piper.search import Block, Work, Workload, best_of
from lightning_piper.simulate import Link
from lightning_piper.simulate.hardware import Hardware

LINKS = ((8, Link(5e-6, 400e9)), (65536, Link(1e-5, 50e9)))
H100 = Hardware("H100-80GB", 80 * 2**30, {"bfloat16": 989e12}, 3.35e12, LINKS, Link(1e-5, 50e9), 2**38, 0.5)


def transformer(
    layers: int,
    width: int,
    hidden: int,
    share: int,
    vocabulary: int,
    length: int,
    samples: int,
    degrees: tuple[int, ...] = (1, 2, 4, 8),
) -> Workload:
    """Return a Llama-like model in bfloat16 with states in float32.

    Operations are counted as in Megatron-LM. Activations are counted as there for attention that saves no
    scores (Korthikanti et al. 2022).

    Args:
        layers, width, hidden, vocabulary: Sizes of the model.
        share: The number of heads that share keys and values.
        length: The tokens of a sample.
        samples: The samples of a step.
        degrees: The tensor-parallel degrees.
    """
    rate = H100.flops["bfloat16"] * H100.efficiency
    layer = 2 * width * width + 2 * width * width // share + 3 * width * hidden
    passed = 2 * length * width

    def work(params: int, kept: int, attends: bool, t: int) -> Work:
        seconds = (2 * params + (2 * length * width if attends else 0)) * length / rate / t
        return Work(
            seconds,
            seconds,
            2 * params * length / rate / t,
            kept // t,
            kept // t // 2,
            passed,
            2 * passed if attends else passed,
        )

    kept = length * (16 * width + 6 * hidden)
    one = {(1, t): work(layer, kept, True, t) for t in degrees}
    ends = {(1, t): work(width * vocabulary, 4 * length * vocabulary, False, t) for t in degrees}
    first = {(1, t): Work(1e-6, 0.0, 1e-6, passed, passed, passed, passed) for t in degrees}
    table, words = 2 * width * vocabulary, frozenset({"embed", "head"})
    blocks = (
        Block("embed", first, {"embed": table}, words),
        *(
            Block(f"layers.{k}", one, {f"layers.{k}": 2 * layer}, frozenset({f"layers.{k}"}))
            for k in range(layers)
        ),
        Block("head", ends, {"head": table}, words),
    )
    return Workload(blocks, samples, 6.0)


# Name -> workload, devices, budget, and the promised seconds.
CASES = {
    "Llama-3-405B, 1,024 devices": (
        lambda: transformer(126, 16384, 53248, 16, 128256, 8192, 1024),
        1024,
        5000,
        60,
    ),
    "64 layers of 8192, 4,096 devices": (
        lambda: transformer(64, 8192, 28672, 8, 128256, 8192, 4096),
        4096,
        5000,
        300,
    ),
    "Llama-3-405B, 16,384 devices": (
        lambda: transformer(126, 16384, 53248, 16, 128256, 8192, 4096),
        16384,
        100,
        15,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--budget", type=int, help="the budget of each case (default: its own)")
    parser.add_argument("--case", choices=[*CASES], action="append")
    given = parser.parse_args()
    for name in given.case or CASES:
        make, devices, budget, promised = CASES[name]
        start = time.perf_counter()
        found = best_of(make(), H100, devices, gap=given.gap, budget=given.budget or budget, margin=0.05)
        print(f"{name}: {time.perf_counter() - start:.1f} s ({promised} are promised)\n{found}\n")


if __name__ == "__main__":
    main()
