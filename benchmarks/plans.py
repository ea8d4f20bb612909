"""Measures one process's time from a captured step to its checked plan, by the number of devices.

The program has 16 stages, 64 microbatches and ZeRO-3. Times are CPU seconds of one core.

    python benchmarks/plans.py [--replicas 8 64 1024] [--nodes] [--llama] [--tensor] [--deepseek] [--layers 126]

Further cases:

- `--nodes`: the same program with 6,250 microbatches, the most that Piper accepts. It has 775,000 nodes
- `--llama`: from nothing to a checked plan for Llama-3-405B on 16 stages of 8 replicas
- `--tensor`: the same on 16 stages of 128 replicas, each of 8 devices that shard the weights
- `--deepseek`: the same for DeepSeek-V3 on 16 stages of 64 replicas, which divide the experts
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from _chain import Chain
from _deepseek import DeepSeek
from _stages import loss_in_stages
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.cache import CACHE
from lightning_piper.capture import capture
from lightning_piper.common.garbage_collection import uncollected
from lightning_piper.directives import Directive, parse
from lightning_piper.passes import prepared, run_pipeline
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.verify.hook import StaticCheck

HEAD = (
    "| devices | nodes | instructions | capture s | program s | static check s | plan s | plan check s | "
    "sum s | MB |"
)

MANY = 6250  # microbatches of `--nodes`


class Layer(nn.Module):
    """A layer of Llama 3: grouped heads, SwiGLU."""

    def __init__(self, width: int, hidden: int, heads: int, share: int) -> None:
        super().__init__()
        self.heads, self.share = heads, share
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(width, width // n, bias=False) for n in (1, share, share))
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y, size = self.norms[0](x), x.shape[-1] // self.heads
        q, k, v = (f(y).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(L.LightningModule):
    """Llama-3-405B in stages, to capture without data."""

    def __init__(
        self, stages: int, layers: int, width: int = 16384, hidden: int = 53248, vocabulary: int = 128256
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.layers = nn.ModuleList(Layer(width, hidden, 128, 16) for _ in range(layers))
        self.stages = stages

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_in_stages(self, batch)


def zero3(stages: int, replicas: int, microbatches: int, bucket: float = 25.0) -> tuple[Directive, ...]:
    """Return a 1F1B pipeline whose stages are replicated with ZeRO-3."""
    groups = [list(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages)]
    program = piper.schedules.one_f_one_b(stages, microbatches, groups)
    replicate = piper.Replicate(filter={}, devices=groups, shard_params=True, bucket_size=bucket)
    return tuple(parse([*program[:stages], replicate, *program[stages:]]))


def experts(stages: int, replicas: int, microbatches: int) -> tuple[Directive, ...]:
    """Return a 1F1B pipeline whose stages are replicated with ZeRO-1, and whose replicas divide the experts."""
    groups = [list(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages)]
    program = piper.schedules.one_f_one_b(stages, microbatches, groups)
    shard = piper.ShardExperts(filter={"EP": "*"}, devices=groups)
    return tuple(parse([*program, piper.Replicate(devices=groups, zero=1), shard]))


def tensor_parallel(program: tuple[Directive, ...], devices: int, degree: int) -> tuple[Directive, ...]:
    """Return the program of `zero3` for `devices` devices, with the weights of a `Llama` sharded over `degree` of
    them."""
    lines = [list(range(i, i + degree)) for i in range(0, devices, degree)]
    rows = dict.fromkeys(
        ("embed.weight", "head.weight", *(f"layers.*.{x}.weight" for x in ("q", "k", "v", "gate", "up"))), 0
    )
    params = rows | dict.fromkeys((f"layers.*.{x}.weight" for x in ("out", "down")), 1)
    return tuple(parse([*program, piper.ShardWeights(params=params, devices=lines)]))


def row(make: Callable[[], Any], program: tuple[Directive, ...]) -> str:
    """Return a row of the table: the sizes of DAG and plans, and the CPU seconds of each part of `compile`,
    in the process of the device in the middle. `make` makes the captured step.
    """
    start = time.process_time()
    step = make()
    times, checking, check = [time.process_time() - start], [0.0], StaticCheck()

    def after(*done: Any) -> None:
        begin = time.process_time()
        check(*done)
        checking[0] += time.process_time() - begin

    with uncollected():
        start = time.process_time()
        dag = run_pipeline(prepared(step, program), program, after=after)
        times += [time.process_time() - start - checking[0], checking[0]]
        start = time.process_time()
        plans = compile_plans(dag, len(dag.devices()) // 2)
        times.append(time.process_time() - start)
        start = time.process_time()
        check_plans(plans.representatives, plans.image)
        times.append(time.process_time() - start)
    count = sum(len(plan.instructions) for plan in plans.representatives.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    shown = " | ".join(f"{t:.2f}" for t in (*times, sum(times[1:])))
    return f"| {len(plans)} | {len(dag.nodes)} | {count} | {shown} | {peak:.0f} |"


def without_data(make: Callable[[], nn.Module], samples: int, length: int) -> Callable[[], Any]:
    """Return a function that captures a module on the meta device, in bfloat16."""

    def captured() -> Any:
        with torch.device("meta"):
            module, tokens = make().bfloat16(), torch.zeros(samples, length + 1, dtype=torch.long)
        return capture(module, tokens)

    return captured


def chain(replicas: int, microbatches: int) -> Callable[[], Any]:
    return lambda: capture(Chain(16, 4), torch.empty(replicas * microbatches, 4))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="*", default=[8, 64, 1024])
    for name in ("nodes", "llama", "tensor", "deepseek"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--layers", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD)
    print("|---" * 10 + "|")
    cases = [(chain(replicas, 64), zero3(16, replicas, 64)) for replicas in args.replicas]
    if args.nodes:
        cases.append((chain(8, MANY), zero3(16, 8, MANY)))
    layers = args.layers or 126
    if args.llama:
        cases.append((without_data(lambda: Llama(16, layers), 8 * 16, 8192), zero3(16, 8, 16)))
    if args.tensor:
        program = tensor_parallel(zero3(16, 1024, 16), 16 * 1024, 8)
        cases.append((without_data(lambda: Llama(16, layers), 128 * 16, 8192), program))
    if args.deepseek:
        made = without_data(lambda: DeepSeek(16, args.layers or 61, 4096), 64 * 16, 4096)
        cases.append((made, experts(16, 64, 16)))
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE] = folder  # no graph is known from an earlier run
        for make, program in cases:
            print(row(make, program), flush=True)


if __name__ == "__main__":
    main()
