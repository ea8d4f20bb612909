"""Compares data parallelism and ZeRO with torch's own, on two processes and with a pipeline on four.

Both use the same model, microbatches and threads.

Time: all systems of a group live in the same processes and take turns step by step, so that disturbances of
the machine affect all of them. Memory: each system has its own run. torch's profiler counts live tensor
bytes, from before the model is built. On two processes, sequences are so short that activations do not count,
and the table also has the expected memory (`expected`). On four processes, sequences are the same as for
time.

    python benchmarks/zero.py [--steps 12] [--group two|found|muon|link|four] [--only time|memory]

| ours | peer | what both do |
|---|---|---|
| DP | DDP | gradients summed once a step, in buckets of 25 MB |
| ZeRO-1 | ZeroRedundancyOptimizer | the optimizer's state is sharded |
| ZeRO-2 | FSDP2, parameters kept gathered over the step | gradients are sharded too |
| ZeRO-3 | FSDP2, parameters freed after each use | parameters are sharded too |
| DP and ZeRO-3, blocks found | ours | a model without annotations, and one with an annotation around each
layer (group `found`) |
| Muon, by owners | DDP with torch's Muon in every process | Muon for the matrices of the layers, and AdamW for
all other parameters. Ours divides the matrices over the processes (group `muon`) |
| Muon, overlapped | DDP with torch's Muon in every process | as "Muon, by owners". Ours orthogonalizes during the
backward pass |
| the same over a link of 1 Gbit/s (group `link`) | DDP over this link | messages arrive late and use no CPU time
meanwhile (`_link.py`) |
| 1F1B x ZeRO-3 | Schedule1F1B over such FSDP2 stages | on four processes |
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _compared import Step, run
from _gpt import Config, Module, Plain, batch, loss_of, stages
from _link import Link, LinkTransport, ddp_hook
from _memory import MB
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import lightning_piper as piper
from lightning_piper.holdings.optimizer_slices import EarlyUpdates
from lightning_piper.runtime import Executor, ProcessTransport, local_shards_of, shards_of

SEQUENCES = 16
SIZES = Config()
CPU = torch.device("cpu")


class MuonAndAdamW:
    """Muon for the matrices of layers, and AdamW for all other parameters. Either may have no parameters."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        matrices, others = [], []
        for p in params:
            inner = p.ndim == 2 and not {SIZES.vocab, SIZES.seq} & set(p.shape)
            (matrices if inner else others).append(p)
        self._optimizers: list[torch.optim.Optimizer] = []
        self.early = EarlyUpdates()
        if matrices:
            muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
            self._optimizers.append(muon)
        if others:
            self._optimizers.append(torch.optim.AdamW(others, lr=lr))

    def overlap(self, params: Mapping[str, torch.Tensor]) -> None:
        """Let the plan's early updates update the matrices of Muon. `params` has all parameters by name."""
        self.early.take(self._optimizers[0], params)

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def ours(
    *levels: Mapping[str, Any],
    pipeline: bool = False,
    plain: bool = False,
    update: Any = torch.optim.AdamW,
    bandwidth: float | None = None,
) -> Callable[[Config, int, int], Step]:
    """Return a builder of our system. `levels` are the fields of its `replicate` directives. With `plain`, the model
    has no annotations. `update` makes the optimizer. `bandwidth` is in bytes a second (default: as the machine)."""

    def build(c: Config, rank: int, world: int) -> Step:
        module = Plain(c) if plain else Module(c, layers=True)
        microbatches = 8 // 2
        if pipeline:
            groups = [[0, 1], [2, 3]]
            program = piper.schedules.one_f_one_b(stages=2, microbatches=microbatches, devices=groups)
            program += [piper.Replicate(**{"filter": {}, "devices": groups, **level}) for level in levels]
        else:
            program = [
                piper.Place(filter={}, devices=[0, 1]),
                piper.Split(filter={}, dim_name="MB", num_microbatches=microbatches),
            ]
            # Each microbatch runs through all layers, forward and backward, before the next one, like a loop
            # over microbatches.
            program += [
                piper.Order(filters=[{"MB": mb, "PASS": p} for mb in range(microbatches) for p in "FB"])
            ]
            program += [piper.Replicate(**{"filter": {}, "devices": [0, 1], **level}) for level in levels]
        compiled = piper.compile(module, batch(c, 0, SEQUENCES), program)
        plan = compiled.plans[rank]
        params = dict(module.named_parameters())
        shards = shards_of(plan, params, CPU)
        owned = {
            n: params[n] for n in compiled.params_on(rank) if not any(n in bucket.names for bucket in shards)
        }
        compiled.step.at(plan.local_batch_size)  # trace while the module has all its parameters
        pieces = local_shards_of(plan, shards)
        whole = {name for bucket in shards if bucket.whole_tensors for name in bucket.names}
        pieces = {n: x.view(params[n].shape) if n in whole else x for n, x in pieces.items()}
        for name, param in params.items():
            if name not in owned:
                param.data = torch.empty(0)
        connect = ProcessTransport if bandwidth is None else partial(LinkTransport, link=Link(bandwidth))
        transport = connect(compiled.plans, ranks=range(world), device=CPU)
        trained = {**owned, **{name: nn.Parameter(x) for name, x in pieces.items()}}
        optimizer = update(trained.values(), lr=1e-3)
        early = optimizer.early if any(level.get("overlap_update") for level in levels) else None
        if early is not None:
            optimizer.overlap(trained)
        executor = Executor(plan, compiled.step, owned, {}, transport, CPU, shards, early_updates=early)

        def step(i: int) -> torch.Tensor:
            leaves = batch(c, i, SEQUENCES)
            local_batch = slice(
                plan.replica * plan.local_batch_size, (plan.replica + 1) * plan.local_batch_size
            )
            if early is not None:
                early.begin(last=True, accumulates=False)
            result = executor.step([x[local_batch] for x in leaves], seed=i)
            for name in list(result.grads):
                trained[name].grad = result.grads.pop(name)
            optimizer.step()
            optimizer.zero_grad()
            return result.metrics[0]

        return step

    return build


def _layers(model: nn.Module, mesh: Any, keep: bool) -> nn.Module:
    for stage in model:  # type: ignore[attr-defined]
        for part in stage:
            fully_shard(part, mesh=mesh, reshard_after_forward=not keep)
    return fully_shard(model, mesh=mesh, reshard_after_forward=not keep)


def torch_dp(
    kind: str, update: Any = torch.optim.AdamW, bandwidth: float | None = None
) -> Callable[[Config, int, int], Step]:
    def build(c: Config, rank: int, world: int) -> Step:
        model: Any = nn.Sequential(*stages(c))
        last: Callable[[bool], Any] = lambda now: contextlib.nullcontext()  # noqa: E731
        if kind in ("ddp", "zero1"):
            model = DistributedDataParallel(model)
            if bandwidth is not None:
                model.register_comm_hook(None, ddp_hook(Link(bandwidth)))
            last = lambda now: contextlib.nullcontext() if now else model.no_sync()  # noqa: E731
        else:
            _layers(model, dist.init_device_mesh("cpu", (world,)), kind == "fsdp kept")
            # FSDP2 reduces sharded gradients after each microbatch, as ours does.
        if kind == "zero1":
            optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        else:
            optimizer = update(model.parameters(), lr=1e-3)
        rows, count = SEQUENCES // world, 8 // world

        def step(i: int) -> torch.Tensor:
            tokens, targets = (
                x[rank * rows : (rank + 1) * rows].chunk(count) for x in batch(c, i, SEQUENCES)
            )
            total = torch.zeros(())
            for mb in range(count):
                with last(mb == count - 1):
                    loss = loss_of(model(tokens[mb]), targets[mb]) / count
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total)
            return total / world

        return step

    return build


def torch_pp(keep: bool) -> Callable[[Config, int, int], Step]:
    def build(c: Config, rank: int, world: int) -> Step:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        p, d = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        module = stages(c)[p]
        for part in module:  # type: ignore[attr-defined]
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=not keep)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=not keep)
        schedule = Schedule1F1B(
            PipelineStage(module, p, 2, CPU, group=mesh["pp"].get_group()), 4, loss_fn=loss_of
        )
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        rows = SEQUENCES // 2

        def step(i: int) -> torch.Tensor | None:
            tokens, targets = (x[d * rows : (d + 1) * rows] for x in batch(c, i, SEQUENCES))
            losses: list[torch.Tensor] | None = [] if p else None
            schedule.step(
                *([] if p else [tokens]), target=targets if p else None, losses=losses, return_outputs=False
            )
            optimizer.step()
            optimizer.zero_grad()
            if losses is None:
                return None
            total = torch.stack(losses).detach().double().mean()
            dist.all_reduce(total, group=mesh["dp"].get_group())
            return total / 2

        return step

    return build


ZERO = [{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}]
TWO = {
    "DP": (ours(ZERO[0]), "torch DDP"), "torch DDP": (torch_dp("ddp"), ""),
    "ZeRO-1": (ours(ZERO[1]), "ZeroRedundancyOptimizer"), "ZeroRedundancyOptimizer": (torch_dp("zero1"), ""),
    "ZeRO-2": (ours(ZERO[2]), "FSDP2 kept"), "FSDP2 kept": (torch_dp("fsdp kept"), ""),
    "ZeRO-3": (ours(ZERO[3]), "FSDP2 freed"), "FSDP2 freed": (torch_dp("fsdp freed"), ""),
}  # fmt: skip
FOUND = {
    "DP, blocks found": (ours(ZERO[0], plain=True), "DP"), "DP": (ours(ZERO[0]), "torch DDP"),
    "torch DDP": (torch_dp("ddp"), ""), "ZeRO-3, blocks found": (ours(ZERO[3], plain=True), "ZeRO-3"),
    "ZeRO-3": (ours(ZERO[3]), "FSDP2 freed"), "FSDP2 freed": (torch_dp("fsdp freed"), ""),
}  # fmt: skip
# Layers have whole matrices; the embedding and the head, which AdamW updates, are cut.
OWNERS = (
    {"filter": {"LAYER": "*"}, "shard_optimizer": True, "shard_by": "parameter"},
    {"filter": {"LAYER": "-"}, "shard_optimizer": True},
)
OVERLAPPED = ({**OWNERS[0], "overlap_update": True}, OWNERS[1])
MUON = {
    "Muon, overlapped": (ours(*OVERLAPPED, plain=True, update=MuonAndAdamW), "torch DDP, Muon"),
    "Muon, by owners": (ours(*OWNERS, plain=True, update=MuonAndAdamW), "torch DDP, Muon"),
    "Muon in every process": (ours(ZERO[0], plain=True, update=MuonAndAdamW), "torch DDP, Muon"),
    "torch DDP, Muon": (torch_dp("ddp", MuonAndAdamW), ""),
}
LINK = 125e6  # bytes a second: Ethernet of 1 Gbit/s
over_link = partial(ours, plain=True, update=MuonAndAdamW, bandwidth=LINK)
MUON_OVER_LINK = {
    "Muon, overlapped": (over_link(*OVERLAPPED), "torch DDP, Muon"),
    "Muon, by owners": (over_link(*OWNERS), "torch DDP, Muon"),
    "torch DDP, Muon": (torch_dp("ddp", MuonAndAdamW, LINK), ""),
}
FOUR = {
    "1F1B x DP": (ours(ZERO[0], pipeline=True), ""), "1F1B x ZeRO-3": (ours(ZERO[3], pipeline=True), "torch 1F1B, FSDP2 freed"),
    "torch 1F1B, FSDP2 freed": (torch_pp(False), ""), "torch 1F1B, FSDP2 kept": (torch_pp(True), ""),
}  # fmt: skip
GROUPS: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, TWO),
    "found": (2, FOUND),
    "muon": (2, MUON),
    "link": (2, MUON_OVER_LINK),
    "four": (4, FOUR),
}
SHARDED = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "DP, blocks found", "ZeRO-3, blocks found")


def expected(c: Config, name: str) -> float:
    """Return the expected MB on each of two replicas: parameters, gradients, AdamW's two moments, and values
    in flight.

    In flight are gradients of a layer, packed for the sum over replicas, while the sum of the next layer's
    gradients runs (a bucket and memory for the other replica's half of it). Without sharded gradients, two
    new gradients of a layer become one sum. With sharded parameters, the layer in use and the next one are in
    flight, too.
    """
    layers = [sum(p.numel() * 4 for p in part.parameters()) / MB for stage in stages(c) for part in stage]  # type: ignore[attr-defined]
    layers[-2:] = [sum(layers[-2:])]  # the last norm and the head are one region
    pairs = list(itertools.pairwise(layers))
    used = [3 * a + 1.5 * b + before for before, (a, b) in zip(layers, pairs[1:], strict=False)]
    whole, in_flight = {
        "DP": (4, 2 * max(layers)),
        "ZeRO-1": (3, 2 * max(layers)),
        "ZeRO-2": (2.5, max(2 * a + 1.5 * b for a, b in pairs)),
        "ZeRO-3": (2, max(used)),
    }[name.removesuffix(", blocks found")]
    total = sum(layers)
    return whole * total + in_flight


def groups(of: Callable[[str], Config]) -> dict[str, tuple[int, dict[str, tuple[Any, str]]]]:
    return {
        group: (ranks, {name: (partial(build, of(group)), peer) for name, (build, peer) in systems.items()})
        for group, (ranks, systems) in GROUPS.items()
    }


def small(group: str) -> Config:
    """Return the sizes for memory. On two processes, sequences are so short that activations do not count."""
    return SIZES if group == "four" else Config(seq=4)


def note(group: str, name: str) -> str:
    return f"   expected {expected(small(group), name):.1f}" if name in SHARDED else ""


if __name__ == "__main__":
    run(__doc__, groups(lambda group: SIZES), groups(small), note)
