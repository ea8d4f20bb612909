"""Fits on a simulated accelerator give what the CPU computes to the bit, or an error that names the missing
event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.directives import Offload, Recompute, Replicate
from lightning_piper.plan.instructions import Instruction, WaitEvent
from lightning_piper.session import process_runtime
from tests.plan.programs import edited
from tests.strategy.fitting import PROGRAM, QUIET, local, same, sharing_captures, trainer, values
from tests.strategy.models import MLP, make, vectors

GROUPS = [[0, 2], [1, 3]]
PROGRAMS: dict[str, list[Any]] = {
    "1F1B": list(PROGRAM),
    "ZeRO-3": [
        *piper.schedules.one_f_one_b(2, 2, devices=GROUPS),
        Replicate(filter={}, devices=GROUPS, shard_params=True),
    ],
    "on the host": [*piper.schedules.one_f_one_b(2, 2), Recompute(filter={}), Offload(filter={}, ahead=1)],
}


def simulated(program: Any = PROGRAM, **options: Any) -> piper.PiperStrategy:
    return piper.PiperStrategy(list(program), transport="simulated", **options)


def fitted(strategy: Any, name: str, **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    module, loader = make(name)
    fit, record = trainer(strategy, **options)
    torch.manual_seed(5)
    fit.fit(module, loader)
    return values(module), record.losses


@pytest.mark.parametrize(
    ("name", "program"), [("dropout", "1F1B"), ("tied", "1F1B"), ("mlp", "ZeRO-3"), ("mlp", "on the host")]
)
@sharing_captures
def test_a_fit_gives_the_bits_of_the_cpu(name: str, program: str) -> None:
    directives = PROGRAMS[program]
    here, losses = fitted(local(directives), name)
    there, others = fitted(simulated(directives), name)
    assert same(here, there) and torch.equal(torch.stack(losses), torch.stack(others))
    assert not same(here, fitted(simulated(directives), name, max_steps=4)[0])


@sharing_captures
def test_accumulated_gradients_stay_on_it() -> None:
    program = [piper.Place(filter={}, devices=[0, 1]), Replicate(filter={}, devices=[0, 1])]
    options = {"accumulate_grad_batches": 2, "max_steps": 3}
    assert same(fitted(local(program), "mlp", **options)[0], fitted(simulated(program), "mlp", **options)[0])


def without(
    kind: type[Instruction], change: Callable[[Any], Instruction | None]
) -> Callable[[list[Instruction]], None]:
    """An edit that replaces every instruction of this kind by another one, or removes it."""

    def edit(instructions: list[Instruction]) -> None:
        instructions[:] = [
            y for x in instructions if (y := change(x) if isinstance(x, kind) else x) is not None
        ]

    return edit


MISSING = r"aten\..* of .*%\d+.* on .*\(\d, \w+\) does not wait for .*: an event is missing"
REUSED = r"%\d+.* uses memory that .* made on .*that is already reused"
FAULTS = {
    "no events": (without(WaitEvent, lambda x: None), MISSING),
    "memory not recorded": (without(WaitEvent, lambda x: dataclasses.replace(x, shared=())), REUSED),
}


@pytest.mark.parametrize("fault", FAULTS)
@sharing_captures
def test_a_plan_with_a_fault_is_an_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, said = FAULTS[fault]
    made = process_runtime.Executor
    monkeypatch.setattr(process_runtime, "Executor", lambda plan, *args: made(edited(plan, edit), *args))
    program = PROGRAMS["ZeRO-3"]
    fitted(local(program), "mlp")  # on the CPU nothing is seen of it
    with pytest.raises(piper.PiperError, match=said):
        fitted(simulated(program), "mlp", max_steps=40, max_epochs=20)


class Seen(MLP):
    """A module with steps of every kind, which keeps what they return."""

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        with piper.annotate("PP", 0):
            hidden = self.first(batch[0])
        with piper.annotate("PP", 1):
            out = self.second(hidden)
            loss = torch.nn.functional.mse_loss(out, batch[1])
        self.log("val_loss", loss)
        return {"loss": loss, "out": out}

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.validation_step(batch, batch_idx)["out"]


class Predicting(Seen):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = self.first(batch[0])
        with piper.annotate("PP", 1):
            return self.second(hidden)


def evaluated(strategy: Any, loader: DataLoader[Any]) -> tuple[Any, list[Tensor], list[str]]:
    torch.manual_seed(3)
    module, ran = Predicting(), []
    step = type(strategy)._evaluate

    def evaluate(self: Any, name: str, *args: Any) -> Any:
        ran.append(name)
        return step(self, name, *args)

    one = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, num_sanity_val_steps=1, **QUIET
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(strategy), "_evaluate", evaluate)
        one.fit(module, loader, loader)
        logged = [
            one.callback_metrics["val_loss"],
            one.validate(module, loader, verbose=False)[0]["val_loss"],
        ]
        found = one.predict(module, loader)
    return logged, found, ran


def test_evaluation_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = vectors()
    here, there = evaluated(local(), loader), evaluated(simulated(), loader)
    assert here[0] == there[0] and all(torch.equal(a, b) for a, b in zip(here[1], there[1], strict=True))
    assert here[2] == [] and {"validation_step", "predict_step"} <= set(there[2])


def test_replicas_are_evaluated_by_lightning() -> None:
    program = [piper.Place(filter={}, devices=[0, 1]), Replicate(filter={}, devices=[0, 1])]
    assert evaluated(simulated(program), vectors())[2] == []


@pytest.mark.parametrize(("options", "message"), [
    ({"compile": True}, "compile=.*bypass the simulated accelerator"),
    ({"capture": "never"}, "the simulated accelerator runs only captured steps"),
])  # fmt: skip
def test_what_would_run_beside_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(piper.PiperError, match=message):
        simulated(**options)


class Chooses(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.second(self.first(batch[0])).square().mean()
        return loss if loss > 0 else -loss


def test_a_step_that_cannot_be_captured_is_refused() -> None:
    with pytest.raises(piper.CaptureError):
        trainer(simulated([piper.Place(filter={}, devices=[0])]))[0].fit(Chooses(), vectors())
