"""Modules, as people write them, whose training step cannot be captured, and trainings of them: by Lightning
alone, by its DDP, and as replicas of a program. One launch of two processes runs all of them.
"""

from __future__ import annotations

import collections
import contextlib
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.capture.eager.eager_step import EagerStep
from lightning_piper.session import programs
from lightning_piper.session.eager import eager_replicas
from lightning_piper.session.eager.eager_replicas import EagerReplicas
from lightning_piper.strategy.phases import Eager

BATCHES = 3


class Net(L.LightningModule):
    """A model that reads values and returns more than the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        if loss.item() > 0.9:
            loss = 2 * loss
        self.log("train", loss, sync_dist=True)
        return {"loss": loss, "inputs": x}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.outputs.append(loss)
        self.log("batches", loss, sync_dist=True)  # captured in the sanity check, but not later

    def on_validation_epoch_end(self) -> None:
        self.log("validated", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Gan(Net):
    """Two optimizers, of which each sees the gradients of its own pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, noise = batch
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        made = F.softplus(-self.judge(self.net(noise))).mean()
        self.manual_backward(made)
        self.clip_gradients(maker, gradient_clip_val=0.05)
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.toggle_optimizer(judge)
        judged = F.softplus(-self.judge(x)).mean() + F.softplus(self.judge(self.net(noise).detach())).mean()
        self.pass_back(judged)
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.log_dict({"made": made, "judged": judged}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), 0.01), torch.optim.Adam(self.judge.parameters(), 0.01)

    def pass_back(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class Raw(Gan):
    """Calls `backward` instead of `manual_backward`; DDP fails at that."""

    def pass_back(self, loss: Tensor) -> None:
        loss.backward()


class Afterwards(Gan):
    """Runs one more backward pass and update in a hook after the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.made = self.judge(self.net(batch[0])).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[0]
        optimizer.zero_grad()
        self.manual_backward(self.made)
        optimizer.step()


class BatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


class Sometimes(Net):
    """Has parameters that only one replica uses, that no step of the first epoch uses, or that are never
    used. Weight decay would change them if they had gradients of zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.late, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        if x.sum().item() > 0:
            out = out + self.extra(x)
        if self.current_epoch:
            out = out + self.late(x)
        return F.mse_loss(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


class Attack(Net):
    """Computes the gradient of the input in a separate backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        F.mse_loss(self.net(x), y).backward()
        return F.mse_loss(self.net((x + 0.1 * x.grad.sign()).detach()), y)


class Sparse(Gan):
    """An optimizer that takes sparse gradients only, of rows that each replica has others of."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = F.mse_loss(self.net(x + self.table((3 * x[:, 0].abs()).long().clamp(max=9))), y)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        assert self.table.weight.grad.is_sparse
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.table.parameters(), 0.01), torch.optim.Adam(
            self.net.parameters(), 0.01
        )


class Lbfgs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class Memory:
    def __init__(self) -> None:
        self.kept: collections.deque[float] = collections.deque([0.5, 1.5, 2.5, 3.5], maxlen=9)

    def step(self, action: bool) -> None:
        self.kept.append(len(self.kept) * 0.3 + action)


class Player(Net):
    """Objects, containers, iterators and Python's random numbers, which tracing must leave as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.seen, self.steps = Memory(), collections.Counter[str](), iter(range(1, 99))
        self.draw = random.Random(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        self.seen["step"] += 1
        number = next(self.steps)
        self.memory.step(bool(self.net(x).sum().item() > 0))
        wanted = torch.tensor(self.draw.sample(list(self.memory.kept), 4), dtype=x.dtype, device=x.device)
        return F.mse_loss(self.net(x), wanted.expand(len(x), 4)) * (number + self.seen["step"])


class Ranked(Net):
    """Each process runs another step, each of which could be captured."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log(f"loss of rank {self.global_rank}", loss)
        return loss * (1 + self.global_rank)


class Later(Net):
    """Can be captured in the first epoch and up to a batch in the second one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("later", loss, sync_dist=True, on_step=False, on_epoch=True)
        of_epoch: dict[str, Any] = {"sync_dist": True, "on_step": False, "on_epoch": True}
        self.log("weighed", loss, batch_size=7, **of_epoch)
        self.log("weighed by samples", loss, batch_size=len(batch[0]), **of_epoch)
        # In a captured step these are of one device, and of all replicas: of what leaves its capture in the
        # second batch, the first one's are the same in all.
        for name, value in {
            "mean": loss * 0 + 1,
            "sum": batch[0].sum(),
            "constant": 1.0,
            "samples": float(len(batch[0])),
        }.items():
            self.log(f"sum of {name}", value, reduce_fx="sum", **of_epoch)
        return 2 * loss if self.current_epoch and batch_idx and loss.item() > 0.5 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log(
            "validated",
            loss if self.trainer.sanity_checking or loss.item() > -1 else 0 * loss,
            sync_dist=True,
        )

    def on_validation_epoch_end(self) -> None:
        pass


class File(Net):
    """Reads a file that a hook of the last process changes. No guard notices that, but the next trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(), "factor")
        self.path.write_text("1")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1]) * float(self.path.read_text())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == self.trainer.world_size - 1:
            self.path.write_text(str(2 + batch_idx % 2))


KINDS: dict[str, type[Net]] = {
    kind.__name__: kind
    for kind in (
        Net,
        Gan,
        Raw,
        Afterwards,
        BatchNorm,
        Sometimes,
        Attack,
        Sparse,
        Lbfgs,
        Player,
        Ranked,
        Later,
        File,
    )
}


def data() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    tensors = (torch.randn(8 * BATCHES, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    return DataLoader(TensorDataset(*tensors), batch_size=4)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["loss"].item() if outputs else 0.0)
        assert (
            not isinstance(module, Net)
            or type(module) is not Net
            or trainer.strategy.__class__ is not piper.PiperStrategy
            or (outputs["inputs"] is batch[0])
        )


def fit(
    kind: str,
    strategy: Any,
    devices: int,
    folder: Path,
    accumulate: int = 1,
    validated: bool = True,
    accelerator: str = "cpu",
) -> dict[str, Any]:
    """Train for two epochs, and for a third one by another Trainer that resumes."""
    torch.manual_seed(0)
    module, losses, seen = KINDS[kind]().double(), Losses(), {}
    warned: list[str] = []
    for epochs in (2, 3):
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=devices,
            strategy=strategy(),
            max_epochs=epochs,
            precision="64-true",
            logger=False,
            callbacks=[losses, ModelCheckpoint(folder, filename=f"{kind}-{epochs}")],
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=accumulate,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(
                module,
                data(),
                data() if validated else None,
                ckpt_path=None if epochs == 2 else folder / f"{kind}-2.ckpt",
            )
        warned += [str(w.message) for w in caught if "runs uncaptured" in str(w.message)]
        seen |= {name: x.item() for name, x in trainer.callback_metrics.items()}
    saved = torch.load(folder / f"{kind}-3.ckpt", weights_only=False)
    values = {name: x.detach().clone() for name, x in module.state_dict().items()}
    return {
        "losses": losses.seen,
        "seen": seen,
        "values": values,
        "saved": saved["state_dict"],
        "warned": warned,
        "states": len(saved["optimizer_states"]),
    }


def replicas() -> Any:
    return piper.PiperStrategy()


def ddp() -> Any:
    return DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")


def refused(folder: Path) -> dict[str, str]:
    """The errors of steps that cannot run uncaptured or must not."""
    stages = [piper.Place(filter={}, devices=[0]), piper.Place(filter={"PP": 1}, devices=[1])]
    found = {}
    for name, make in (
        ("stages", lambda: piper.PiperStrategy(stages)),
        ("always", lambda: piper.PiperStrategy(capture="always")),
    ):
        try:
            fit("Net", make, 2, folder / name, validated=False)
            found[name] = "no error"
        except piper.PiperError as error:
            found[name] = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return found


def train(rank: int, folder: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = {"refused": refused(folder)}
    for kind in KINDS:
        peers = (("ddp", ddp), ("replicas", replicas))[kind == "Raw" :]
        outcome[kind] = {name: fit(kind, make, 2, folder / name) for name, make in peers}
    outcome["Raw"]["ddp"] = outcome["Gan"]["ddp"]
    for key, kind in (("accumulated", "Net"), ("changed in an accumulation", "File")):
        outcome[key] = {
            name: fit(kind, make, 2, folder / f"{name} {key}", accumulate=2)
            for name, make in (("ddp", ddp), ("replicas", replicas))
        }
    outcome["never"] = {
        "replicas": fit("Later", lambda: piper.PiperStrategy(capture="never"), 2, folder / "never")
    }
    return outcome


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _yes(total: Tensor) -> Tensor:
    return torch.tensor(True)


def _not_weighed(self: EagerStep, given: list[Tensor]) -> tuple[Tensor, ...]:
    given[0] = torch.ones_like(given[0])
    return BACKWARD(self, given)


def _new_only(self: EagerReplicas, local: Any, last: bool, *args: Any, **kwargs: Any) -> None:
    self._kept = False
    LOCAL_BACKWARD(self, local, last, *args, **kwargs)


def _all_found(self: EagerStep, given: list[Tensor]) -> tuple[Tensor, ...]:
    made = BACKWARD(self, given)
    self.found = (True,) * len(self.found)
    return made


BACKWARD, LOCAL_BACKWARD = EagerStep._backward, EagerReplicas._backward
# Bugs, and the kind of module that shows each of them.
SEEDED: dict[str, tuple[str, Any, str, Any]] = {
    "gradients are summed, not averaged": ("Sometimes", EagerStep, "_backward", _not_weighed),
    "gradients stay in their process": ("Gan", EagerReplicas, "average", _nothing),
    "gradients of hooks stay in their process": ("Afterwards", Eager, "before_pass", _nothing),
    "each replica believes that others have used what it has": (
        "Sometimes",
        eager_replicas,
        "is_of_none",
        lambda total: torch.tensor(True),
    ),
    "what nobody has used has a gradient": ("Sometimes", EagerStep, "_backward", _all_found),
    "what earlier batches have left is overwritten": ("accumulated", EagerReplicas, "_backward", _new_only),
    "buffers stay as each replica made them": ("BatchNorm", EagerReplicas, "share_buffers", _nothing),
    "what tracing did is not undone": (
        "Player",
        programs,
        "rollback_on_failure",
        lambda *_: contextlib.nullcontext(),
    ),
}


def train_seeded(rank: int, folder: Path) -> dict[str, Any]:
    """Run each bug, and the same kind of module without it."""
    outcome: dict[str, Any] = {}
    for what, (name, owner, attribute, wrong) in SEEDED.items():
        kind, accumulate = ("Net", 2) if name == "accumulated" else (name, 1)
        if name not in outcome:
            outcome[name] = fit(kind, replicas, 2, folder / name, accumulate)
        with mock.patch.object(owner, attribute, wrong):
            try:
                outcome[what] = fit(kind, replicas, 2, folder / str(len(outcome)), accumulate)
            except Exception as error:
                outcome[what] = {"error": repr(error)}
    return outcome
