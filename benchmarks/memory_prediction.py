"""Compares the predicted and the measured memory of a step's values: one step of a GPT on two processes over
gloo.

The measured value is the maximum of bytes allocated minus bytes freed during the step, from torch's profiler.
It includes workspaces of kernels. It does not include parameters and optimizer states, which are allocated
before. The table has the device with the larger error. Messages go through gloo only, because the profiler
does not see gradients in memory that processes share.

With `Offload`, neither value includes the stored values: their host memory is allocated in the step before.

    python benchmarks/memory_prediction.py [--sequences 16] [--programs ZeRO-3 "tensor axis"]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _gpt import Config, Module, batch
from _launch import is_rank, join, launch
from _memory import MB, growth_of

import lightning_piper as piper
from lightning_piper import Offload, Place, Recompute, Replicate, ShardWeights, Split, schedules
from lightning_piper.runtime import Executor, ProcessTransport, shards_of
from lightning_piper.runtime.same_machine import shared_memory
from lightning_piper.simulate import simulate

CPU = torch.device("cpu")
CONFIG = Config(cut=(2, 2), d=256, heads=4, seq=128, vocab=2048)
KEPT: dict[str, list[Any]] = {
    "all kept": [],
    "recomputed": [Recompute(filter={})],
    "but products": [Recompute(filter={}, keep=["*mm"])],
    "a fraction": [Recompute(filter={}, keep=0.3)],
    "offloaded": [Offload(filter={})],
    "both": [Recompute(filter={}), Offload(filter={}, ahead=2)],
}


def replicas(**level: Any) -> list[Any]:
    place, split = Place(filter={}, devices=[0, 1]), Split(filter={}, dim_name="MB", num_microbatches=2)
    return [place, split, Replicate(filter={}, devices=[0, 1], **level)]


def programs(module: Module, sequences: int) -> dict[str, list[Any]]:
    divided = {"*.up.weight": 0, "*.down.weight": 1}
    tensor = [Place(filter={}, devices=[0, 1]), ShardWeights(filter={}, devices=[0, 1], params=divided)]
    along = piper.tensor_parallel(module, batch(CONFIG, 0, sequences), degree=2, sequence=True)
    return {
        "1F1B": schedules.one_f_one_b(stages=2, microbatches=4),
        "GPipe": schedules.gpipe(stages=2, microbatches=4),
        "zero bubble": schedules.zero_bubble(stages=2, microbatches=4),
        "replicas": replicas(),
        "ZeRO-1": replicas(shard_optimizer=True),
        "ZeRO-3": replicas(shard_params=True),
        "tensor axis": tensor,
        "sequences": along,
    }


def measured(module: Module, program: list[Any], rank: int, sequences: int) -> tuple[int, int]:
    """Return bytes on this device: predicted, and measured."""
    leaves = batch(CONFIG, 0, sequences)
    compiled = piper.compile(module, leaves, program)
    plan, params = compiled.plans[rank], {name: p.detach() for name, p in module.named_parameters()}
    with mock.patch.object(shared_memory, "READERS", 0):
        transport = ProcessTransport(compiled.plans, ranks=range(2), device=CPU)
    executor = Executor(plan, compiled.dag.step, params, {}, transport, CPU, shards_of(plan, params, CPU))
    own = slice(plan.replica * plan.local_batch_size, (plan.replica + 1) * plan.local_batch_size)
    mine = [x[own] for x in leaves]
    executor.step(mine, seed=0)
    grown = growth_of(lambda: executor.step(mine, seed=0))
    transport.close()
    return simulate(compiled.dag, compiled.plans).devices[rank].peak_bytes, grown


def work(sequences: int, chosen: Sequence[str]) -> None:
    rank, _ = join()
    module = Module(CONFIG, layers=True)
    if not rank:
        print(f"{'program':14} {'kept':14} {'predicted MB':>13} {'measured MB':>12} {'ratio':>7}")
    for name, program in programs(module, sequences).items():
        for kept, more in KEPT.items() if name in chosen or not chosen else ():
            here = torch.tensor(measured(module, [*program, *more], rank, sequences))
            both = [torch.empty_like(here) for _ in range(2)]
            dist.all_gather(both, here)
            predicted, found = max((x.tolist() for x in both), key=lambda pair: abs(pair[0] / pair[1] - 1))
            if not rank:
                print(
                    f"{name:14} {kept:14} {predicted / MB:13.2f} {found / MB:12.2f} {predicted / found:7.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--programs", nargs="*", default=[], help="of the first column; all, when left out")
    arguments = parser.parse_args()
    if is_rank():
        work(arguments.sequences, arguments.programs)
    else:
        launch(2, *sys.argv[1:])
