"""Measures the peak memory and the time of a linear layer with a cross entropy, forward and backward: torch's
`linear` and `cross_entropy`, torch's `linear_cross_entropy` in chunks, and Piper's.

Each measurement is a process of its own. The memory is the peak of the process (of the device on CUDA) above its
memory before the forward pass. It includes the gradients. The time is
the median of the processor times of the repetitions.

    python benchmarks/linear_cross_entropy.py [--rows 4096] [--width 512] [--classes 32768] [--dtype float32]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper

MEBI = 2**20
REPETITIONS = 3


def whole(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def torchs_chunks(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()  # torch >= 2.13
    return F.linear_cross_entropy(hidden, weight, target, options=options)


KINDS = {"whole": whole, "torch's chunks": torchs_chunks, "chunks": piper.linear_cross_entropy}


def peak(device: torch.device) -> int:
    """Return the largest memory so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(options: argparse.Namespace) -> str:
    """Return the peak memory in MiB and the median time in seconds of one kind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"device": device, "dtype": getattr(torch, options.dtype)}
    hidden = torch.randn(options.rows, options.width, **about).requires_grad_()
    weight = (torch.randn(options.classes, options.width, **about) / options.width**0.5).requires_grad_()
    target = torch.randint(options.classes, (options.rows,), device=device)
    KINDS[options.kind](hidden[:8], weight, target[:8]).backward()  # starts threads and libraries
    hidden.grad = weight.grad = None
    before, times = peak(device), []
    for _ in range(REPETITIONS):
        start = time.process_time()
        KINDS[options.kind](hidden, weight, target).backward()
        float(weight.grad[0, 0])
        times.append(time.process_time() - start)
        hidden.grad = weight.grad = None
    return f"{(peak(device) - before) / MEBI:.0f} {statistics.median(times):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in [("rows", 4096), ("width", 512), ("classes", 32768)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kind", choices=KINDS)
    options = parser.parse_args()
    if options.kind:
        print(measure(options))
        return
    print(f"{'':16} {'MiB':>8} {'seconds':>8}")
    for kind in KINDS:
        command = [sys.executable, *sys.argv, "--kind", kind]
        memory, seconds = subprocess.check_output(command, text=True).split()
        print(f"{kind:16} {memory:>8} {seconds:>8}")


if __name__ == "__main__":
    main()
