"""How the peak of a device grows with the number of its stages, measured and predicted, in bytes of a stage.

Two replicas are logical devices of one process, and both have all stages. The peak of the process is divided
by 2. It includes parameters, optimizer states of AdamW, gradients and gathered parameters. ZeRO-1 and ZeRO-2
keep all parameters gathered. ZeRO-3 keeps a window of two gathered stages.

The measured peak differs from the predicted peak of a device for two reasons. The replicas reach their peaks
at different times. And a sum within a process needs memory for the result in addition to its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import lightning_piper as piper
from benchmarks.gpu.peaks import peak_with
from benchmarks.paper.memory import Layers, held, total
from lightning_piper.runtime import Executor, LocalTransport, local_shards_of, run_local, shards_of

STAGES, ROWS, REPLICAS = (2, 4, 8), 4, 2
WIDTHS = {"cpu": 128, "cuda": 4096}  # kind of device -> width of a layer


def started(compiled: piper.Compiled, module: Layers, device: torch.device) -> Callable[[int], None]:
    """Allocate the tensors of all logical devices, and return a function that runs a step and an update."""
    whole = {name: p.detach() for name, p in module.named_parameters()}
    plans, transport = compiled.plans, LocalTransport(compiled.plans)
    executors, optimizers, updated = [], [], []
    for plan in plans.values():
        shards = shards_of(plan, whole, device)
        sharded = {name for bucket in shards for name in bucket.names}
        own = {
            name: whole[name].to(device, copy=True)
            for name in compiled.params_on(plan.device)
            if name not in sharded
        }
        executors.append(Executor(plan, compiled.step, own, {}, transport, device, shards))
        updated.append(own | local_shards_of(plan, shards))
        optimizers.append(torch.optim.AdamW(updated[-1].values(), fused=True))
    batch = torch.ones(compiled.dag.size, module.layers[0].in_features, device=device)  # type: ignore[arg-type]

    def step(seed: int) -> None:
        results = run_local(executors, [batch], seed)
        for tensors, optimizer in zip(updated, optimizers, strict=True):
            for name, grad in results.pop(0).grads.items():  # `zero_grad` frees these gradients
                tensors[name].grad = grad.view(tensors[name].shape)
            optimizer.step()
            optimizer.zero_grad()

    return step


def peaks(zero: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the measured and the predicted peaks for each of `STAGES`, in bytes of a stage."""
    found, predicted = [], []
    width = WIDTHS[device.type]
    for stages in STAGES:
        module = Layers(stages, width)
        program: list[Any] = [piper.Place(devices=list(range(REPLICAS))), piper.Replicate(zero=zero)]
        compiled = piper.compile(module, torch.zeros(ROWS, width), program, device=device)
        of_stage = width * width * 4
        (one,) = held(compiled, range(1))
        predicted.append(total(one, zero, REPLICAS) / of_stage)
        peak = peak_with(device, partial(started, compiled, module, device))
        found.append(peak / REPLICAS / of_stage)
    return found, predicted


def measured(device: torch.device) -> Iterator[dict[str, object]]:
    """Yield two rows for each level of ZeRO: measured and predicted."""
    for zero in range(4):
        name = f"ZeRO-{zero}" if zero else "data parallelism"
        for how, values in zip(("measured", "predicted"), peaks(zero, device), strict=True):
            two, four, eight = values
            figures = {f"{n} stages": x for n, x in zip(STAGES, values, strict=True)}
            slopes = {"slope 2 to 4": (four - two) / 2, "slope 4 to 8": (eight - four) / 4}
            yield {"name": f"{name}, {how}", **figures, **slopes}
