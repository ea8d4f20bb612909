"""What people do with the training loop."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from tests.zoo.kinds import SAMPLES, Kind, integers, normal, tensors


class Classifier(L.LightningModule):
    """What the others are variations of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class MultiTask(L.LightningModule):
    """Losses weighed by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"class": nn.Linear(16, 3), "value": nn.Linear(16, 1)})
        self.log_vars = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, label, value = batch
        h = self.body(x)
        losses = torch.stack(
            [
                F.cross_entropy(self.heads["class"](h), label),
                F.smooth_l1_loss(self.heads["value"](h).squeeze(-1), value),
            ]
        )
        loss = (torch.exp(-self.log_vars) * losses + self.log_vars).sum()
        self.log_dict({"class": losses[0], "value": losses[1], "loss": loss})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([
            {"params": [*self.body.parameters(), *self.heads.parameters()]},
            {"params": [self.log_vars], "lr": 1e-1},
        ], lr=1e-2)  # fmt: skip


class Curriculum(Classifier):
    """The loss changes with the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        if self.current_epoch < 1:
            losses = losses[losses <= losses.median()]
        loss = losses.mean()
        self.log("loss", loss)
        return loss


class Late(Classifier):
    """From the third step on, the loss takes the easy examples only: so long there is nothing that cannot be
    captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        if self.global_step >= 2:
            losses = losses[losses < 1.5]
        loss = losses.mean()
        self.seen.update(loss)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Collecting(Classifier):
    """Outputs of validation are kept, and metrics computed at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_step_outputs: list[Tensor] = []
        self.validation_labels: list[Tensor] = []
        self.f1 = torchmetrics.MetricCollection([
            torchmetrics.Accuracy(task="multiclass", num_classes=3),
            torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
        ])  # fmt: skip

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.validation_step_outputs.append(logits)
        self.validation_labels.append(y)
        self.f1.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_validation_epoch_end(self) -> None:
        logits, labels = torch.cat(self.validation_step_outputs), torch.cat(self.validation_labels)
        self.log("val_acc", (logits.argmax(-1) == labels).double().mean(), sync_dist=True)
        self.log_dict(self.f1.compute())
        self.f1.reset()
        self.validation_step_outputs.clear()
        self.validation_labels.clear()


class ExtraKeys(Classifier):
    """More than the loss is returned, and used in a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        logits = self(x)
        return {
            "loss": F.cross_entropy(logits, y),
            "preds": logits.argmax(-1),
            "epoch": self.current_epoch,
            "note": "ok",
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("acc", (outputs["preds"] == batch[1]).double().mean())


class Skipping(Classifier):
    """Leaves out some batches. (Lightning refuses that where there are several processes.)"""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        if batch_idx % 3 == 1:
            return None
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss


class LBFGS(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class SeveralOptimizers(Classifier):
    """Two optimizers with a schedule each, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1)
        second = torch.optim.AdamW(self.net[2].parameters(), lr=1e-2)
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(first, 0.5),
            torch.optim.lr_scheduler.StepLR(second, 1),
        ]
        return [first, second], schedulers


class Warmup(Classifier):
    """Sets the learning rate where the optimizer steps."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            scale = min(1.0, float(self.trainer.global_step + 1) / 4)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.1


class OwnClipping(Classifier):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        limit = 0.5 if self.current_epoch == 0 else 0.25
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


class ManualAccumulation(Classifier):
    """Steps at every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(x), y) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss)
        return loss


class SumOfSamples(Classifier):
    """The loss is a sum, and grows with the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y, reduction="sum") * 0.1
        self.log("loss", loss)
        return loss


class FrozenAtFirst(Classifier):
    """A backbone that is unfrozen after the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


class Physics(L.LightningModule):
    """A network that solves y' = -y: derivatives with respect to the input in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0][:, :1].clone().requires_grad_(True)
        y = self.net(x)
        (dy,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        start = self.net(torch.zeros(1, 1, dtype=x.dtype, device=x.device))
        loss = ((dy + y) ** 2).mean() + ((start - 1) ** 2).mean()
        self.log("residual", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class StopsWhenGood(Classifier):
    """Looks at the loss in the step: guards against NaN, ends the training, keeps the best value."""

    def __init__(self) -> None:
        super().__init__()
        self.best = float("inf")
        self.history: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if torch.isnan(loss):
            raise ValueError("the loss is not a number")
        self.best = min(self.best, loss.item())
        self.history.append(loss.item())
        if self.best < 1e-3:
            self.trainer.should_stop = True
        self.log("best", self.best, prog_bar=True)
        return loss


class HardExamples(Classifier):
    """Only the hardest half of the batch counts, with weights of the classes in the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        counts = torch.bincount(y, minlength=3).to(x.dtype)
        losses = F.cross_entropy(self(x), y, weight=1 / (counts + 1), reduction="none")
        hardest, _ = losses.topk(max(1, len(losses) // 2))
        self.log("hardest", hardest.mean())
        return hardest.mean()


inputs, label = normal(SAMPLES, 6), integers(3, SAMPLES, seed=1)
data = tensors(inputs, label)
KINDS = [
    Kind("multi_task", "several losses, learned weights", MultiTask,
        tensors(inputs, label, normal(SAMPLES, seed=2))),
    Kind("curriculum", "`if self.current_epoch`; a selection by the losses", Curriculum, data),
    Kind("late", "a step that cannot be captured from the third batch on; AdamW, a scheduler, a "
                 "metric", Late, data),
    Kind("collecting", "outputs kept in `validation_step`, metrics in "
                       "`on_validation_epoch_end`", Collecting, data, data),
    Kind("extra_keys", "a dict with tensors, numbers and text", ExtraKeys, data),
    Kind("skipping", "`training_step` returns None for some batches", Skipping, data),
    Kind("lbfgs", "an optimizer that calls the closure several times", LBFGS, data),
    Kind("several_optimizers", "manual optimization, two optimizers with "
                               "schedulers", SeveralOptimizers, data),
    Kind("warmup", "`optimizer_step` overridden", Warmup, data),
    Kind("own_clipping", "`configure_gradient_clipping` overridden", OwnClipping, data),
    Kind("manual_accumulation", "manual optimization that steps at every second "
                                "batch", ManualAccumulation, data),
    Kind("accumulation", "`accumulate_grad_batches`, clipping", Classifier, data,
         options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    Kind("sum", "a loss that is a sum over the batch", SumOfSamples, data),
    Kind("unfreezing", "`requires_grad` switched after the first epoch", FrozenAtFirst, data),
    Kind("physics", "derivatives with respect to inputs in the loss", Physics, data),
    Kind("watching", "`if torch.isnan(loss)`, a list of losses, `trainer.should_stop`", StopsWhenGood, data),
    Kind("hard_examples", "`topk` and class weights of the batch", HardExamples, data),
]  # fmt: skip
