"""Trainings of modules that are built on the meta device, over processes and in one process, and of the same
module built whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.holdings.distributed_marks import parts_of
from lightning_piper.testing import Model, Spec, make_batch
from tests.strategy import routed
from tests.strategy.fitting import Batches, sharing_captures, trace, trainer, values
from tests.strategy.sharded import PROGRAMS, pp2_dp2

PROGRAM_OF = {
    "pp2": lambda: piper.schedules.one_f_one_b(stages=2, microbatches=2),
    "pp2 dp2": lambda: pp2_dp2(0, 0),
    **PROGRAMS,
}


class Scaled(nn.Module):
    """A module with a frozen parameter, a parameter that is not contiguous, and buffers, of which one is not
    saved.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(8, 8).t())
        self.offset = nn.Parameter(torch.empty(8), requires_grad=False)
        self.register_buffer("scale", torch.empty(8))
        self.register_buffer("order", torch.empty(8, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.mix)
        self.offset.data.uniform_()
        self.scale.uniform_(0.5, 1.5)  # type: ignore[operator]
        self.order.copy_(torch.randperm(8))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.order] @ self.mix * self.scale + self.offset  # type: ignore[index, operator]


class Net(L.LightningModule):
    """Two stages. The output layer's weight is the embedding's; its bias is its own. `whole` is never on the
    meta device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.scaled = Scaled()
        self.wide = nn.Sequential(nn.Linear(8, 40), nn.GELU(), nn.Linear(40, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        with torch.device("cpu"):
            self.whole = nn.Linear(8, 8)
        for p in self.parameters():
            p.decays = p.ndim > 1  # type: ignore[attr-defined]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            x = F.gelu(self.scaled(self.embedding(batch["tokens"])))
        with piper.annotate("PP", 1):
            logits = self.head(self.wide(x) + self.whole(x))
            return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        marked = [
            [p for p in self.parameters() if p.decays is decays and p.requires_grad]
            for decays in (True, False)
        ]  # type: ignore[attr-defined]
        return torch.optim.AdamW([{"params": marked[0]}, {"params": marked[1], "weight_decay": 0.0}], lr=0.01)


class Configured(L.LightningModule):
    """Builds its layers in `configure_model`, on the meta device."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = Net()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.net.configure_optimizers()


class Hooked(Net):
    """A module that gives initial values to its linear layers itself."""

    def piper_init_parameters(self, name: str, part: nn.Module) -> None:
        part.reset_parameters()  # type: ignore[operator]
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)


def batches(count: int = 3, size: int = 8) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        {name: torch.randint(11, (size, 4), generator=draw) for name in ("tokens", "targets")}
        for _ in range(count)
    ]


class Seen(L.Callback):
    """Records how many elements of the module's parameters the process holds during the fit, and the values
    from which it starts.
    """

    def __init__(self, early: bool) -> None:
        self.early = early

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.begun = False
        if self.early:
            trainer.save_checkpoint("early.ckpt")

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
        if self.begun:
            return
        self.begun = True
        own = trainer.strategy.phase.fit.ownership  # type: ignore[attr-defined]
        self.elements = sum(p.numel() for p in own.owned_params.values())
        self.marks = [p.__dict__.get("decays") for p in own.owned_params.values()]
        # The values from which the process starts, put together on rank 0.
        with own.whole_on_rank_zero():
            self.initial = values(module)


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        program: One of `PROGRAM_OF`.
        build: The way in which the module is built.
        ckpt: The file or directory in the folder from which the training starts.
        save: The name in the folder under which the end is saved; `sharded`: the checkpoint is sharded.
        seed: The argument of `seed_everything`.
        verify: The argument of the strategy.
        mixed: Only rank 1 has values.
        again: The same module is trained a second time.
        steps: The total number of steps; if there is a checkpoint, its training has done three of them.
        early: A checkpoint is saved before the first step.
        checked: There is a sanity check before the first step, and a validation.
    """

    name: str
    program: str = "pp2 dp2 zero3"
    build: type[L.LightningModule] = Net
    ckpt: str = ""
    save: str = ""
    sharded: bool = False
    seed: int = 3
    verify: Any = "static"
    mixed: bool = False
    again: bool = False
    steps: int = 3
    checked: bool = False
    early: bool = False


@sharing_captures
def fit(job: Job, folder: Path, rank: int | None = None) -> dict[str, Any]:
    """Train for the steps of the job: over four processes if a rank is given, otherwise in one."""
    L.seed_everything(job.seed, verbose=False)
    if job.build is Configured or (job.mixed and rank == 1):
        module = job.build()
    else:
        with torch.device("meta"):
            module = job.build()
    data, seen, transport = batches(), Seen(job.early), "local" if rank is None else "process"
    if rank is not None:
        data = [{name: x.chunk(2)[rank // 2] for name, x in batch.items()} for batch in data]
    strategy = piper.PiperStrategy(
        PROGRAM_OF[job.program](),
        transport=transport,
        checkpoint="sharded" if job.sharded else "consolidated",
        verify=job.verify,
    )  # type: ignore[arg-type]
    run, record = trainer(strategy, [seen], devices=1 if rank is None else 4, max_steps=job.steps)
    ckpt = str(folder / job.ckpt) if job.ckpt else None
    try:
        run.fit(module, Batches(data), Batches(data) if job.checked else None, ckpt_path=ckpt)
        if run.global_step == 3 and job.ckpt:
            run.validate(module, Batches(data), verbose=False)
    except piper.PiperError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    missing = sum(x.is_meta for x in module.parameters())
    if job.save:
        run.save_checkpoint(folder / job.save)
    parts = parts_of(module)
    with contextlib.nullcontext() if parts is None else parts.whole_on_rank_zero():
        state = values(module)
    found = {"values": state, "initial": seen.initial, "losses": record.losses,
             "elements": seen.elements, "missing": missing, "marks": seen.marks}  # fmt: skip
    if job.again:
        run, record = trainer(
            piper.PiperStrategy(PROGRAM_OF[job.program](), transport=transport),
            [seen],
            devices=1 if rank is None else 4,
            max_steps=3,
        )
        run.fit(module, Batches(data))
        found["again"] = seen.initial
    return found


@sharing_captures
def validate(folder: Path, rank: int | None = None, half: int = 0) -> list[float]:
    """The loss of a module that was never trained, and of the parts that were saved."""
    L.seed_everything(3, verbose=False)
    found = []
    for saved in (None, str(folder / "parts.ckpt")):
        strategy = piper.PiperStrategy(
            PROGRAM_OF["pp2 dp2 zero3"](), transport="local" if rank is None else "process"
        )
        run, _ = trainer(strategy, devices=1 if rank is None else 4)
        with run.init_module(empty_init=True):
            module = Net()
        half = half if rank is None else rank // 2
        data = [{name: x.chunk(2)[half] for name, x in batch.items()} for batch in batches()]
        (result,) = run.validate(module, Batches(data), ckpt_path=saved, verbose=False)
        found.append(result["loss"])
    return found


class Experts(Model):
    """A layer of experts that sets its initial values itself."""

    def piper_init_parameters(self, name: str, part: nn.Module) -> None:
        for p in part.parameters(recurse=False):
            nn.init.normal_(p, std=0.5)


@sharing_captures
def experts(name: str, rank: int | None = None) -> dict[str, Any]:
    """Initial values of a model whose experts are divided over four processes, and its losses in three steps."""
    L.seed_everything(3, verbose=False)
    module, seen = Experts(Spec(("linear", "experts"), (0, 0))).to("meta"), Seen(early=False)
    strategy = piper.PiperStrategy(
        routed.PROGRAMS[name][2](), transport="local" if rank is None else "process"
    )
    run, record = trainer(strategy, [seen], devices=1 if rank is None else 4, max_steps=3)
    data = [make_batch(module.spec, 8, seed) for seed in range(3)]
    if rank is not None:
        data = [{key: x.chunk(4)[rank] for key, x in batch.items()} for batch in data]
    run.fit(module, Batches(data))
    return {"initial": seen.initial, "losses": record.losses, "elements": seen.elements}


def trace_all(jobs: Iterable[Job], folder: Path) -> None:
    (batch,) = batches(1)
    for build in (Net, Configured):
        module = build()
        module.configure_model()
        trace(module, batch, (8, 4, 2), "training_step")
    trace(Net(), batch, (8, 4), "validation_step", None)
    spec = Spec(("linear", "experts"), (0, 0))
    trace(Experts(spec), make_batch(spec, 8), (8, 2, 1), "training_step", degrees=[(2,)])


def train(rank: int, jobs: Iterable[Job], folder: Path) -> dict[str, Any]:
    """Run all jobs in this process, one after another."""
    found = {job.name: fit(job, folder, rank) for job in jobs}
    return {**found, "validated": validate(folder, rank), "experts": experts("ep2 dp2 zero3", rank)}
