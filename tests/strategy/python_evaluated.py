"""The Python state that validation, test and prediction steps read, with one class for each kind; hooks
change it between batches.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_piper as piper
from lightning_piper.capture.python_state import side_effects
from lightning_piper.capture.steps.captured_step import CapturedStep
from lightning_piper.errors import PiperError
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import QUIET
from tests.strategy.python_state import WAYS, Data, unguarded

SCALE = 1.0


class Evaluated(L.LightningModule):
    """Two stages, evaluated on `loaders`. What a row reads is in `factor`; a hook calls `change` after each
    evaluated batch.

    Attributes:
        refused: what the error says, if the row is not to be evaluated over processes. (In one process the
            module's own steps run.)
        loaders: The number of loaders.
    """

    refused: ClassVar[str | None] = None
    loaders: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
            self.evaluated = 0
            self.kept: list[Any] = []
            self.build()

    def build(self) -> None:
        """Sets what the row reads to its initial value."""

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 1.0

    def change(self, n: int) -> None:
        """Changes what the row reads, after the batch with this number among all evaluated batches, counted
        from 1.
        """

    def out(self, batch: Any) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(batch[0]))
        with piper.annotate("PP", 1):
            return self.second(h)

    def training_step(self, batch: Any) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(batch[0]))
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), batch[1])

    def measured(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(batch[0]))
        with piper.annotate("PP", 1):
            loss = F.mse_loss(self.second(h), batch[1]) * self.factor(batch_idx, dataloader_idx)
            self.log(name, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.measured("validated", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.measured("tested", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.out(batch) * self.factor(batch_idx, dataloader_idx)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.evaluated += 1
        self.change(self.evaluated)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class BatchIdx(Evaluated):
    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 1 + batch_idx / 2


class BatchIdxInIf(Evaluated):
    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 0.5 if batch_idx % 2 else 2.0


class DataloaderIdx(Evaluated):
    loaders = 2

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 1 + 0.5 * dataloader_idx


class DataloaderIdxInIf(Evaluated):
    loaders = 2

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 3.0 if dataloader_idx == 1 else 1.0


class CurrentEpoch(Evaluated):
    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 1 + 0.5 * self.current_epoch


class GlobalStep(Evaluated):
    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 1 + self.global_step / 4


class SanityChecking(Evaluated):
    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 2.0 if self.trainer.sanity_checking else 1.0


class Attribute(Evaluated):
    def build(self) -> None:
        self.scale = 1.0

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return self.scale

    def change(self, n: int) -> None:
        self.scale = 1 + n / 4


class AttributeOfAnObject(Evaluated):
    def build(self) -> None:
        self.held = SimpleNamespace(scale=1)

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return self.held.scale

    def change(self, n: int) -> None:
        self.held.scale = 1 + n // 3


class Mode(Evaluated):
    def build(self) -> None:
        self.mode = "mild"

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return {"mild": 1.0, "strong": 4.0}[self.mode]

    def change(self, n: int) -> None:
        self.mode = "strong" if n % 4 > 1 else "mild"


class OfTheModule(Evaluated):
    def build(self) -> None:
        global SCALE
        SCALE = 1.0

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return SCALE

    def change(self, n: int) -> None:
        global SCALE
        SCALE = 1 + n / 8


class Weights(Evaluated):
    def build(self) -> None:
        self.weights = [1.0]

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return sum(self.weights)

    def change(self, n: int) -> None:
        if n % 3 == 0:
            self.weights.append(0.5)


class BufferReplaced(Evaluated):
    def build(self) -> None:
        self.register_buffer("scale", torch.ones(()))

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return self.scale

    def change(self, n: int) -> None:
        self.scale = self.scale * 1.25


class TrainedWhileEvaluated(Evaluated):
    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 2.0 if self.training else 1.0

    def change(self, n: int) -> None:
        self.train(n % 2 == 1)


class Clock(Evaluated):
    refused = r"python_evaluated\.py:\d+"

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return 1 + time.time() % 1


class DrawnByNumpy(Evaluated):
    refused = r"python_evaluated\.py:\d+"

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        return np.random.rand()


class Appends(Evaluated):
    def build(self) -> None:
        self.seen: list[Any] = []

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        self.seen.append(batch_idx)
        return 1.0

    def change(self, n: int) -> None:
        self.kept.append(float(sum(self.seen)))


class Keeps(Evaluated):
    """In the ways in which people do."""

    loaders = 2

    def build(self) -> None:
        self.losses: list[Tensor] = []
        self.last, self.recent = None, deque(maxlen=2)  # type: ignore[var-annotated]
        self.by_loader, self.count = defaultdict(list), 0  # type: ignore[var-annotated]
        self.both: Any = {"out": [], "n": 0, "deep": {"out": []}}
        self.listed: list[list[Tensor]] = [[], []]

    def measured(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        out = self.out(batch)
        with piper.annotate("PP", 1):
            loss = F.mse_loss(out, batch[1])
        self.losses.append(loss)
        self.recent.append({"loss": loss.item(), "out": out, "of": dataloader_idx})
        self.by_loader[dataloader_idx].append(out.sum(1))
        self.listed[dataloader_idx] += [loss, 2 * loss]
        self.both["out"].extend(out[:2])
        self.both["deep"]["out"].append(batch[1])
        self.both["n"] = batch_idx
        self.both.setdefault("new", []).append(loss)
        self.last, self.fresh = loss.detach(), out
        self.count += len(out)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.kept += [torch.stack(self.losses), list(self.recent), self.last, self.fresh, self.count]
        self.kept += [torch.cat(x) for x in self.by_loader.values()] + [torch.stack(x) for x in self.listed]
        self.kept += [
            torch.stack(self.both["out"]),
            self.both["deep"]["out"][-1],
            self.both["n"],
            torch.stack(self.both["new"]),
        ]
        self.losses.clear()
        self.both = {"out": [], "n": 0, "deep": {"out": []}}
        self.count = 10

    on_test_epoch_end = on_validation_epoch_end


class ReadsWhatItKeeps(Evaluated):
    refused = r"python_evaluated\.py:\d+ .*the step may only add to self\.seen \(append"

    def build(self) -> None:
        self.seen: list[Any] = []

    def factor(self, batch_idx: int, dataloader_idx: int) -> Any:
        self.seen.append(batch_idx)
        return 1.0 if len(self.seen) < 3 else 2.0


class AddsUp(Evaluated):
    refused = r"validation_step replaces self\.total, a number that it reads, by a tensor.*torchmetrics"

    def build(self) -> None:
        self.total: Any = 0.0

    def measured(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
        loss = super().measured(name, batch, batch_idx, dataloader_idx)
        self.total += loss
        return loss


class Record(L.Callback):
    """Records the result of every evaluated batch and what it has left logged."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.logged: list[dict[str, Tensor]] = []

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs.clone())

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.logged.append({name: x.clone() for name, x in trainer.callback_metrics.items()})

    on_test_end = on_validation_end


def evaluate(row: type[Evaluated], way: str | None) -> dict[str, Any]:
    """Two epochs with validations, then `test`, `predict`; or the error. Every replica has all samples, so
    that what it logs is what one device logs.

    Args:
        way: One of `WAYS`; None for a plain Trainer.
    """
    module, record = row(), Record()
    options: dict[str, Any] = {**QUIET, "accelerator": "cpu", "precision": "64-true", "devices": 1}
    if way is not None:
        over: dict[str, Any] = {"transport": "local"} if way == "local" else {"timeout": PATIENCE}
        options |= {
            "strategy": piper.PiperStrategy(WAYS[way][0](1), **{"capture": "always", **over}),
            "devices": 1 if way == "local" else 2,
        }
    trainer = L.Trainer(callbacks=[record], max_epochs=2, num_sanity_val_steps=1, **options)
    loaders = [Data(0, 1), Data(1, 2)][: row.loaders]
    with torch.random.fork_rng():
        try:
            trainer.fit(module, Data(0, 1), loaders)
            trainer.test(module, loaders, verbose=False)
            predicted = trainer.predict(module, loaders)
        except Exception as error:
            if way is None:
                raise
            raised: BaseException = error
            return {"error": f"{type(error).__name__}: {raised}", "known": isinstance(error, PiperError)}
    return {"outputs": record.outputs, "logged": record.logged, "predicted": predicted, "kept": module.kept}


def rows() -> dict[str, type[Evaluated]]:
    return {row.__name__: row for row in Evaluated.__subclasses__()}


def evaluate_all(rank: int, cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Evaluate rows in this process, each in the given way: one of `WAYS`, `unguarded` or `unkept`."""
    found = {}
    for name, way in cases:
        # The guards see what these rows change. Other tests check that a step is also traced again.
        wrong = {"unguarded": unguarded, "unkept": lambda: mock.patch.object(side_effects, "replay")}
        with wrong[way]() if way in wrong else mock.patch.object(CapturedStep, "retrace", lambda self: None):
            found[name, way] = evaluate(rows()[name], "PP2" if way in wrong else way)
    return found
