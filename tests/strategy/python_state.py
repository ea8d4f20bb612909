"""The Python state that training steps read. Each class is a row: it says what the step reads, and has a hook
that changes it between steps.

`train` trains a row on one device or under a strategy. The rows are in the files `python_*.py` of this
folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_piper as piper
from lightning_piper.capture.proxies.numbers import NumberInputs
from lightning_piper.capture.python_state.state_locations import Guards
from lightning_piper.capture.steps.captured_step import CapturedStep
from lightning_piper.directives import Directive
from lightning_piper.errors import PiperError
from lightning_piper.holdings.tensor_binding import TensorBinding
from lightning_piper.session.variants import Variants
from tests.distributed.processes import PATIENCE
from tests.strategy import replicated, sharded
from tests.strategy.fitting import QUIET, Record, values

Outcome = dict[str, Any]
BATCHES = 3  # batches of 8 samples in an epoch; there are two epochs


def undivided(program: list[Directive], microbatches: int) -> list[Directive]:
    return [d for d in program if microbatches > 1 or not isinstance(d, piper.Split)]


# How each row trains: the directives for a number of microbatches, and the number of replicas.
WAYS: dict[str, tuple[Callable[[int], list[Directive]], int]] = {
    "local": (lambda n: list(piper.schedules.one_f_one_b(stages=2, microbatches=n)), 1),
    "PP2": (lambda n: list(piper.schedules.one_f_one_b(stages=2, microbatches=n)), 1),
    "DP2": (lambda n: undivided(replicated.dp2(), n), 2),
    "ZeRO-3": (lambda n: undivided(sharded.dp2(3), n), 2),
}


class Net(L.LightningModule):
    """Two stages. A row says what it reads in `hidden`, `loss` or `factor`, and what a hook does after each
    batch in `change`.

    Attributes:
        refused: The text of the error if the row must be refused.
        refused_in_pieces: The same, but only if parameters are sharded.
        ways: The ways in which the row is trained or refused.
        microbatches: The number of microbatches. If it is 1, and there are no replicas, the bits are those
            of one device.
        captures: The maximum number of captures.
        alone: no guard is needed, for the plans work on the same memory; it is enough that the change counts.
    """

    refused: ClassVar[str | None] = None
    refused_in_pieces: ClassVar[str | None] = None
    ways: ClassVar[tuple[str, ...]] = tuple(WAYS)
    microbatches: ClassVar[int] = 1
    captures: ClassVar[int] = 3
    alone: ClassVar[bool] = False
    schedule: ClassVar[str | None] = None  # interval of a scheduler of the learning rate

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
            self.still = False
            self.build()

    def build(self) -> None:
        """Sets what the row reads to its initial value."""

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def factor(self, batch_idx: int) -> Any:
        return 1.0

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(out, y) * self.factor(batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with piper.annotate("PP", 0):
            h = self.hidden(x)
        with piper.annotate("PP", 1):
            loss = self.loss(self.second(h), y, batch_idx)
            self.log("loss", loss)
        return loss

    @classmethod
    def error(cls, way: str) -> str | None:
        """The text of the error under this way; None if there must be none."""
        return cls.refused_in_pieces or cls.refused if way == "ZeRO-3" else cls.refused

    def change(self, step: int) -> None:
        """Changes what the row reads, after the batch with this number, counted from 1."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.still:
            self.change(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Data:
    """The same batches in every epoch; a replica gets only its own samples."""

    def __init__(self, replica: int, replicas: int) -> None:
        torch.manual_seed(1)
        x, y = torch.randn(BATCHES, 8, 4), torch.randn(BATCHES, 8, 2)
        self.items = [
            (a[replica::replicas], b[replica::replicas]) for a, b in zip(x.double(), y.double(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def train(row: type[Net], way: str | None, still: bool = False, rank: int = 0) -> Outcome:
    """Everything that can be seen of a training, or its error.

    Args:
        way: One of `WAYS`; None for a plain Trainer.
        still: Run without the changes.
    """
    module, record, replicas = row(), Record(), 1
    module.still = still
    options: dict[str, Any] = {**QUIET, "accelerator": "cpu", "precision": "64-true", "devices": 1}
    if way is not None:
        program, replicas = WAYS[way]
        over: dict[str, Any] = {"transport": "local"} if way == "local" else {"timeout": PATIENCE}
        options |= {
            "strategy": piper.PiperStrategy(program(row.microbatches), **{"capture": "always", **over}),
            "devices": 1 if way == "local" else 2,
        }
    trainer = L.Trainer(callbacks=[record, *getattr(module, "callbacks", [])], max_epochs=2, **options)
    captures: list[None] = []
    add = Variants.add

    def counted(self: Variants, *args: Any) -> Any:
        captures.append(None)
        return add(self, *args)

    with torch.random.fork_rng(), mock.patch.object(Variants, "add", counted):
        try:
            trainer.fit(module, Data(rank if replicas > 1 else 0, replicas))
        except Exception as error:
            raised: BaseException = error
            found = {"error": f"{type(error).__name__}: {raised}", "known": isinstance(error, PiperError)}
            if way is None:
                raise
            return found
    seen = [{k: v.clone() for k, v in step.items()} for step in record.logged]
    return {"values": values(module), "losses": record.losses, "logged": seen, "captures": len(captures)}


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Within this context, nothing checks whether the captured code is still valid."""
    first: dict[int, Any] = {}

    def frozen(self: NumberInputs, device: Any, values: Any = NumberInputs.values) -> list[Tensor]:
        return first.setdefault(id(self), (values(self, device), self))[0]

    with (
        mock.patch.object(Guards, "hold", lambda self: True),
        mock.patch("lightning_piper.capture.proxies.numbers.NumberAnswer.holds", lambda self: True),
        mock.patch.object(NumberInputs, "values", frozen),
        mock.patch.object(TensorBinding, "follow", lambda self: None),
        mock.patch.object(CapturedStep, "retrace", lambda self: None),
    ):
        yield


def rows() -> dict[str, type[Net]]:
    from tests.strategy import (  # noqa: F401
        python_changed,
        python_counters,
        python_names,
        python_objects,
        python_references,
    )

    return {row.__name__: row for row in Net.__subclasses__()}


def changes_tensors(row: type[Net]) -> bool:
    return row.__module__.endswith("python_changed")


def ways(name: str) -> list[str]:
    """The ways in which a row trains over processes."""
    return [way for way in WAYS if way != "local" and way in rows()[name].ways]


def train_all(rank: int, cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    """Run rows in this process, each in one of its ways. That one capture is compared with another is tested
    in one process, except where it is the point of the test.
    """
    found = {}
    for name, way in cases:
        row = rows()[name]
        retraced = row.refused is not None and "differs from the captured step" in row.refused
        with (
            contextlib.nullcontext()
            if retraced
            else mock.patch.object(CapturedStep, "retrace", lambda self: None)
        ):
            found[name, way] = train(row, way, rank=rank)
    return found
