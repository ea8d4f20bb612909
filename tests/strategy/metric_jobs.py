"""Steps that use metric objects as people write them, on one device and on processes. The model is in double
precision.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric, Metric, MetricCollection, PearsonCorrCoef, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.regression import MeanSquaredError
from torchmetrics.text import BLEUScore, Perplexity
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric

import lightning_piper as piper
from lightning_piper.directives import Replicate
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import QUIET, sharing_captures, trace

CLASSES, SAMPLES, BATCH = 3, 24, 8
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "black", "dog"]


class Positions(Metric):
    """A metric that depends on the order of the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total = self.total + (x * torch.arange(len(x))).sum()

    def compute(self) -> Tensor:
        return self.total


class Detection(Metric):
    """Mean average precision in one dimension. Its arguments are those of torchmetrics' metric, with a dict
    for each image, and its states are lists, too.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in ("found", "scores", "there"):
            self.add_state(name, [], dist_reduce_fx=None)

    def update(self, preds: list[dict[str, Tensor]], target: list[dict[str, Tensor]]) -> None:
        assert type(preds) is list and len(preds) == len(target)
        self.found += [entry["boxes"] for entry in preds]
        self.scores += [entry["scores"] for entry in preds]
        self.there += [entry["boxes"] for entry in target]

    def compute(self) -> Tensor:
        ranked = sorted(
            (-float(score), abs(float(box) - float(there)) < 0.5)
            for boxes, scores, there in zip(self.found, self.scores, self.there, strict=True)
            for box, score in zip(boxes, scores, strict=True)
        )
        hits = torch.tensor([hit for _, hit in ranked], dtype=torch.float64)
        return (hits * hits.cumsum(0) / torch.arange(1, len(hits) + 1)).sum() / len(self.there)


class Embedded(Metric):
    """A metric with a network inside, which no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(CLASSES, 2)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total = self.total + self.net(x).detach().sum()

    def compute(self) -> Tensor:
        return self.total


class Count(nn.Module):
    """A metric that is not of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.seen = 0, 0

    def update(self, out: Tensor, y: Tensor) -> None:
        self.right += int((out.argmax(-1) == y).sum())
        self.seen += len(y)

    def compute(self) -> float:
        return self.right / self.seen

    def reset(self) -> None:
        self.right = self.seen = 0


def few(prefix: str) -> MetricCollection:
    same = {
        "precision": MulticlassPrecision(CLASSES),
        "recall": MulticlassRecall(CLASSES),
    }  # these metrics share their states
    return MetricCollection({**same, "ap": MulticlassAveragePrecision(CLASSES)}, prefix=prefix)


class Metrics(nn.Module):
    """The metrics of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.acc, self.f1 = MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)
        self.loss, self.hidden = MeanMetric(), MeanMetric()
        self.auroc, self.binned = MulticlassAUROC(CLASSES), MulticlassAUROC(CLASSES, thresholds=5)
        self.some, self.others = few("some/"), few("others/")
        self.by = nn.ModuleDict({"sum": SumMetric(), "mse": MeanSquaredError()})
        self.listed = nn.ModuleList([PearsonCorrCoef(), MinMaxMetric(MulticlassAccuracy(CLASSES))])
        self.classwise = ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None), prefix="of_")
        self.perplexity, self.bleu, self.positions, self.count = (
            Perplexity(),
            BLEUScore(n_gram=2),
            Positions(),
            Count(),
        )
        self.confusion = MulticlassConfusionMatrix(CLASSES)
        self.members, self.embedded, self.boxes = few(""), Embedded(), Detection()


class Net(L.LightningModule):
    """Two stages. The name of each logged value tells how its metric is used."""

    alone = True  # whether there are no replicas

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 2 * CLASSES)
        self.metrics = nn.ModuleDict({step: Metrics() for step in ("fit", "validate", "test")})
        self.tracked, self.fresh = MetricTracker(MeanMetric(), maximize=False), MeanMetric()
        self.listed = [SumMetric()]  # not a submodule
        self.by_step = {step: each.f1 for step, each in self.metrics.items()}  # submodules in a plain dict
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with piper.annotate("PP", 0):
            hidden = self.first(x)
        with piper.annotate("PP", 1):
            return hidden, self.second(hidden).unflatten(1, (2, CLASSES))

    def _shared(self, batch: Any, step: str) -> tuple[Tensor, Any]:
        x, y, m = batch["x"], batch["y"], self.metrics[step]
        hidden, both = self(x)
        out = both[:, 0]
        with piper.annotate("PP", 1):
            loss = F.cross_entropy(out, y)
        acc = m.acc(out, y)
        self.log("acc", acc, prog_bar=True, on_step=True, on_epoch=True, batch_size=len(y))
        self.by_step[step].update(out, y)
        self.log("f1", m.f1, on_epoch=True, batch_size=len(y))
        m.auroc(out.softmax(-1), y)
        self.log("auroc", m.auroc, on_step=True, on_epoch=True)
        m.binned(out.softmax(-1), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("binned", m.binned, on_step=False, on_epoch=True)
        m.loss.update(loss, weight=len(y))
        self.log("mean_loss", m.loss, on_epoch=True)
        m.hidden(hidden)
        self.log("hidden", m.hidden)
        self.log_dict(m.some(out, y), on_step=True, on_epoch=True)
        m.others.update(out, y)
        self.log_dict(m.others, on_step=False, on_epoch=True)
        m.by["sum"](x.sum(1))
        m.by["mse"].update(hidden[:, 0], x[:, 0].contiguous())
        for name, metric in m.by.items():
            self.log(name, metric, on_step=True, on_epoch=True)
        self.log("pearson", m.listed[0](hidden[:, 0], hidden[:, 1]), on_step=True, on_epoch=False)
        self.log("most", m.listed[1](out, y)["max"])
        self.log_dict(m.classwise(out, y))
        m.perplexity.update(both, y[:, None].expand(-1, 2))
        m.bleu(batch["texts"], batch["targets"])
        self.log("bleu", m.bleu, on_step=True, on_epoch=True)
        m.confusion.update(out, y)
        m.members.update(out, y)
        for name, metric in m.members.items():
            self.log(f"member {name}", metric, on_step=False, on_epoch=True)
        m.embedded(out)
        self.log("embedded", m.embedded, on_step=True, on_epoch=True)
        sure = out.detach().softmax(-1)
        found = [
            {"boxes": boxes[scores > 0.3], "scores": scores[scores > 0.3]}
            for boxes, scores in zip(out, sure, strict=True)
        ]
        m.boxes.update(found, target=[{"boxes": x[i, 0]} for i in range(len(x))])
        self.log("boxes", m.boxes, on_step=False, on_epoch=True)
        if self.alone:
            m.count.update(out, y)
            m.positions.update(hidden[:, 0])
        return loss, acc

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._shared(batch, "fit")[0]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss, acc = self._shared(batch, "validate")
        self.tracked.update(loss)
        self.fresh.update(loss)
        return {"acc": acc, "targets": batch["y"]}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._shared(batch, "test")

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append(outputs["acc"].clone())
        self.listed[0].update(len(batch["y"]))

    def on_validation_epoch_start(self) -> None:
        self.tracked.increment()
        self.fresh = MeanMetric()  # another object than before

    def _end(self, step: str) -> None:
        m = self.metrics[step]
        self.log("perplexity", m.perplexity.compute())
        self.seen.append(m.confusion.compute())
        if self.alone:
            self.log("positions", m.positions.compute())
            self.log("count", m.count.compute())
        for metric in (m.perplexity, m.confusion, m.positions, m.count):
            metric.reset()

    def on_train_epoch_end(self) -> None:
        self._end("fit")

    def on_validation_epoch_end(self) -> None:
        self._end("validate")
        self.seen += [self.tracked.compute_all(), self.fresh.compute(), self.listed[0].compute()]

    def on_test_epoch_end(self) -> None:
        self._end("test")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class InReplicas(Net):
    """The model without metrics that need all samples in one process."""

    alone = False


def net(replicas: int = 1) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return (Net() if replicas == 1 else InReplicas()).double()


class Data(Dataset[Any]):
    """Random samples.

    Args:
        period: After so many samples, the same samples come again.
    """

    def __init__(self, samples: int = SAMPLES, seed: int = 0, period: int = 1000) -> None:
        self.samples, self.period, samples = samples, period, min(samples, period)
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = (
            torch.randn(samples, 6, generator=g, dtype=torch.float64),
            torch.randint(CLASSES, (samples,), generator=g),
        )
        words = torch.randint(len(WORDS), (samples, 6), generator=g).tolist()
        self.texts = [" ".join(WORDS[i] for i in row) for row in words]
        self.targets = [[" ".join(WORDS[i] for i in row[n % 3 :]) + " here"] for n, row in enumerate(words)]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Any:
        i %= self.period
        return self.x[i], self.y[i], self.texts[i], self.targets[i]


def collate(samples: Sequence[Any]) -> dict[str, Any]:
    x, y, texts, targets = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y), "texts": list(texts), "targets": list(targets)}


def loader(replicas: int, samples: int = SAMPLES, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(Data(samples, seed), batch_size=BATCH // replicas, collate_fn=collate)


def training_loader(replicas: int, processes: int, period: int = 1000) -> DataLoader[Any]:
    """A loader in the order of the samples, also over replicas."""
    data = Data(period=period)
    if replicas == 1:
        return DataLoader(data, batch_size=BATCH, collate_fn=collate)
    replica = int(os.environ["LOCAL_RANK"]) * replicas // processes
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=replicas, rank=replica, shuffle=False
    )
    return DataLoader(data, batch_size=BATCH // replicas, sampler=sampler, collate_fn=collate)


class Logged(L.Callback):
    """Records what can be seen after every batch, epoch and evaluation. If it has a path, saves a checkpoint
    there after two steps.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.found: list[dict[str, Tensor]] = []
        self.path = path
        self.samples = SumMetric()  # of its own

    def on_validation_epoch_start(self, *args: Any) -> None:
        self.samples.reset()

    def on_validation_epoch_end(self, *args: Any) -> None:
        self.found.append({"samples": self.samples.compute()})

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self.samples.update(len(batch["y"]))
        self._keep(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self.path is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.path)

    def _keep(self, trainer: L.Trainer, *args: Any) -> None:
        self.found.append(
            {k: v.clone() for k, v in {**trainer.callback_metrics, **trainer.logged_metrics}.items()}
        )

    on_train_batch_end = on_train_epoch_end = on_validation_end = on_test_end = on_test_batch_end = _keep


def pp2(microbatches: int = 4) -> list[Any]:
    return piper.schedules.one_f_one_b(stages=2, microbatches=microbatches)


def dp2() -> list[Any]:
    place = piper.Place(filter={}, devices=[0, 1])
    split = piper.Split(filter={}, dim_name="MB", num_microbatches=2)
    return [place, split, Replicate(filter={}, devices=[0, 1])]


def pp2_dp2() -> list[Any]:
    groups = [[0, 2], [1, 3]]
    places = [piper.Place(filter={"PP": stage}, devices=group) for stage, group in enumerate(groups)]
    return [
        *places,
        *pp2(2)[2:],
        *(Replicate(filter={"PP": stage}, devices=group) for stage, group in enumerate(groups)),
    ]


SIZES = {"pp2": (8, 2), "dp2": (8, 4, 2), "pp2_dp2": (8, 4, 2)}
PROGRAMS: dict[str, tuple[Callable[[], list[Any]], int, int]] = {
    "pp2": (pp2, 2, 1),
    "dp2": (dp2, 2, 2),
    "pp2_dp2": (pp2_dp2, 4, 2),
}


class Runs:
    """The scenarios, with a Trainer of one device or of several processes.

    Args:
        strategy: Makes the strategy.
        replicas: The number of replicas whose batches are read.
        folder: The folder for checkpoints.
    """

    def __init__(self, strategy: Callable[[], Any], devices: int, replicas: int, folder: Path) -> None:
        self.strategy, self.devices, self.replicas, self.folder = strategy, devices, replicas, folder

    def trainer(self, logged: Logged, **options: Any) -> L.Trainer:
        options = {
            **QUIET,
            "accelerator": "cpu",
            "devices": self.devices,
            "num_sanity_val_steps": 1,
            **options,
        }
        return L.Trainer(strategy=self.strategy(), callbacks=[logged], **options)

    def fitted(self) -> dict[str, Any]:
        """Fit with validations, then test."""
        fitted, tested, module = Logged(), Logged(), net(self.replicas)
        self.trainer(fitted, max_epochs=2).fit(
            module, training_loader(self.replicas, self.devices), loader(self.replicas, seed=1)
        )
        self.trainer(tested).test(module, loader(self.replicas, seed=2), verbose=False)
        return {"fitted": fitted.found, "tested": tested.found, "seen": module.seen}

    def resumed(self) -> dict[str, Any]:
        """Resume in the middle of an epoch, from a checkpoint with states of metrics.

        A plain Trainer begins the loader again, so the third batch has the samples of the first.
        """
        path = self.folder / "middle.ckpt"
        before, after = Logged(path), Logged()
        data = training_loader(self.replicas, self.devices, period=2 * BATCH)
        self.trainer(before, max_epochs=1, limit_val_batches=0).fit(persistent(net(self.replicas)), data)
        module = persistent(net(self.replicas))
        self.trainer(after, max_epochs=2, limit_val_batches=0).fit(module, data, ckpt_path=path)
        content = torch.load(path, weights_only=True)["state_dict"]
        return {
            "before": before.found,
            "after": after.found,
            "seen": module.seen,
            "correct": content["metrics.fit.f1.tp"],
        }


def persistent(module: Net) -> Net:
    for part in module.metrics["fit"].modules():
        if isinstance(part, Metric):
            part.persistent(True)
    return module


def trace_all(names: Sequence[str], folder: Path) -> None:
    """Trace the steps before ranks are forked."""
    example = collate([Data()[i] for i in range(BATCH)])
    for name in names:
        for step in ("training_step", "validation_step", "test_step"):
            trace(net(PROGRAMS[name][2]), example, SIZES[name], step, None)


@sharing_captures
def train(rank: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run all scenarios in this process. Returns for each program what this process has seen, or the error."""
    found: dict[str, Any] = {}
    for name in names:
        program, devices, replicas = PROGRAMS[name]
        strategy = partial(piper.PiperStrategy, program(), timeout=PATIENCE)
        (folder / name).mkdir(exist_ok=True, parents=True)
        runs = Runs(strategy, devices, replicas, folder / name)
        try:
            found[name] = {"fitted": runs.fitted(), "resumed": runs.resumed()}
        except Exception as error:
            found[name] = "".join(traceback.format_exception(error))
    return found
