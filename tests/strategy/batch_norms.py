"""Trainings of modules with batch norms, whose statistics are those of the whole batch: on one device, and
over processes in which each replica reads a part of each batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.accelerators._torch_groups import destroy_all_groups
from lightning_piper.directives import Directive
from tests.strategy.fitting import traced_once

STEPS = 4
EVEN, UNEVEN = (4, 4), (5, 3)  # samples that each of two replicas draws


class Net(L.LightningModule):
    """A model in two stages, with a norm at the beginning of one stage and at the end of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.second = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.gradients: list[dict[str, Tensor]] = []
        self.whole = True  # this process has the whole of every gradient
        self.parts: Sequence[int] = ()  # the parts of the batch, whose mean losses have equal weights

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            x = self.first(batch[0])
        with piper.annotate("PP", 1):
            loss = self.loss(self.second(x), batch[1])
        self.log("loss", loss)
        return loss

    def loss(self, out: Tensor, wanted: Tensor) -> Tensor:
        parts = list(self.parts) or [len(out)]
        return torch.stack(
            [F.mse_loss(a, b) for a, b in zip(out.split(parts), wanted.split(parts), strict=True)]
        ).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with piper.annotate("PP", 0):
            x = self.first(batch[0])
        with piper.annotate("PP", 1):
            self.log("validated", F.mse_loss(self.second(x), batch[1]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.whole:
            self.gradients.append(
                {name: x.grad.clone() for name, x in self.named_parameters() if x.grad is not None}
            )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


class Bare(Net):
    """Norms without affine parameters, without running statistics, and with other settings than the defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.BatchNorm1d(4, affine=False), nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False)
        )
        self.second = nn.Sequential(nn.BatchNorm1d(6, momentum=0.3, eps=1e-3), nn.Linear(6, 3))


class Synced(Net):
    """Says so itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.SyncBatchNorm(6), nn.Tanh())
        self.second = nn.Sequential(nn.SyncBatchNorm(6), nn.Linear(6, 3))


class Block(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)
        self.two, self.last = nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.last(self.two(torch.relu(self.norm(self.one(x))))) + self.short(x))


class Residual(Net):
    """A small residual network with norms in two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), Block(1, 3))
        self.second = nn.Sequential(Block(3, 4), nn.Flatten(), nn.Linear(16, 3))


class Mean(Net):
    """A norm whose running statistics are means of all batches, and a step that asks for a value: it runs as
    it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.second(self.first(batch[0])), batch[1])
        return 2 * loss if loss.item() > 1e9 else loss


KINDS: dict[str, type[Net]] = {kind.__name__: kind for kind in (Net, Bare, Synced, Residual, Mean)}


def dp2(**options: Any) -> list[Directive]:
    return [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1], **options)]


def pp2_dp2(**options: Any) -> list[Directive]:
    places: list[Directive] = [
        piper.Place(filter={"PP": i}, devices=group) for i, group in enumerate([[0, 2], [1, 3]])
    ]
    return [*places, piper.Replicate(filter={}, devices=[[0, 2], [1, 3]], **options)]


SPLIT = piper.Split(filter={}, dim_name="MB", num_microbatches=2)
# number of processes -> name -> (kind of module, program, options)
TRAININGS: dict[int, dict[str, tuple[str, Callable[[], list[Directive]], dict[str, Any]]]] = {
    2: {
        "DP2": ("Net", dp2, {}),
        "DP2, bare": ("Bare", dp2, {}),
        "DP2, SyncBatchNorm": ("Synced", dp2, {"sync_batchnorm": False}),
        "DP2, residual": ("Residual", dp2, {}),
        "DP2, accumulated": ("Net", dp2, {"accumulate_grad_batches": 2}),
        "DP2, microbatches": ("Net", lambda: [SPLIT, *dp2()], {}),
        "DP2, resumed": ("Net", dp2, {"epochs": (1, 2)}),
        "ZeRO-1": ("Net", lambda: dp2(shard_optimizer=True), {}),
        "ZeRO-2": ("Net", lambda: dp2(shard_grads=True), {}),
        "ZeRO-3": ("Net", lambda: dp2(shard_params=True), {}),
        "as it is": ("Mean", dp2, {}),
        "as it is, uneven": ("Net", dp2, {"capture": "never", "samples": UNEVEN}),
        "as it is, SyncBatchNorm": ("Synced", dp2, {"capture": "never", "sync_batchnorm": False}),
        "each replica's own": ("Net", dp2, {"sync_batchnorm": False}),
    },
    4: {
        "PP2 x DP2": ("Net", pp2_dp2, {}),
        "PP2 x DP2, residual": ("Residual", pp2_dp2, {}),
        "PP2 x DP2, microbatches": ("Net", lambda: [SPLIT, *pp2_dp2()], {}),
        "PP2 x ZeRO-3": ("Net", lambda: pp2_dp2(shard_params=True), {}),
    },
}  # fmt: skip


def made(kind: str) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = KINDS[kind]().double()
        with torch.no_grad():
            for norm in (
                m
                for m in module.modules()
                if getattr(m, "weight", None) is not None and hasattr(m, "running_mean")
            ):
                norm.weight.uniform_(0.5, 1.5), norm.bias.uniform_(-1, 1)
    return module


def batches(samples: Sequence[int], replica: int | None) -> DataLoader[Any]:
    """The batches of one replica; for one device, all of them, replica by replica."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        [
            [
                torch.randn(n, 4, generator=generator).double() * (1 + r) + 3 * r,
                torch.randn(n, 3, generator=generator).double(),
            ]
            for r, n in enumerate(samples)
        ]
        for _ in range(STEPS)
    ]
    whole = [
        [torch.cat(xs) for xs in zip(*step, strict=True)] if replica is None else step[replica]
        for step in parts
    ]
    return DataLoader(whole, batch_size=None)  # type: ignore[arg-type]


@traced_once
def train(module: Net, samples: Sequence[int], strategy: Any, replica: int | None, folder: Path,
          resumed: Path | None = None, **options: Any) -> dict[str, Any]:  # fmt: skip
    loader = batches(samples, replica)
    before = {name: type(m).__name__ for name, m in module.named_modules()}
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        **options,
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader, ckpt_path=resumed, weights_only=False)
        trainer.save_checkpoint(folder / "last.ckpt")
    saved = (
        torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
        if (folder / "last.ckpt").exists()
        else {}
    )
    seen = {name: float(x) for name, x in trainer.callback_metrics.items()}
    assert {name: type(m).__name__ for name, m in module.named_modules()} == before
    return {
        "values": {name: x.clone() for name, x in module.state_dict().items()},
        "saved": saved,
        "seen": seen,
        "gradients": module.gradients,
        "warned": [str(w.message) for w in warned if "uncaptured" in str(w.message)],
    }


def work(rank: int, processes: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        kind, program, given = TRAININGS[processes][name]
        options = {"sync_batchnorm": True, "samples": EVEN, "devices": processes, **given}
        samples, capture, resumed = options.pop("samples"), options.pop("capture", "auto"), None
        for epochs in options.pop("epochs", (1,)):
            module, replica = made(kind), rank // (processes // 2)
            module.whole = "ZeRO" not in name and processes == 2
            strategy = piper.PiperStrategy(program(), capture=capture)
            found[name] = train(
                module, samples, strategy, replica, folder / name, resumed, max_epochs=epochs, **options
            )
            resumed = folder / name / "last.ckpt"
    return found


def alone(name: str, processes: int, folder: Path) -> dict[str, Any]:
    """The same training on one device with the whole batches, without the strategy. An earlier fit of this process may
    have left a process group, over which torch's SyncBatchNorm would communicate."""
    destroy_all_groups()
    kind, _, given = TRAININGS[processes][name]
    options = {key: x for key, x in given.items() if key == "accumulate_grad_batches"}
    module, samples = made(kind), given.get("samples", EVEN)
    module.parts = samples if samples is UNEVEN else ()
    return train(
        module, samples, "auto", None, folder, devices=1, max_epochs=max(given.get("epochs", (1,))), **options
    )
