"""Compares tensor parallelism with torch's `parallelize_module`, on two processes and in stages on four.

Both use the same model, cut, batches, threads and optimizer.

    python benchmarks/tensors.py [--steps 12] [--group two|four] [--only time|memory]

| ours | peer | what both do |
|---|---|---|
| TP2 | ColwiseParallel, RowwiseParallel, loss_parallel | columns of q, k, v, up and head, rows of out, down
and the embedding |
| TP2, sequence | the same with SequenceParallel | norms and residuals on parts of the sequence |
| 1F1B x TP2 | Schedule1F1B over such stages | two stages of two processes, four microbatches |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _compared import Build, Step, run
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import lightning_piper as piper
from lightning_piper.runtime import Executor, ProcessTransport, local_shards_of, shards_of

LAYERS, WIDTH, HEADS, LENGTH, WORDS, SAMPLES, MICROBATCHES = 4, 512, 8, 256, 4096, 4, 4
CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
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
        self.norm1, self.attention, self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            MLP(),
        )

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
        with piper.annotate("PP", 0), piper.annotate("LAYER", 0):
            x = self.embed(tokens)
        for i, block in enumerate(self.blocks, 1):
            with piper.annotate("PP", int(i > LAYERS // 2)), piper.annotate("LAYER", i):
                x = block(x)
        with piper.annotate("PP", 1), piper.annotate("LAYER", LAYERS + 1):
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    def training_step(self, given: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with piper.annotate("PP", 1), piper.annotate("LAYER", LAYERS + 1):
            return loss_of(self(given[0]), given[1])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(i: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(i))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def ours(sequence: bool, stages: bool = False) -> Build:
    def build(rank: int, world: int) -> Step:
        module = Model()
        place, shard = piper.tensor_parallel(module, batch(0), 2, sequence=sequence)
        program = [place, shard]
        if stages:
            groups = [[0, 1], [2, 3]]
            shard = piper.ShardWeights(
                filter={}, devices=groups, axis="tp", stream="tp", params=shard.params, values=shard.values
            )  # type: ignore[attr-defined]
            program = [
                *piper.schedules.one_f_one_b(stages=2, microbatches=MICROBATCHES, devices=groups),
                shard,
            ]
        compiled = piper.compile(module, batch(0), program)
        plan, params = compiled.plans[rank], dict(module.named_parameters())
        shards = shards_of(plan, params, CPU)
        owned = {
            n: params[n] for n in compiled.params_on(rank) if not any(n in bucket.names for bucket in shards)
        }
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


def divide(model: Model, blocks: Iterable[nn.Module], mesh: Any, sequence: bool) -> None:
    """Divide a decoder as torchtitan does."""
    rows: Any = {"output_layouts": Shard(1)} if sequence else {}
    of_block: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    of_block |= {
        "mlp.up": ColwiseParallel(),
        "attention.out": RowwiseParallel(**rows),
        "mlp.down": RowwiseParallel(**rows),
    }
    columns: Any = {"output_layouts": Shard(-1), "use_local_output": False}
    if sequence:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        of_block |= {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": whole,
            "mlp": whole,
        }
        parallelize_module(model, mesh, {"norm": SequenceParallel()})
        columns["input_layouts"] = Shard(1)
    embed = RowwiseParallel(input_layouts=Replicate(), **rows)
    parallelize_module(model, mesh, {"embed": embed, "head": ColwiseParallel(**columns)})
    for block in blocks:
        parallelize_module(block, mesh, of_block)


def torch_tp(sequence: bool) -> Build:
    def build(rank: int, world: int) -> Step:
        model, mesh = Model(), dist.init_device_mesh("cpu", (world,))
        divide(model, model.blocks, mesh, sequence)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(i: int) -> Tensor:
            tokens, targets = batch(i)
            with loss_parallel():
                loss = loss_of(model(tokens), targets)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach().full_tensor()  # type: ignore[attr-defined, no-any-return]

        return step

    return build


class Stage(nn.Module):
    """One half of the model's layers."""

    def __init__(self, model: Model, index: int) -> None:
        super().__init__()
        half = LAYERS // 2
        self.blocks = model.blocks[:half] if index == 0 else model.blocks[half:]
        self.first, self.last = (
            (model.embed, None) if index == 0 else (None, nn.Sequential(model.norm, model.head))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        for block in self.blocks:
            x = block(x)
        return x if self.last is None else self.last(x)  # type: ignore[no-any-return]


def torch_stages(rank: int, world: int) -> Step:
    model, mesh = Model(), dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    divide(model, model.blocks, mesh["tp"], False)
    index = rank // 2
    module = Stage(model, index)
    schedule = Schedule1F1B(
        PipelineStage(module, index, 2, CPU, group=mesh.get_group("pp")), MICROBATCHES, loss_fn=loss_of
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step(i: int) -> Tensor | None:
        tokens, targets = batch(i)
        losses: list[Any] | None = [] if index else None
        with loss_parallel() if index else contextlib.nullcontext():
            schedule.step(
                *([] if index else [tokens]),
                target=targets if index else None,
                losses=losses,
                return_outputs=False,
            )
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([x.detach().full_tensor() for x in losses]).mean() if losses else None

    return step


TORCH = "parallelize_module"
GROUPS: dict[str, tuple[int, dict[str, tuple[Build, str]]]] = {
    "two": (
        2,
        {
            "TP2": (ours(False), TORCH),
            TORCH: (torch_tp(False), ""),
            "TP2, sequence": (ours(True), f"{TORCH}, sequence"),
            f"{TORCH}, sequence": (torch_tp(True), ""),
        },
    ),
    "four": (
        4,
        {
            "1F1B x TP2": (ours(False, stages=True), f"Schedule1F1B, {TORCH}"),
            f"Schedule1F1B, {TORCH}": (torch_stages, ""),
        },
    ),
}


if __name__ == "__main__":
    run(__doc__, GROUPS)
