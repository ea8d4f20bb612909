"""A module may define `log` and `log_dict` itself, and call Lightning's with other names and values. Names and values that
guards do not watch are compared with the capture."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

import lightning_piper as piper
from tests.strategy.fitting import Batches, local, trainer


class Plain(L.LightningModule):
    mixed = False  # whether the end of the step runs uncaptured

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        piper.annotate_modules(self, "PP", [["first"], ["last"]])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.last(torch.tanh(self.first(batch))).square().mean()
        if self.mixed and loss.item() > 1e9:
            loss = 2 * loss
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": 2 * loss, "number": 3.0}, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AnyArguments(Plain):
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(f"train/{name}", value, *args, **kwargs)


class OfBase(AnyArguments):
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(f"own {name}", value, *args, **kwargs)


class TwoValues(Plain):
    def log(self, name: str, value: Any, **kwargs: Any) -> None:
        super().log(name, value, **kwargs)
        super().log(f"{name} in percent", 100 * value, **kwargs)


class Dicts(Plain):
    def log_dict(self, values: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().log_dict({f"all/{name}": value for name, value in values.items()}, **kwargs)


class ByName(Plain):
    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
        L.LightningModule.log(self, f"train/{name}", value, **kwargs)


class Alias(Plain):
    note = L.LightningModule.log

    def log(self, name: str, value: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.note(f"train/{name}", value, **kwargs)


class Kept(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.log: Any = functools.partial(self.log, on_epoch=True)


class KeptInLambda(Plain):
    def __init__(self) -> None:
        super().__init__()
        own = self.log
        self.log: Any = lambda name, value, **kwargs: own(f"train/{name}", value, **kwargs)


class Noted(nn.Linear):
    def __init__(self, log: Callable[..., None]) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.note = log

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        self.note("mean", made.mean())
        return made


class KeptInSubmodule(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.last = Noted(self.log)


class KeptForTheEnd(Plain):
    on_epoch: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.note = self.log

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.note("kept", loss, on_epoch=self.on_epoch)
        return loss


class Partial(Plain):
    log: Any = functools.partialmethod(Plain.log, on_epoch=True)


def logged(strategy: Any, cls: type[Plain], mixed: bool = False, **options: Any) -> dict[str, float]:
    module = cls()
    module.mixed = mixed
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
    fit, _ = trainer(strategy, max_steps=3, **options)
    fit.fit(module, Batches(batches))
    return {name: float(value) for name, value in fit.callback_metrics.items()}


@pytest.mark.parametrize("cls", [AnyArguments, OfBase, TwoValues, Dicts, ByName])
def test_its_names_and_values_are_those_of_one_device(cls: type[Plain]) -> None:
    expected = logged("auto", cls)
    assert expected.keys() != logged("auto", Plain).keys()
    for program in ([piper.Place(filter={}, devices=[0])], piper.schedules.one_f_one_b(2, 2)):
        assert logged(local(program, capture="always"), cls) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("cls", [Alias, Kept, KeptInLambda, KeptInSubmodule, Partial])
def test_a_log_method_that_was_read_before_runs_uncaptured(cls: type[Plain]) -> None:
    expected = logged("auto", cls)
    assert expected.keys() != logged("auto", Plain).keys()
    with pytest.warns(UserWarning, match="calls a log method that was read before the step"):
        found = logged(local([piper.Place(filter={}, devices=[0])]), cls)
    assert found == pytest.approx(expected, rel=1e-6)


class KeptOfAnOverride(KeptForTheEnd, AnyArguments):
    on_epoch = True


@pytest.mark.parametrize("cls", [AnyArguments, Dicts, Kept, KeptInLambda, KeptForTheEnd, KeptOfAnOverride])
@pytest.mark.filterwarnings("ignore:.*captured in part")
def test_uncaptured_code_calls_it(cls: type[Plain]) -> None:
    program = piper.schedules.one_f_one_b(2, 2)
    assert logged(local(program), cls, True) == pytest.approx(logged("auto", cls), rel=1e-6)


class OfAnother(Plain):
    """Calls the log method of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.other = [Plain()]

    def on_train_start(self) -> None:
        self.other[0].trainer = self.trainer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.other[0].log("other", loss)
        return loss


@pytest.mark.filterwarnings("ignore:.*captured in part")
def test_uncaptured_code_of_one_stage_does_not_call_the_log_method_of_another_module() -> None:
    with pytest.raises(piper.PiperError, match="the log method of another LightningModule"):
        logged(local(piper.schedules.one_f_one_b(2, 2)), OfAnother, True)


class OfFile(Plain):
    """Logs a number that Piper's guards cannot watch, or passes it to a metric object."""

    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.mean = MeanMetric() if weighs else None

    def on_train_start(self) -> None:
        self.path = os.path.join(self.trainer.default_root_dir, "file")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        with open(self.path, "w"):
            pass
        os.utime(self.path, (batch_idx, batch_idx))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        number, loss = os.stat(self.path).st_mtime, super().training_step(batch, batch_idx)
        if self.mean is None:
            self.log("file", number)
        else:
            self.mean.update(loss.detach(), weight=number + 1)
            self.log("weighed", self.mean, on_step=False, on_epoch=True)
        return loss


class Weighed(OfFile):
    def __init__(self) -> None:
        super().__init__(weighs=True)


class WeighedByIndex(Weighed):
    """Weighs by a number that Piper reads in each step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = Plain.training_step(self, batch, batch_idx)
        assert self.mean is not None
        self.mean.update(loss.detach(), weight=batch_idx + 1)
        self.log("weighed", self.mean, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ("cls", "changed"),
    [
        (OfFile, r"was self.log\('file', 0.0\) .* is self.log\('file', 1.0\)"),
        (Weighed, r"was self.mean.update\(.*weight'\]\": 1.0.* is self.mean.update\(.*weight'\]\": 2.0"),
    ],
)
def test_a_number_that_guards_do_not_watch_ends_the_capture(
    cls: type[Plain], changed: str, tmp_path: Path
) -> None:
    program = [piper.Place(filter={}, devices=[0])]
    with pytest.warns(UserWarning, match=changed):
        found = logged(local(program), cls, default_root_dir=tmp_path)
    assert found == pytest.approx(logged("auto", cls, default_root_dir=tmp_path), rel=1e-6)


def test_a_number_that_the_step_reads_as_an_input_may_change(tmp_path: Path) -> None:
    program = [piper.Place(filter={}, devices=[0])]
    found = logged(local(program, capture="always"), WeighedByIndex, default_root_dir=tmp_path)
    assert found == pytest.approx(logged("auto", WeighedByIndex, default_root_dir=tmp_path), rel=1e-6)
