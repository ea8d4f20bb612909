"""Optimizers as users write them, to be compared under strategies: a module and its optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from tests.strategy import optimizers as own
from tests.strategy.fitting import QUIET, sharing_captures

Row = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # makes a module; makes optimizers for it
STEPS = 3  # of an epoch


class Fitted(L.LightningModule):
    """A module of two layers, with the optimizers that `make` returns for it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.make = make
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make(self)


class Manual(Fitted):
    """Two optimizers, each of one layer, that take turns."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class SparseRows(Fitted):
    """An embedding with sparse gradients."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__(make)
        self.net = nn.Embedding(6, 4, sparse=True).double()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net((batch[0][:, 0].abs() * 10).long() % 6), batch[1])


class Lookahead(optim.Optimizer):
    """Wraps another optimizer; every second step goes halfway back to the slow weights (Zhang et al.)."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, held in zip(group["params"], slow, strict=True):
                    held.lerp_(p, 0.5)
                    p.copy_(held)
        return loss

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["inner"])
        self.slow, self.steps = state["slow"], state["steps"]


class ScheduleFree(own.Ruled):
    """Averages its iterates instead of lowering its rate, and counts steps in its groups (Defazio et al.)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["k"] = k = group.get("k", 0) + 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / k).add_(p.grad, alpha=-0.1 * group["lr"])
                z.sub_(p.grad, alpha=group["lr"])
        return loss


class Langevin(own.Ruled):
    """Adds noise to every step (SGLD)."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad + 0.01 * torch.randn_like(p)


class Packed(own.Ruled):
    """Saves more than its state: its own count, under a key of its own."""

    count = 0

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        self.count += 1
        return grad / (1 + 0.1 * self.count)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state.pop("count")
        super().load_state_dict(state)


class Named(own.Ruled):
    """Keeps a value for all parameters in its state, under a name."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        shared: Any = self.state["all"]  # type: ignore[index]
        shared["norm"] = 0.9 * shared.get("norm", 0.0) + float(grad.norm())
        return grad / (1 + shared["norm"])


class Lookback(own.Ruled):
    """Keeps the last two gradients in a list, and a text."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        kept = state.setdefault("kept", [])
        kept.append(grad.clone())
        del kept[:-2]
        state["said"] = f"{len(kept)} gradients"
        return sum(kept[1:], kept[0]) / len(kept)


class Restarted(own.Ruled):
    """Replaces the parameters' data instead of writing into it."""

    def change(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        p.data = p.data - 0.1 * grad
        return torch.zeros_like(grad)


def with_hooks(module: Any) -> Any:
    optimizer = optim.SGD(module.parameters(), 0.1, momentum=0.9)

    def after(found: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in found.param_groups[0]["params"]:
                p.mul_(0.999)

    optimizer.register_step_post_hook(after)
    optimizer.register_state_dict_post_hook(lambda found, state: {**state, "mark": 1})
    return optimizer


def with_one_cycle(module: Any) -> Any:
    optimizer = optim.Adam(module.parameters(), 0.01)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS + 1)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def with_groups(module: Any) -> Any:
    first, second = module.net[0].parameters(), module.net[2].parameters()
    slow = {"params": list(first), "lr": 0.01}
    return optim.SGD([slow, {"params": list(second), "momentum": 0.9}], lr=0.2)


def whole(make: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
    """Return what makes an optimizer of all parameters."""
    return lambda module: make(module.parameters(), *args, **options)


def matrices(module: Any) -> Any:
    return optim.Muon([p for p in module.net.parameters() if p.ndim == 2], lr=0.02)


def of_layers(module: Any) -> Any:
    return optim.Adam(module.net[0].parameters(), 0.01), optim.SGD(module.net[2].parameters(), 0.1)


TABLE: dict[str, Row] = {
    **{
        name: (Fitted, whole(getattr(optim, name), lr=rate))
        for name, rate in {
            "ASGD": 0.1, "Adadelta": 1.0, "Adafactor": 0.01, "Adagrad": 0.1, "Adam": 0.01, "AdamW": 0.01,
            "Adamax": 0.01, "LBFGS": 0.5, "NAdam": 0.01, "RAdam": 0.01, "RMSprop": 0.01, "Rprop": 0.01,
            "SGD": 0.1,
        }.items()
    },
    "Muon": (Fitted, matrices),
    "SparseAdam": (SparseRows, whole(optim.SparseAdam, 0.1)),
    "Adam, rate in a tensor": (Fitted, lambda module: optim.Adam(module.parameters(), torch.tensor(0.01))),
    "Adam, one cycle": (Fitted, with_one_cycle),
    "SGD, groups": (Fitted, with_groups),
    "SGD, names": (Fitted, lambda module: optim.SGD(module.named_parameters(), 0.1, momentum=0.5)),
    "SGD, part of the parameters": (Fitted, lambda module: optim.SGD(module.net[0].parameters(), 0.1)),
    "SGD, hooks": (Fitted, with_hooks),
    "Adam and SGD": (Manual, of_layers),
    "SAM": (Fitted, whole(own.Sharp)),
    "Lookahead": (Fitted, lambda module: Lookahead(optim.Adam(module.parameters(), 0.01))),
    "schedule-free": (Fitted, whole(ScheduleFree, 0.1)),
    "SGLD": (Fitted, whole(Langevin)),
    "another key": (Fitted, whole(Packed)),
    "state under a name": (Fitted, whole(Named)),
    "lists and texts as state": (Fitted, whole(Lookback)),
    "replaces data": (Fitted, whole(Restarted)),
    **{
        kind.__name__: (Fitted, whole(kind))
        for kind in (own.Lamb, own.Clipping, own.Centralised, own.Projected, own.InBlocks, own.Bounded, own.Lars,
                     own.WarmedUp, own.Skipping, own.Factored, own.Lion, own.Adan)
    },
    "AdamW, amsgrad": (Fitted, whole(optim.AdamW, 0.01, amsgrad=True)),
    "Adam, fused": (Fitted, whole(optim.Adam, 0.01, fused=True)),
    "Adam, not foreach": (Fitted, whole(optim.Adam, 0.01, foreach=False)),
    "SGD, Nesterov": (Fitted, whole(optim.SGD, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "SGD, maximize": (Fitted, whole(optim.SGD, 0.01, maximize=True)),
    "RMSprop, centered": (Fitted, whole(optim.RMSprop, 0.01, centered=True, momentum=0.9)),
    "RAdam, decoupled decay": (Fitted, whole(optim.RAdam, 0.01, weight_decay=0.1, decoupled_weight_decay=True)),
}  # fmt: skip

# Each has a form of its own, draws, or is sharded by torch.
OVER_PROCESSES: dict[str, Row] = {
    **{name: TABLE[name] for name in ("Lookahead", "SGLD")},
    "Adam, torch's shards": (Fitted, whole(ZeroRedundancyOptimizer, optim.Adam, lr=0.01)),
}


def fit(row: Row, strategy: Callable[[], Any], folder: Path, devices: int = 1) -> list[dict[str, Any]]:
    """Train for an epoch, and for another one that resumes from the first one's checkpoint. Return the
    states in both checkpoints."""
    kind, make = row
    found = []
    for epoch in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            data = TensorDataset(*torch.randn(2, 4 * STEPS * devices, 4).double())
            module, path = kind(make), folder / f"{epoch}.ckpt"
            trainer = L.Trainer(
                accelerator="cpu", devices=devices, strategy=strategy(), max_epochs=epoch + 1, **QUIET
            )
            before = folder / "0.ckpt" if epoch else None
            sharing_captures(trainer.fit)(module, DataLoader(data, batch_size=4), ckpt_path=before)
            trainer.save_checkpoint(path)
        content = torch.load(path, weights_only=False)
        found.append({key: content[key] for key in ("state_dict", "optimizer_states", "lr_schedulers")})
    return found


def train(rank: int, folder: Path) -> dict[str, Any]:
    """Return the states under DDP and under Piper, by optimizer."""
    kinds = {"ddp": DDPStrategy, "piper": piper.PiperStrategy}
    return {
        name: [fit(row, strategy, folder / name / kind, 2) for kind, strategy in kinds.items()]
        for name, row in OVER_PROCESSES.items()
    }


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two nests of values differ in a bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_same = one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict) and isinstance(other, dict) and list(one) == list(other):
        return [text for key in one for text in differences(one[key], other[key], f"{where}/{key}")]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for n, (x, y) in pairs for text in differences(x, y, f"{where}/{n}")]
    else:
        is_same = type(one) is type(other) and bool(one == other)
    return [] if is_same else [f"{where}: {one!r} and {other!r}"]
