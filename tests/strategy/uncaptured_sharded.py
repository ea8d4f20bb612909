"""Trainings of steps that cannot be captured, as replicas that each hold a part of the optimizer's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.holdings.aliased_shards import AliasedShards
from lightning_piper.holdings.optimizer import ShardedOptimizer
from lightning_piper.runtime import StepResult
from lightning_piper.session.eager.eager_optimizer import EagerOptimizer
from lightning_piper.session.process_runtime import Prepared, ProcessRuntime
from tests.strategy import uncaptured
from tests.strategy.uncaptured import KINDS, Gan, Losses, Net, ddp, fit

LEVELS: dict[str, dict[str, Any]] = {
    "zero1": {"shard_optimizer": True}, "zero2": {"shard_grads": True}, "zero3": {"shard_params": True},
    "parameter": {"shard_optimizer": True, "shard_by": "parameter"},
}  # fmt: skip


class Clamped(Gan):
    """Changes parameters by hand, gives them other memory, and clips gradients by a norm that it computes
    itself.
    """

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            for param in self.parameters():
                param.clamp_(-0.5, 0.5)
        first = next(iter(self.parameters()))
        first.data = first.data * 0.99

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(params, 0.1)
        self.log("norm", norm, sync_dist=True)


class Wide(Net):
    """Has a parameter that lies in the shards of both processes, and whose memory order is not that of its
    dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(64, 4)
        last.weight.data = last.weight.data.t().contiguous().t()
        self.net = nn.Sequential(nn.Linear(4, 64, bias=False), nn.Tanh(), last)


class Frozen(Net):
    """Has groups with different rates, a parameter without dimensions, a frozen parameter, and one that no
    optimizer has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.extra, self.rest = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.extra.weight.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step((self.extra(batch[0]) * self.rest, batch[1]), batch_idx)
        return {**out, "loss": out["loss"] * self.scale, "inputs": batch[0]}

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.net.parameters())},
            {"params": [*self.extra.parameters(), self.scale], "lr": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Grown(Net):
    """Has groups that get parameters in hooks, and a schedule that a hook makes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": [self.net[0].weight]}], lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.optim.lr_scheduler.ExponentialLR(self.trainer.optimizers[0], 0.5)
        if self.current_epoch == 2:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[2].parameters()), "lr": 0.1})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 2 and batch_idx == 2:
            self.trainer.optimizers[0].add_param_group({"params": [self.net[0].bias], "lr": 0.2})


class Whole(Net):
    """An optimizer that needs whole matrices."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.01)


class Pair(Net):
    """Two optimizers: torch's Muon for matrices, and AdamW for all other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.mse_loss(self.net(batch[0]), batch[1]))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        matrices, others = ([p for p in self.parameters() if (p.ndim == 2) is flat] for flat in (True, False))
        return torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)


MORE: dict[str, type[Net]] = {kind.__name__: kind for kind in (Clamped, Wide, Frozen, Grown, Whole, Pair)}
ROWS = [
    *((kind, "zero1") for kind in [*KINDS, *MORE] if kind not in ("Lbfgs", "Whole", "Pair", "Sparse")),
    ("Gan", "zero2"), ("Net", "zero3"), ("Clamped", "parameter"), ("Whole", "parameter"), ("Pair", "parameter"), ("Later", "zero3"),
]  # fmt: skip


class Parts(Losses):
    """Also records how many numbers the optimizers' states of this process have."""

    numbers = 0

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.numbers = sum(
            x.numel()
            for state in states
            for key, x in state.items()
            if isinstance(x, Tensor) and key != "step"
        )


class Inner(torch.optim.SGD):
    """Evaluates the loss again at other parameters, if it is told to."""

    again = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.enable_grad():
            return closure() if self.again else loss


class Unasked(torch.optim.SGD):
    """Leaves the closure to another optimizer."""

    def step(self, closure: Any = None) -> None:
        super().step()


class OwnForm(torch.optim.SGD):
    """Has a `state_dict` of its own form, as wrappers of other optimizers do."""

    def state_dict(self) -> Any:
        return {"inner": super().state_dict()}


class Wrapped(Net):
    def configure_optimizers(self) -> Any:
        return OwnForm(self.parameters(), lr=0.01)


class Again(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.optimizers[0].again = True  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return Inner(self.parameters(), lr=0.01)


class Never(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, _ = self.optimizers()  # type: ignore[misc]
        self.manual_backward(F.mse_loss(self.net(batch[0]), batch[1]))
        one.step(closure=lambda: None)

    def configure_optimizers(self) -> Any:
        return Unasked(self.net.parameters(), lr=0.01), torch.optim.SGD(self.judge.parameters(), lr=0.01)


class Shared(Gan):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01), torch.optim.SGD(self.net.parameters(), lr=0.01)


class Middle(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        return super().training_step(batch, batch_idx)


REFUSED = {
    "Again": "Inner runs its closure twice in a step. At the second call, each process has",
    "Never": "Unasked.step has not called the closure that it was given",
    "Shared": "parameter 'net.0.weight' is in several optimizers",
    "Middle": "the optimizer's parameter groups have changed since on_train_batch_start",
    "Wrapped": "OwnForm.state_dict() does not have 'state' and 'param_groups'",
    "Lbfgs": "LBFGS must update each element of a parameter independently",
    "Whole": "Adafactor does not update each element of a parameter independently",
}
MORE |= {kind.__name__: kind for kind in (Again, Never, Shared, Middle, Wrapped)}


def sharded(level: str) -> Any:
    program = [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], **LEVELS[level]),
    ]
    return lambda: piper.PiperStrategy(program)


def trained(kind: str, strategy: Any, folder: Path, accumulate: int = 1) -> dict[str, Any]:
    parts = Parts()
    with mock.patch.object(uncaptured, "Losses", lambda: parts), mock.patch.dict(KINDS, MORE):
        return {**fit(kind, strategy, 2, folder, accumulate), "numbers": parts.numbers}


def refused(kind: str, folder: Path) -> str:
    try:
        with mock.patch.dict(KINDS, MORE):
            fit(kind, sharded("zero1"), 2, folder, validated=False)
    except piper.PiperError as error:
        return str(error)
    return "no error"


def train(rank: int, folder: Path) -> dict[Any, Any]:
    outcome: dict[Any, Any] = {}
    for kind, level in ROWS:
        if kind not in outcome:
            outcome[kind] = trained("Gan" if kind == "Raw" else kind, ddp, folder / f"{kind} ddp")
        outcome[kind, level] = trained(kind, sharded(level), folder / f"{kind} {level}")
    outcome["accumulated"] = trained("Net", ddp, folder / "accumulated ddp", accumulate=2)
    outcome["accumulated", "zero1"] = trained("Net", sharded("zero1"), folder / "accumulated", accumulate=2)
    outcome["refused"] = {kind: refused(kind, folder / f"{kind} refused") for kind in REFUSED}
    return outcome


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _first_of_gradients(self: AliasedShards) -> None:
    for name, shard in self._local_shards.items():
        grad = self.params[name].grad
        shard.grad = None if grad is None else grad.reshape(-1)[: shard.numel()]


def _run_but_gathers(self: ProcessRuntime, prepared: Prepared, *args: Any, **kwargs: Any) -> StepResult:
    return (
        StepResult({}, torch.zeros(0))
        if prepared.compiled.step.name == "optimizer_step"
        else RUN(self, prepared, *args, **kwargs)
    )


def _lay_once(self: AliasedShards) -> None:
    if not self.whole:
        LAY(self)


def _own_state(self: EagerOptimizer) -> Any:
    state = FULL_STATE(self)
    for each in state["state"].values():
        each["exp_avg"].zero_()
    return state


RUN, LAY, FULL_STATE = ProcessRuntime.run, AliasedShards.lay, EagerOptimizer.full_state
# Bugs, and the kind of module that shows each of them.
SEEDED: dict[str, tuple[str, Any, str, Any]] = {
    "shards are not gathered": ("Gan", ProcessRuntime, "run", _run_but_gathers),
    "each shard gets the gradient of the first one": (
        "Wide",
        AliasedShards,
        "take_gradients",
        _first_of_gradients,
    ),
    "shards do not follow other memory": ("Clamped", AliasedShards, "lay", _lay_once),
    "state from a checkpoint is forgotten": ("Net", ShardedOptimizer, "load_full_state", _nothing),
    "a checkpoint lacks a part of the state": ("Net", EagerOptimizer, "full_state", _own_state),
}


def train_seeded(rank: int, folder: Path) -> dict[str, Any]:
    """Run each bug, and the same kind of module without it."""
    outcome: dict[str, Any] = {}
    for what, (kind, owner, attribute, wrong) in SEEDED.items():
        if kind not in outcome:
            outcome[kind] = trained(kind, sharded("zero1"), folder / kind)
        with mock.patch.object(owner, attribute, wrong):
            outcome[what] = trained(kind, sharded("zero1"), folder / str(len(outcome)))
    return outcome
