"""Runs programs on the simulated accelerator in random orders and compares them with the CPU.

The table has a row for each program. The number of differences must be 0.

    python benchmarks/accelerator.py --orders 1000            # orders in total, over both transports
    python benchmarks/accelerator.py --only "ZeRO|experts"    # a pattern
"""

from __future__ import annotations

import argparse
import copy
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch

import lightning_piper as piper
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.compiler import compile_step
from lightning_piper.directives import (
    Directive,
    Offload,
    Place,
    Recompute,
    Replicate,
    ShardExperts,
    ShardWeights,
    Split,
)
from lightning_piper.schedules import (
    dualpipev,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    zb_h2,
    zbv,
    zero_bubble,
)
from lightning_piper.testing import Spec, case, make_batch
from lightning_piper.testing.simulated import Batch, Values, first_difference, run_steps

Program = tuple[list[Batch], Values]  # batches of two or more steps; parameters and buffers by name
CPU = torch.device("cpu")
GROUPS = ([0, 2], [1, 3])
CHAIN = Spec(("linear", "attention", "norm", "residual"), (0, 1, 2, 3))
PAIR = Spec(("attention", "norm"), (0, 1), loss="tokens")


def captured(spec: Spec, size: int, device: torch.device) -> tuple[CapturedStep, Values]:
    """Return the step of a model for a device, and the model's tensors in host memory."""
    one = case(spec, size)
    if device.type == "cpu":
        return one.step, one.tensors
    batch = {name: x.to(device) for name, x in one.batch.items()}
    return capture(copy.deepcopy(one.module).to(device), batch, device), one.tensors


def steps(
    spec: Spec,
    size: int,
    program: Sequence[Directive],
    accumulated: int = 1,
    device: torch.device = CPU,
) -> Program:
    """Return the batches of two steps, `accumulated` batches each, under a program for a device, and the
    model's tensors. All batches differ."""
    step, held = captured(spec, size, device)
    compiled = compile_step(step, tuple(program))
    batches = []
    for i in range(2 * accumulated):
        leaves = list(make_batch(spec, size, seed=10 + i).values())
        batches.append(Batch(compiled.dag, compiled.plans, leaves, last=i % accumulated == accumulated - 1))
    return batches, held


def replicated(device: torch.device, level: str = "", accumulated: int = 1, **more: object) -> Program:
    """Return batches and tensors for 1F1B of two stages with two replicas and two microbatches. `level` and
    `more` are fields of `Replicate`."""
    levels = {level: True} if level else {}
    both = _both(**levels, **more)
    program = [*one_f_one_b(2, 2, devices=[list(g) for g in GROUPS]), both]
    return steps(PAIR, 8, program, accumulated, device)


def _both(**fields: Any) -> Replicate:
    return Replicate(filter={}, devices=[list(g) for g in GROUPS], bucket_size=0.0003, **fields)


def sizes_of(device: torch.device, spec: Spec, sizes: Sequence[int]) -> Program:
    """Return batches and tensors for two steps, each of which accumulates gradients over batches of these
    sizes. Each size has its own plans and executors.
    """
    program = [Place(filter={}, devices=[0, 1]), Replicate(filter={}, devices=[0, 1], bucket_size=0.0003)]
    (step, held), batches, compiled = captured(spec, sizes[0], device), [], {}
    for i, size in enumerate([*sizes, *sizes]):
        if size not in compiled:
            compiled[size] = compile_step(step, tuple(program), size)
        found = compiled[size]
        leaves = list(make_batch(spec, size, seed=10 + i).values())
        batches.append(Batch(found.dag, found.plans, leaves, last=i % len(sizes) == len(sizes) - 1))
    return batches, held


def experts(device: torch.device, **level: bool) -> Program:
    spec = Spec(("experts", "crowded"), (0, 1))
    program = [*one_f_one_b(2, 2, devices=[list(g) for g in GROUPS]),
               _both(**level),
               ShardExperts(filter={"EP": "*"}, devices=[list(g) for g in GROUPS])]  # fmt: skip
    return steps(spec, 8, program, device=device)


def tensors(device: torch.device, sequence: bool) -> Program:
    """Return batches and tensors for a tensor-parallel model on two devices, with two replicas. With
    `sequence`, values between the layers are sharded too."""
    torch.manual_seed(0)
    module = _Divided().double()
    batch = torch.randn(8, 4, 8, dtype=torch.float64)
    values = {"LAYER=*": 1} if sequence else None
    program = [
        Place(filter={}, devices=[[0, 1], [2, 3]], axes=["data", "tp"]),
        Split(filter={}, dim_name="MB", num_microbatches=2),
        ShardWeights(
            filter={},
            devices=None,
            axis="tp",
            stream="tp",
            params={"*.up.weight": 0, "*.down.weight": 1},
            values=values,
        ),
        Replicate(filter={}, devices=[0, 1, 2, 3], shard_optimizer=True),
    ]
    step = capture(module.to(device), batch, device)
    compiled = compile_step(step, tuple(program))
    held = {step.canonical[n]: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}
    return [Batch(compiled.dag, compiled.plans, [batch + i]) for i in range(2)], held


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 32, bias=False), torch.nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class _Divided(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(_Block() for _ in range(2))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            with piper.annotate("LAYER", i):
                batch = block(batch)
        with piper.annotate("LAYER", 2):
            return batch.square().mean()


# Name -> a function that returns the program for a device.
PROGRAMS: dict[str, Callable[[torch.device], Program]] = {
    "GPipe, 4 stages": lambda d: steps(CHAIN, 8, gpipe(4, 2), device=d),
    "1F1B, 2 stages": lambda d: steps(PAIR, 6, one_f_one_b(2, 3), device=d),
    "1F1B, 4 stages": lambda d: steps(CHAIN, 8, one_f_one_b(4, 4), device=d),
    "interleaved": lambda d: steps(CHAIN, 8, interleaved_one_f_one_b(4, 4, 2), device=d),
    "zero bubble": lambda d: steps(PAIR, 6, zero_bubble(2, 3), device=d),
    "zero bubble, H2": lambda d: steps(PAIR, 6, zb_h2(2, 3), device=d),
    "ZBV": lambda d: steps(CHAIN, 8, zbv(4, 4), device=d),
    "DualPipeV": lambda d: steps(CHAIN, 8, dualpipev(4, 4), device=d),
    "replicas": lambda d: replicated(d),
    "ZeRO-1": lambda d: replicated(d, "shard_optimizer"),
    "ZeRO-2": lambda d: replicated(d, "shard_grads"),
    "ZeRO-3": lambda d: replicated(d, "shard_params"),
    "ZeRO-3, float32 sums": lambda d: replicated(d, "shard_params", reduce_dtype="float32"),
    "accumulated over 3 batches": lambda d: replicated(d, accumulated=3),
    "ZeRO-1, accumulated": lambda d: replicated(d, "shard_optimizer", accumulated=2),
    "accumulated over sizes": lambda d: sizes_of(d, Spec(("linear", "residual"), (0, 0)), (8, 4)),
    "experts": lambda d: experts(d),
    "experts, ZeRO-2": lambda d: experts(d, shard_grads=True),
    "tensors in two parts": lambda d: tensors(d, False),
    "tensors and sequence": lambda d: tensors(d, True),
    "second passes": lambda d: steps(PAIR, 6, [*one_f_one_b(2, 3), Recompute(filter={})], device=d),
    "stored on the host": lambda d: steps(PAIR, 6, [*one_f_one_b(2, 3), Offload(filter={}, ahead=1)], device=d),
    "second passes stored": lambda d: steps(PAIR, 6,
        [*zero_bubble(2, 3), Recompute(filter={}), Offload(filter={}, ahead=2)], device=d),
    "dropout": lambda d: steps(Spec(("dropout", "attention"), (0, 1)), 6, one_f_one_b(2, 3), device=d),
    "batch norm": lambda d: steps(Spec(("batchnorm", "linear"), (0, 1)), 6, one_f_one_b(2, 3), device=d),
    "sums over the whole batch": lambda d: steps(Spec(("synced", "linear", "synced"), (0, 1, 1)), 8, [
        Split(filter={}, dim_name="MB", num_microbatches=2),
        *(Place(filter={"PP": i}, devices=list(g)) for i, g in enumerate(GROUPS)), _both()], device=d),
    "metric objects": lambda d: steps(Spec(("scored", "scored"), (0, 1)), 6, one_f_one_b(2, 3), device=d),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=1000)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    chosen = {name: make for name, make in PROGRAMS.items() if re.search(options.only, name)}
    each = -(-options.orders // (2 * len(PROGRAMS)))
    print(f"{'program':<28} {'devices':>7} {'orders':>7} {'differences':>12} {'ms/order':>9}")
    total = 0
    for name, make in chosen.items():
        batches, held = make(CPU)
        expected, start, found = run_steps(batches, held, None), time.perf_counter(), []
        for over in ("devices", "one device"):
            found += [
                x for x in (first_difference(batches, held, range(each), over, expected=expected),) if x
            ]  # type: ignore[arg-type]
        total += 2 * each
        took = (time.perf_counter() - start) / (2 * each) * 1000
        print(
            f"{name:<28} {len(batches[0].plans):>7} {2 * each:>7} {len(found):>12} {took:>9.0f}", flush=True
        )
        for text in found:
            print("    " + text[:400])
    print(f"{total} orders")


if __name__ == "__main__":
    main()
