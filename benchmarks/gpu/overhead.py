"""The host's time for each instruction of a plan, with real kernels.

A step with tiny kernels is compared with a plain loop over the same chunks (`benchmarks/overhead.py`). The
difference, divided by the number of instructions, is the executor's cost for each instruction. A step with
large kernels shows whether the host issues them faster than the device runs them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from _chain import Chain
from overhead import MICROBATCHES, STAGES, plain_loop

import lightning_piper as piper
from lightning_piper.accelerators import synchronize
from lightning_piper.runtime import Executor, LocalTransport, run_local

# Kind of device -> name -> (width of a layer, rows of a microbatch), and number of measured steps.
SIZES = {
    "cpu": {"tiny kernels": (8, 2), "larger kernels": (64, 32)},
    "cuda": {"tiny kernels": (8, 2), "larger kernels": (4096, 4096)},
}
ROUNDS, WARM_UP = {"cpu": 20, "cuda": 100}, 10


def timed(run: Callable[[int], object], device: torch.device) -> tuple[float, float]:
    """Return the median microseconds until the host has issued a run, and until the device has done it."""
    issued, done = list[float](), list[float]()
    for i in range(WARM_UP + ROUNDS[device.type]):
        synchronize(device)
        start = time.perf_counter()
        made = run(i)
        issued.append(time.perf_counter() - start)
        synchronize(device)
        done.append(time.perf_counter() - start)
        del made
    return statistics.median(issued[WARM_UP:]) * 1e6, statistics.median(done[WARM_UP:]) * 1e6


def measured(device: torch.device) -> Iterator[dict[str, object]]:
    """Yield a row for each program and size of kernels."""
    split = piper.Split(num_microbatches=MICROBATCHES)
    programs = {"one logical device": [split], "1F1B": piper.schedules.one_f_one_b(STAGES, MICROBATCHES)}
    for kernels, (width, rows) in SIZES[device.type].items():
        for program, directives in programs.items():
            module = Chain(STAGES, width).to(device)
            batch = torch.randn(rows * MICROBATCHES, width, device=device)
            compiled = piper.compile(module, batch, directives, device=device)
            params = {name: p.detach() for name, p in module.named_parameters()}
            transport = LocalTransport(compiled.plans)
            executors = [
                Executor(plan, compiled.step, params, {}, transport, device)
                for plan in compiled.plans.values()
            ]
            loop = plain_loop(compiled, params, batch)
            ours = timed(lambda i, on=executors, x=batch: run_local(on, [x], i), device)
            plain = timed(lambda _, run=loop: run(), device)
            count = sum(len(plan.instructions) for plan in compiled.plans.values())
            yield {
                "name": f"{program}, {kernels}",
                "instructions": count,
                "us to issue a step": ours[0],
                "us to issue the loop": plain[0],
                "us of the host for an instruction": (ours[0] - plain[0]) / count,
                "us of a step": ours[1],
                "us of the loop": plain[1],
            }
