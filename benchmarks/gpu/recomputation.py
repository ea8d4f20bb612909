"""Predicted and measured peaks of a step's values with recomputation and offload, on one logical device.

The values of a step do not include parameters and optimizer states. On a CPU, the measured values do not
include stored values either, because their host memory is allocated in the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _gpt import Config, Module, batch

import lightning_piper as piper
from benchmarks.gpu.peaks import growth_in
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.simulate import simulate

CONFIGS = {
    "cpu": Config(cut=(2, 2), d=64, heads=2, seq=32, vocab=128),
    "cuda": Config(cut=(6, 6), d=1024, heads=16, seq=512, vocab=8192),
}
SEQUENCES, MICROBATCHES = 16, 4
# The forward passes of all microbatches run before the backward passes, so saved values decide the peak.
CUT: list[Any] = [
    piper.Place(devices=[0]),
    piper.Split(num_microbatches=MICROBATCHES),
    piper.Order(filters=[{"PASS": "F"}, {"PASS": "B"}]),
]
KEPT: dict[str, list[Any]] = {
    "all values kept": [],
    "recomputed": [piper.Recompute(filter={})],
    "recomputed, products kept": [piper.Recompute(filter={}, keep=["*mm"])],
    "stored on the host": [piper.Offload(filter={}, ahead=1)],
    "recomputed, inputs stored": [piper.Recompute(filter={}), piper.Offload(filter={}, ahead=1)],
}


def measured(device: torch.device) -> Iterator[dict[str, object]]:
    """Yield a row for each choice of saved values."""
    # The gradients of all choices must have the same bits, which needs kernels that sum in a fixed order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    config = CONFIGS[device.type]
    module = Module(config, layers=True).to(device)
    leaves = [x.to(device) for x in batch(config, 0, SEQUENCES)]
    params = {name: p.detach() for name, p in module.named_parameters()}
    first: dict[str, torch.Tensor] = {}
    for name, more in KEPT.items():
        compiled = piper.compile(module, tuple(leaves), [*CUT, *more], device=device)
        (plan,) = compiled.plans.values()
        executor = Executor(plan, compiled.step, params, {}, LocalTransport(compiled.plans), device)
        grads = run_local([executor], leaves, 0)[0].grads
        first = first or {key: x.clone() for key, x in grads.items()}
        others = sum(not torch.equal(x, first[key]) for key, x in grads.items())
        del grads
        found = growth_in(device, lambda one=executor: run_local([one], leaves, 0))
        predicted = simulate(compiled.dag, compiled.plans).devices[plan.device].peak_bytes
        said = {"outcome": "failed", "said": f"{others} gradients have other bits"} if others else {}
        figures = {"predicted MB": predicted / 1e6, "measured MB": found / 1e6}
        yield {"name": name, **figures, "measured / predicted": found / predicted, **said}
