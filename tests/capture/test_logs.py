"""The records that a capture keeps of `self.log` and `self.log_dict`."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_piper.capture import capture
from lightning_piper.ir.regions import Logged
from tests.models import MLP, captured, regression


def test_calls_are_kept_in_order_with_their_arguments() -> None:
    assert captured("logs").step.at(4).logs == (
        Logged("h_max", "max", {}),
        Logged("h_min", "min", {"prog_bar": False}),
        Logged("count", "sum", {"prog_bar": True}),
        Logged("error", "mean", {"on_epoch": True}),
        Logged("twice", "mean", {"on_epoch": True}),
        Logged("alpha", "mean", {}, constant=0.5),
    )


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("mean", "mean"),
        ("sum", "sum"),
        ("max", "max"),
        ("min", "min"),
        (torch.mean, "mean"),
        (torch.sum, "sum"),
        (torch.max, "max"),
        (torch.min, "min"),
        (sum, "sum"),
        (max, "max"),
        (min, "min"),
    ],
)
def test_every_spelling_of_a_reduction(given: Any, kept: str) -> None:
    class Reduces(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.second(self.first(batch[0])).square().mean()
            self.log("x", loss, reduce_fx=given)
            return loss

    assert [log.reduce for log in capture(Reduces(), regression(2)).at(2).logs] == [kept]


@pytest.mark.parametrize(("value", "constant"), [(3, 3.0), (True, 1.0), (2.5, 2.5)])
def test_numbers_are_constants(value: Any, constant: float) -> None:
    class Number(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.second(self.first(batch[0])).square().mean()
            self.log(value=value, name="x", prog_bar=True)
            return loss

    code = capture(Number(), regression(2)).at(2)
    assert code.logs == (Logged("x", "mean", {"prog_bar": True}, constant=constant),)
    assert "log" not in [out.kind for interface in code.interfaces.values() for out in interface.outputs]


def test_a_logged_value_may_come_from_anywhere() -> None:
    """From the batch alone, from a parameter alone, from an integer tensor, of shape [1]."""

    class Anything(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_dict({"batch": batch[0].mean(), "one": loss.reshape(1), "count": (batch[0] > 0).sum()})
            return loss

    code = capture(Anything(), regression(4)).at(4)
    assert [log.name for log in code.logs] == ["train_loss", "batch", "one", "count"]
    assert [region.label for region in code.regions] == ["PP=0", "PP=1"]
    logged = [
        spec
        for out, specs in zip(code.interfaces[1, "F"].outputs, code.code[1, "F"].outputs, strict=True)
        if out.kind == "log"
        for spec in specs
    ]
    assert [spec.shape for spec in logged] == [()] * 4


def test_a_logged_value_takes_no_part_in_the_gradient() -> None:
    def operations(logs: bool, joins: bool) -> list[str]:
        class Logging(MLP):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.second(self.first(batch[0])).square().mean()
                if logs:
                    self.log("x", 100 * loss)
                return 100 * loss + loss if joins else loss

        graph = capture(Logging(), regression(2)).at(2).code[0, "B"].graph
        return [str(node.target) for node in graph.nodes if node.op == "call_function"]

    assert (
        operations(logs=True, joins=False)
        == operations(logs=False, joins=False)
        != operations(logs=False, joins=True)
    )


def test_self_log_is_lightnings_again_after_the_capture() -> None:
    assert type(captured("logs").module).log is L.LightningModule.log
