"""Tensors divided over two processes, against torch's `parallelize_module`: same model, same cut, batches, threads and optimizer.

Time: both systems live in the same processes and take turns step by step. Memory: a run of its own for each system. The largest
difference of losses says that they train alike.

    python benchmarks/tensors.py [--steps 12]

| ours | peer | what both do |
|---|---|---|
| TP2 | ColwiseParallel, RowwiseParallel | columns of q, k, v and up, rows of out and down |
| TP2, sequence | the same with SequenceParallel | norms and residuals on parts of the sequence |
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _launch import is_rank, join, launch
from _memory import peak_of
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import lightning_piper as piper
from lightning_piper.runtime import Executor, ProcessTransport, local_shards_of, shards_of

LAYERS, WIDTH, HEADS, LENGTH, WORDS, SAMPLES = 4, 512, 8, 256, 512, 4
CPU = torch.device("cpu")
Step = Callable[[int], Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks, self.norm, self.head = (
            nn.ModuleList(Block() for _ in range(LAYERS)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("LAYER", 0):
            x = self.embed(tokens)
        for i, block in enumerate(self.blocks, 1):
            with piper.annotate("LAYER", i):
                x = block(x)
        with piper.annotate("LAYER", LAYERS + 1):
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    def training_step(self, given: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with piper.annotate("LAYER", LAYERS + 1):
            return loss_of(self(given[0]), given[1])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(i: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(i))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def ours(sequence: bool) -> Callable[[int, int], Step]:
    def build(rank: int, world: int) -> Step:
        module = Model()
        compiled = piper.compile(module, batch(0), piper.tensor_parallel(module, batch(0), world, sequence=sequence))
        plan, params = compiled.plans[rank], dict(module.named_parameters())
        shards = shards_of(plan, params, CPU)
        owned = {n: params[n] for n in compiled.params_on(rank) if not any(n in bucket.names for bucket in shards)}
        for name, param in params.items():
            if name not in owned:
                param.data = torch.empty(0)
        trained = owned | {name: nn.Parameter(x) for name, x in local_shards_of(plan, shards).items()}
        transport = ProcessTransport(compiled.plans, ranks=range(world), device=CPU)
        executor = Executor(plan, compiled.step, owned, {}, transport, CPU, shards)
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-3)

        def step(i: int) -> Tensor:
            result = executor.step(list(batch(i)), seed=i)
            for name in list(result.grads):
                trained[name].grad = result.grads.pop(name)
            optimizer.step()
            optimizer.zero_grad()
            return result.metrics[0]

        return step

    return build


def torch_tp(sequence: bool) -> Callable[[int, int], Step]:
    def build(rank: int, world: int) -> Step:
        model, mesh = Model(), dist.init_device_mesh("cpu", (world,))
        rows: Any = {"output_layouts": Shard(1)} if sequence else {}
        of_block: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        of_block |= {"mlp.up": ColwiseParallel(), "attention.out": RowwiseParallel(**rows), "mlp.down": RowwiseParallel(**rows)}
        if sequence:
            whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            of_block |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole, "mlp": whole}
            parts = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
            head = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
            parallelize_module(model, mesh, {"embed": parts, "norm": SequenceParallel(), "head": head})
        for block in model.blocks:
            parallelize_module(block, mesh, of_block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(i: int) -> Tensor:
            tokens, targets = batch(i)
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return build


SYSTEMS: dict[str, tuple[Any, str]] = {
    "TP2": (ours(False), "parallelize_module"), "parallelize_module": (torch_tp(False), ""),
    "TP2, sequence": (ours(True), "parallelize_module, sequence"), "parallelize_module, sequence": (torch_tp(True), ""),
}  # fmt: skip
WARM_UP = 2


def compare(steps: int) -> None:
    rank, world = join()
    systems = {name: build(rank, world) for name, (build, _) in SYSTEMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    names = list(systems)
    for i in range(steps + WARM_UP):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            loss = systems[name](i)
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if i >= WARM_UP:
                seconds[name].append(took.item())
            losses[name].append(loss.item())
    if rank == 0:
        median = {name: statistics.median(values) for name, values in seconds.items()}
        print(f"{'':30} median ms   to its peer: medians, pairs   largest relative difference of losses to {names[0]}")
        for name, (_, peer) in SYSTEMS.items():
            ratio = f"{median[name] / median[peer]:14.3f}" if peer else " " * 14
            pairs = f"{statistics.median(a / b for a, b in zip(seconds[name], seconds[peer], strict=True)):8.3f}" if peer else ""
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[names[0]], strict=True))
            print(f"{name:30} {median[name] * 1e3:9.1f} {ratio} {pairs:8}          {worst:.1e}")
        print(f"{steps} steps of each, in turns", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(name: str) -> None:
    rank, world = join()
    peaks: list[Any] = [None] * world
    dist.all_gather_object(peaks, peak_of(lambda: SYSTEMS[name][0](rank, world)))
    if rank == 0:
        print(f"{name:30} peak live tensor MB of a step, by rank: {', '.join(f'{p:.1f}' for p in peaks)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--memory", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if is_rank():
        measure_memory(args.memory) if args.memory else compare(args.steps)
        return
    launch(2, "--steps", str(args.steps))
    for name in SYSTEMS:
        launch(2, "--memory", name)


if __name__ == "__main__":
    main()
