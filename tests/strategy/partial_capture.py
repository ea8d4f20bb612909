"""Training steps of which only the calls of annotated modules can be captured, and the results of one device
for them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper import schedules

SAMPLES, BATCH = 24, 8
LIMIT = 4.0  # some losses are below this, others are not


class Body(nn.Module):
    def __init__(self, inputs: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(F.gelu(self.first(x)))
        return made


class Branch(L.LightningModule):
    """Two stages, and a loss on which a Python branch depends."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = Body(), nn.Parameter(torch.ones(()))
        self.seen: list[float] = []
        piper.annotate_modules(self, "PP", [["body.first"], ["body.last"]])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.body(batch[0] * 2) * self.temperature, batch[1])
        self.seen.append(loss.item())
        self.log("loss", loss)
        self.log("worst", loss, reduce_fx="max")
        return {"loss": loss, "inputs": batch[0]}

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(out, target)
        return loss * 3 if loss.item() > LIMIT else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Twice(Branch):
    """A module called twice, and an error that is caught."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, two = self.body(batch[0]), self.body(batch[1])
        try:
            near = (one - two).pow(2).mean().item() < 1.0
        except Exception:
            near = True
        return (one - two).pow(2).mean() * self.temperature + (0 if near else one.pow(2).mean())


class Tied(Branch):
    """A head outside of the captured calls, which shares its weight with the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body(inputs=4)
        self.head = nn.Linear(4, 8, bias=False)
        self.body.first.weight = self.head.weight
        piper.annotate_modules(self, "PP", [["body.first"], ["body.last"]])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.head(self.body(batch[0]))[:, :4] * self.temperature, batch[1])


class Chain(Branch):
    """Captured calls that pass values to each other; the value of the first call is read once more."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.body.first(batch[0])
        size = hidden.abs().mean()
        return self.loss(self.body.last(hidden) * self.temperature, batch[1]) + size


@dataclasses.dataclass
class Found:
    values: Tensor
    hidden: Tensor
    number: int = 3


class Structured(Branch):
    """The call of the annotated module itself returns an object."""

    def forward(self, x: Tensor) -> Found:
        hidden = self.body.first(x)
        return Found(self.body.last(hidden), hidden.detach())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self(batch[0])
        return self.loss(found.values * self.temperature + found.hidden.mean() / found.number, batch[1])


class Before(Branch):
    """Parameters that are read before the call, and before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with piper.annotate("PP", 0):
            x = batch[0] * self.scale + self.shift
        return self.loss(self.body(x) * self.temperature + self.shift, batch[1])


class Blocks(Branch):
    """A model without annotations, in which the calls of repeated blocks are the regions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))  # type: ignore[assignment]


class Together(Tied):
    """What all processes run may communicate, and log a metric object."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss + self.all_gather(loss.detach()).sum() * self.temperature


class Measured(Branch):
    """The uncaptured part updates metric objects, and hooks compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.both = (
            torchmetrics.MeanMetric(),
            torchmetrics.MetricCollection([torchmetrics.SumMetric()]),
        )
        self.found: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.mean(batch[0][:, 0] > 0)
        self.both.update(batch[1].round())
        torchmetrics.MeanMetric().update(batch[1])  # only the step itself sees this one
        return found

    def on_train_epoch_end(self) -> None:
        if self.mean.update_called:
            self.found += [float(self.mean.compute()), float(self.both.compute()["SumMetric"])]
        self.mean.reset()


class Listed(Branch):
    """The uncaptured part updates a metric object that is not a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [torchmetrics.MeanMetric()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.listed[0].update(found["loss"])
        return found


KINDS: dict[str, type[Branch]] = {
    kind.__name__: kind for kind in (Branch, Twice, Tied, Chain, Structured, Before, Blocks)
}


def program(kind: str, levels: dict[str, bool] | None = None) -> list[Any]:
    """Two stages and four microbatches; with `levels`, two replicas of each with two of them."""
    tags: list[dict[str, int]] = (
        [{"LAYER": i} for i in range(4)] if kind == "Blocks" else [{"PP": 0}, {"PP": 1}]
    )
    if levels is None and kind != "Blocks":
        return [*schedules.zero_bubble(2, 4)]
    stages = [[0, 2], [1, 3]] if levels is not None else [[0], [1]]
    placed = [piper.Place(filter=tag, devices=stages[2 * i // len(tags)]) for i, tag in enumerate(tags)]
    split = piper.Split(filter={}, dim_name="MB", num_microbatches=2 if levels is not None else 4)
    return [
        *placed,
        split,
        *([piper.Replicate(filter={}, devices=stages, **levels)] if levels is not None else []),
    ]


class Named(Branch):
    """A batch that carries texts and an object, and Python state that changes with each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.texts, self.objects = 0, [], []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.body(batch["x"]) * self.temperature, batch["y"])
        self.steps += 1
        self.texts += batch["texts"]
        self.objects.append(batch["about"])
        return loss * (1 + self.steps % 2)


def named(samples: list[Any]) -> dict[str, Any]:
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return {
        "x": x,
        "y": y,
        "texts": [f"{float(row[0]):.6f}" for row in x],
        "about": Path(f"{float(x.sum()):.6f}"),
    }


def data(batch: int = BATCH) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    tensors = (torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64) * 2 for _ in range(2))
    return DataLoader(TensorDataset(*tensors), batch_size=batch)


def fit(
    module: L.LightningModule,
    strategy: Any,
    devices: int = 1,
    batch: int = BATCH,
    accelerator: str = "cpu",
    **options: Any,
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        precision="64-true",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module, data(batch))
    return trainer


def made(kind: str, parts: int = 0) -> Branch:
    """A module of this kind. With `parts`, its step takes the mean over that many parts of a batch, one after
    the other.
    """
    torch.manual_seed(0)
    cls = KINDS[kind]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        found = [
            cls.training_step(self, part, batch_idx)
            for part in zip(*(x.chunk(parts) for x in batch), strict=True)
        ]
        return sum(each["loss"] if isinstance(each, dict) else each for each in found) / parts

    body = {"training_step": training_step, "log": lambda self, *args, **kwargs: None} if parts else {}
    return type(kind, (cls,), body)().double()  # type: ignore[no-any-return]


def train(rank: int, folder: Path) -> dict[str, Any]:
    """Train on two processes: in two stages, and as replicas with shards, which DDP trains alike."""
    outcome: dict[str, Any] = {}
    module = made("Branch")
    trainer = fit(module, piper.PiperStrategy(program("Branch")), devices=2)
    seen = {name: x.item() for name, x in trainer.callback_metrics.items()}
    outcome["stages"] = {"values": module.state_dict(), "seen": seen, "kept": len(module.seen)}
    measured = Measured().double()
    fit(measured, piper.PiperStrategy(program("Branch")), devices=2)
    outcome["measured"] = [*measured.found, float(measured.both.compute()["SumMetric"])]
    sharded = [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
    ]
    for name, strategy in (("sharded", piper.PiperStrategy(sharded)), ("ddp", "ddp")):
        module = Together().double()
        held: list[int] = []

        def note(trainer: Any, module: Any, *args: Any, held: list[int] = held) -> None:
            held.append(sum(x.numel() for x in module.body.parameters() if not x.is_meta))

        trainer = fit(
            module,
            strategy,
            devices=2,
            batch=4,
            callbacks=[L.pytorch.callbacks.LambdaCallback(on_train_batch_end=note)],
        )
        seen = {name: x.item() for name, x in trainer.callback_metrics.items()}
        outcome[name] = {"values": module.state_dict(), "seen": seen, "held": max(held)}
    try:
        fit(Listed().double(), piper.PiperStrategy(program("Branch")), devices=2)
    except piper.PiperError as error:
        outcome["listed"] = str(error)
    return outcome
