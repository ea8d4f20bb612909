"""What is harder: collectives in steps, callbacks that change weights, several loaders, codebooks, gradients
of gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.kinds import SAMPLES, Kind, integers, normal, tensors
from tests.zoo.models_loops import Classifier


class Gathered(L.LightningModule):
    """Contrasts the samples of all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = self.net(batch[0]), self.net(batch[0].flip(1))
        if self.trainer.world_size > 1:
            a, b = (self.all_gather(x, sync_grads=True).flatten(0, 1) for x in (a, b))
        logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).t()
        loss = F.cross_entropy(logits / 0.1, torch.arange(len(logits), device=logits.device))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RankAware(Classifier):
    """Knows that there are other processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.is_global_zero and batch_idx == 0:
            self.note(loss)
        self.log("synced", loss, sync_dist=True, on_epoch=True)
        return loss

    @rank_zero_only
    def note(self, loss: Tensor) -> None:
        self.last = f"{loss.item():.3f}"

    def on_train_epoch_end(self) -> None:
        seen = self.all_gather(torch.tensor(float(self.trainer.global_step)))
        self.log("steps", seen.mean())


class Recomputing(Classifier):
    """Recomputes activations, and looks at values: with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = checkpoint(self.net[:3], x, use_reentrant=False)
        loss = F.cross_entropy(self.net[3](h), y)
        if not torch.isfinite(loss):
            loss = torch.zeros_like(loss, requires_grad=True)
        self.log("loss", loss)
        return loss


class Branches(L.LightningModule):
    """Which layers a batch goes through is decided by its values, so some have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)])
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        chosen = 0 if x[0, 0] > 0.3 else 1
        loss = F.cross_entropy(self.head(torch.tanh(self.branches[chosen](x))), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Watched(Classifier):
    """Callbacks of its own."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=1)]


class FineTuned(L.LightningModule):
    """A backbone that a callback unfreezes at the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.backbone(x)), y)
        self.log("loss", loss)
        return loss

    def configure_callbacks(self) -> Any:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1)


class AveragedWeights(Classifier):
    """Validates with averaged weights, which are not in the module: they are put in, and taken out again."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged: dict[str, Tensor] = {}

    @contextmanager
    def as_averaged(self) -> Iterator[None]:
        own = {n: p.data for n, p in self.named_parameters()}
        for n, p in self.named_parameters():
            p.data = self.averaged[n]
        yield
        for n, p in self.named_parameters():
            p.data = own[n]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for n, p in self.named_parameters():
            old = self.averaged.get(n, p.detach())
            self.averaged[n] = 0.9 * old + 0.1 * p.detach()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        if self.trainer.sanity_checking:
            return
        with self.as_averaged():
            self.log("val_loss", F.cross_entropy(self(x), y))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["averaged"] = self.averaged

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.averaged = checkpoint["averaged"]


class SemiSupervised(Classifier):
    """Two loaders at once: few labels, many samples without."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["labeled"]
        (u,) = batch["unlabeled"]
        supervised = F.cross_entropy(self(x), y)
        with torch.no_grad():
            target = (self(u) / 0.5).softmax(-1)
        consistency = F.mse_loss(self(u + 0.1 * u.sign()).softmax(-1), target)
        weight = min(1.0, self.global_step / 4)
        self.log_dict({"supervised": supervised, "consistency": consistency})
        return supervised + weight * consistency


class Sharpness(Classifier):
    """Sharpness-aware minimization: two backward passes for each step."""

    def __init__(self, rho: float = 0.05) -> None:
        super().__init__()
        self.automatic_optimization, self.rho = False, rho

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        steps = [self.rho * p.grad / (norm + 1e-12) for p in self.parameters()]
        with torch.no_grad():
            for p, step in zip(self.parameters(), steps, strict=True):
                p.add_(step)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        with torch.no_grad():
            for p, step in zip(self.parameters(), steps, strict=True):
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        self.log_dict({"loss": loss, "norm": norm})


class VQVAE(L.LightningModule):
    """A codebook in buffers, which the step moves toward what it encodes."""

    def __init__(self, codes: int = 5) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 3), nn.Linear(3, 6)
        self.register_buffer("codebook", torch.randn(codes, 3))
        self.register_buffer("counts", torch.ones(codes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        z = self.encoder(x)
        index = torch.cdist(z.detach(), self.codebook).argmin(1)
        hot = F.one_hot(index, len(self.codebook)).to(z.dtype)
        self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.codebook.add_(
            0.1 * (hot.t() @ z.detach() - hot.sum(0)[:, None] * self.codebook) / self.counts[:, None]
        )
        quantized = z + (self.codebook[index] - z).detach()
        loss = F.mse_loss(self.decoder(quantized), x) + 0.25 * F.mse_loss(z, self.codebook[index].detach())
        self.log("loss", loss)
        self.log("used", (self.counts > 0.5).sum().float())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class MAML(L.LightningModule):
    """Learns to learn: gradients through steps of gradient descent."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        half = len(x) // 2
        weights = dict(self.net.named_parameters())
        loss = F.cross_entropy(torch.func.functional_call(self.net, weights, x[:half]), y[:half])
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(self.net, fast, x[half:]), y[half:])
        self.log_dict({"inner": loss, "outer": outer})
        return outer

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class SeveralLoaders(Classifier):
    """Validates on two sets, and keeps what is best of them."""

    def __init__(self) -> None:
        super().__init__()
        self.best = copy.deepcopy(self.net).requires_grad_(False)
        self.lowest = float("inf")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        value = float(self.trainer.callback_metrics.get("val_loss/dataloader_idx_0", 1e9))
        if not self.trainer.sanity_checking and value < self.lowest:
            self.lowest = value
            self.best.load_state_dict(self.net.state_dict())


def both() -> Any:
    some = tensors(inputs[:16], label[:16])()
    return CombinedLoader(
        {"labeled": some, "unlabeled": tensors(normal(SAMPLES, 6, seed=4))()}, "max_size_cycle"
    )


inputs, label = normal(SAMPLES, 6), integers(3, SAMPLES, seed=1)
data = tensors(inputs, label)
KINDS = [
    Kind("gathered", "`self.all_gather(sync_grads=True)` in the step", Gathered, data),
    Kind("rank_aware", "`is_global_zero`, `sync_dist`, `all_gather` in a hook", RankAware, data),
    Kind("recomputing", "`torch.utils.checkpoint`, a value that decides; accumulation, "
                        "clipping", Recomputing, data,
         options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    Kind("branches", "layers chosen by values, different in each process", Branches, data),
    Kind("early_stopping", "`configure_callbacks` with EarlyStopping on a validation", Watched, data, data),
    Kind("backbone_finetuning", "BackboneFinetuning", FineTuned, data, drifts=True),
    Kind("averaged_weights", "`p.data` replaced for validation", AveragedWeights, data, data),
    Kind("semi_supervised", "CombinedLoader of two sets", SemiSupervised, both),
    Kind("sharpness", "manual optimization, two backward passes, parameters moved between", Sharpness, data),
    Kind("vqvae", "a codebook in buffers that the step changes", VQVAE, data),
    Kind("maml", "`functional_call`, gradients through gradient steps", MAML, data),
    Kind("several_loaders", "two validation sets; a copy of the best "
                            "weights", SeveralLoaders, data, lambda: [data(), data()]),
]  # fmt: skip
