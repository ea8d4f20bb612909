"""Images: classifiers, segmentation, detection, self-supervised learning."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from tests.zoo.kinds import SAMPLES, Kind, integers, normal, samples, tensors

images = normal(SAMPLES, 3, 8, 8)
labels = integers(4, SAMPLES, seed=1)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(L.LightningModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            BasicBlock(3, 4), BasicBlock(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )
        metrics = torchmetrics.MetricCollection(
            {"acc": torchmetrics.Accuracy(task="multiclass", num_classes=4)}
        )
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss)
        self.log_dict(self.train_metrics(logits, y))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.val_metrics.update(logits, y)
        self.log_dict(self.val_metrics)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class UNet(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(3, 4), self.block(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Sequential(self.block(8, 4), nn.Conv2d(4, 1, 1))

    def block(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down1(x)
        x = self.up(self.down2(F.max_pool2d(skip, 2)))
        return self.last(torch.cat([x, skip], dim=1))

    def shared_step(self, batch: Any, stage: str) -> Tensor:
        image, mask = batch
        logits = self(image)
        bce = F.binary_cross_entropy_with_logits(logits, mask)
        prob = logits.sigmoid()
        intersection = (prob * mask).sum()
        dice = 1 - (2 * intersection + 1) / (prob.sum() + mask.sum() + 1)
        self.log(f"{stage}_dice", dice, prog_bar=True)
        return bce + dice

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "val")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class AutoEncoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 192))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        x = x.view(x.size(0), -1)
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class SimCLR(L.LightningModule):
    """Every sample is compared with every other one of the batch."""

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 8))

    def info_nce_loss(self, batch: Any, mode: str) -> Tensor:
        views, _ = batch
        feats = self.net(torch.cat(views, dim=0))
        cos_sim = F.cosine_similarity(feats[:, None, :], feats[None, :, :], dim=-1)
        self_mask = torch.eye(cos_sim.shape[0], dtype=torch.bool, device=cos_sim.device)
        cos_sim.masked_fill_(self_mask, -9e15)
        pos_mask = self_mask.roll(shifts=cos_sim.shape[0] // 2, dims=0)
        cos_sim = cos_sim / self.hparams.temperature
        nll = (-cos_sim[pos_mask] + torch.logsumexp(cos_sim, dim=-1)).mean()
        self.log(mode + "_loss", nll)
        comb_sim = torch.cat([cos_sim[pos_mask][:, None], cos_sim.masked_fill(pos_mask, -9e15)], dim=-1)
        sim_argsort = comb_sim.argsort(dim=-1, descending=True).argmin(dim=-1)
        self.log(mode + "_acc_top1", (sim_argsort == 0).float().mean())
        return nll

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.info_nce_loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.info_nce_loss(batch, "val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]


class BYOL(L.LightningModule):
    """A target network follows by a moving average, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        p = F.normalize(self.predictor(self.online(a)), dim=-1)
        with torch.no_grad():
            z = F.normalize(self.target(b), dim=-1)
        return (2 - 2 * (p * z).sum(dim=-1)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (a, b), _ = batch
        loss = self.loss(a, b) + self.loss(b, a)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        tau = 0.9 + 0.1 * self.global_step / max(1, int(self.trainer.estimated_stepping_batches))
        with torch.no_grad():
            for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
                target.data = tau * target.data + (1 - tau) * online.data

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Mixup(L.LightningModule):
    """Mixes samples of the batch by NumPy's random numbers, before it goes to the device."""

    def __init__(self, alpha: float = 0.4) -> None:
        super().__init__()
        self.alpha = alpha
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 4))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        y = F.one_hot(y, 4).double()
        if self.trainer.training:
            lam = np.random.beta(self.alpha, self.alpha)
            order = np.random.permutation(len(x))
            x, y = lam * x + (1 - lam) * x[order], lam * y + (1 - lam) * y[order]
        return x, y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(-1) == y.argmax(-1)).double().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Distillation(L.LightningModule):
    """A frozen teacher, in eval mode, beside the student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(
            nn.Flatten(), nn.Linear(192, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
        )
        self.student = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
        self.teacher.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.teacher.eval()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        with torch.no_grad():
            soft = (self.teacher(x) / 2).softmax(-1)
        logits = self.student(x)
        kd = F.kl_div((logits / 2).log_softmax(-1), soft, reduction="batchmean") * 4
        loss = 0.5 * kd + 0.5 * F.cross_entropy(logits, y)
        self.log_dict({"kd": kd, "loss": loss})
        return {"loss": loss, "kd": kd.detach(), "logits": logits.detach()}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.student.parameters(), lr=1e-2)


class TestTimeAugmentation(L.LightningModule):
    """Predicts and validates with the mean over several views."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, label_smoothing=0.1)

    def views(self, x: Tensor) -> Tensor:
        return torch.stack([self(x), self(x.flip(-1)), self(x.flip(-2))]).softmax(-1).mean(0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_acc(self.views(x), y)
        self.log("val_acc", self.val_acc, on_step=False, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        probs = self.views(batch[0])
        return {"probs": probs, "label": probs.argmax(-1), "name": "mean of 3"}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Detector(L.LightningModule):
    """Lists of images and of targets with a varying number of boxes; a loop over images."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.head = nn.Linear(16, 3 * 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        losses = []
        for image, target in zip(images, targets, strict=True):
            out = self.head(self.backbone(image[None])).view(3, 5)
            boxes, scores = out[:, :4], out[:, 4]
            distance = torch.cdist(boxes, target["boxes"], p=1)
            best = distance.argmin(dim=0)
            positive = torch.zeros_like(scores)
            positive[best] = 1.0
            box = F.l1_loss(boxes[best], target["boxes"])
            losses.append(box + F.binary_cross_entropy_with_logits(scores, positive))
        loss = torch.stack(losses).mean()
        self.log("loss", loss, batch_size=len(images))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, targets = batch
        for image, target in zip(images, targets, strict=True):
            boxes = self.head(self.backbone(image[None])).view(3, 5)[:, :4]
            self.log("distance", torch.cdist(boxes, target["boxes"]).min(), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def scenes() -> list[Any]:
    return [
        (normal(3, 6 + i % 3, 8, seed=i), {"boxes": normal(1 + i % 3, 4, seed=100 + i), "image_id": i})
        for i in range(SAMPLES)
    ]


def as_lists(items: list[Any]) -> Any:
    return tuple(zip(*items, strict=True))


def two_views() -> list[Any]:
    return [((normal(3, 8, 8, seed=i), normal(3, 8, 8, seed=50 + i)), i % 4) for i in range(SAMPLES)]


classified = tensors(images, labels)
masked = tensors(images, (normal(SAMPLES, 1, 8, 8, seed=2) > 0).double())
KINDS = [
    Kind("resnet", "batch norm, MetricCollection, OneCycleLR", ResNet, classified, classified),
    Kind("unet", "Dice loss over the batch", UNet, masked, masked, of_batch=("train_dice", "val_dice")),
    Kind("autoencoder", "the first example of the documentation", AutoEncoder, classified, classified),
    Kind(
        "simclr",
        "the loss compares all samples; selection by a mask",
        SimCLR,
        samples(two_views()),
        samples(two_views()),
    ),
    Kind("byol", "EMA of a target in `on_train_batch_end`", BYOL, samples(two_views())),
    Kind(
        "mixup",
        "NumPy's random numbers in `on_before_batch_transfer`",
        Mixup,
        classified,
        classified,
        mixes=True,
    ),
    Kind("distillation", "frozen teacher in eval mode; a dict with extra keys", Distillation, classified),
    Kind(
        "augmented",
        "test-time augmentation; strings in `predict_step`",
        TestTimeAugmentation,
        classified,
        classified,
        True,
    ),
    Kind(
        "detection",
        "lists of images and boxes; loops over images",
        Detector,
        samples(scenes(), as_lists),
        samples(scenes(), as_lists),
    ),
]
