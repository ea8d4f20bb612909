"""Steps without a backward pass: the captured parts, the modes of capture, and steps that cannot be captured."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError
from tests.forward import Steps, examples


def captured(module, step="validation_step", **options):
    return capture(module, examples(), name=step, **options)


def test_only_the_forward_is_captured_in_the_modes_of_the_module():
    module = Steps()
    evaluating = captured(module).at(8)
    assert evaluating.forward_only and {kind for _, kind in evaluating.interfaces} == {"F"}
    assert [i.random for i in evaluating.interfaces.values()] == [False, False]
    assert {"norm.running_mean", "norm.running_var"} <= set(evaluating.interfaces[0, "F"].buffers)
    assert not [
        out
        for i in evaluating.interfaces.values()
        for out in i.outputs
        if out.kind in ("saved", "grad", "buffer")
    ]
    assert [(log.name, log.reduce) for log in evaluating.logs] == [("val_loss", "mean"), ("largest", "max")]
    training = captured(module.train()).at(8)  # so does a Monte-Carlo dropout
    assert training.interfaces[0, "F"].random and "norm.running_mean" in training.interfaces[0, "F"].state
    step = captured(module, "training_step").at(8)
    assert not step.forward_only and {kind for _, kind in step.interfaces} == {"F", "B"}


def test_what_is_returned_keeps_its_form():
    code = captured(Steps(), dataloader_idx=3).at(8)
    found = code.rebuild([torch.full((), float(i)) for i in range(3)])
    assert found == {
        "out": torch.tensor(0.0),
        "given": [torch.tensor(1.0), None],
        "number": 3,
        "again": torch.tensor(2.0),
    }
    (bundle,) = [out for out in code.interfaces[1, "F"].outputs if out.kind == "result"]
    assert bundle.names == ("0", "1", "2")


class Metric(Steps):
    def __init__(self):
        super().__init__()
        self.error, self.errors = MeanMetric(), [MeanMetric()]

    def validation_step(self, batch, batch_idx):
        self.errors[0](self(batch[0]).mean())

    def test_step(self, batch, batch_idx):
        self.log("error", self.errors[0])

    def predict_step(self, batch, batch_idx):
        return self.error


class Reading(Steps):
    def predict_step(self, batch, batch_idx):
        return 1 if self(batch[0]).sum().item() > 0 else 2


@pytest.mark.parametrize("module, step, words", [
    (Metric, "validation_step", r"validation_step runs a metric object that is not an attribute of the "
                                r"module"),
    (Metric, "test_step", r"self.log\('error'\): a MeanMetric cannot be logged .* that is an attribute of "
                          r"the module"),
    (Metric, "predict_step", "the result of predict_step holds a MeanMetric.* Convert it before it is returned"),
    (Reading, "predict_step", r"this line needs the value of a tensor .* or move it to a hook"),
    (Steps, "no_step", "Steps has no no_step"),
])  # fmt: skip
def test_what_cannot_be_captured_is_refused(module, step, words):
    with pytest.raises(CaptureError, match=words):
        captured(module(), step).at(8)
