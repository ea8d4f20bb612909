"""Numbers that Python takes out of tensors: computed as Python computes them, logged like tensors, and
unknown to all other code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torchmetrics.functional as metrics
from torch import Tensor
from torchmetrics import MeanMetric

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.capture.proxies.deferred_numbers import DeferredNumber
from lightning_piper.compiler import compile
from lightning_piper.directives.rewrites import transfers
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import LOSS
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.communication.p2p import Send
from lightning_piper.verify import interpret
from tests.groups import marked
from tests.models import MLP, regression

SCALE = 3


class Using(MLP):
    """A module that logs the result of `use` for the loss, its number of rows, and the hidden layer. If the
    result is a tensor, the module adds it to the loss.
    """

    def __init__(self, use: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.use = use

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = torch.tanh(self.first(batch[0]))
        loss = (self.second(h) - batch[1]).square().mean()
        found = self.use(loss, (h > 0).sum(), h)
        self.log("found", found)
        return loss + found if isinstance(found, Tensor) else loss


def both(use: Callable[[Tensor, Tensor, Tensor], Any], samples: int = 6) -> tuple[float, float]:
    """Return the value that the captured step logs, and the value that Python computes."""
    torch.manual_seed(1)
    module, batch = Using(use), regression(samples)
    step = capture(module, batch)
    tensors = {name: x.detach() for name, x in [*module.named_parameters(), *module.named_buffers()]}
    outcome = interpret(build_dag(step), tensors, step.inputs(list(batch)))
    logged: list[float] = []
    module.log = lambda name, value: logged.append(float(value))  # type: ignore[method-assign, assignment]
    loss = module.training_step(batch, 0)
    assert float(outcome.metrics[LOSS]) == pytest.approx(float(loss), rel=1e-6)
    return float(outcome.metrics["found"]), logged[0]


def counted(values: Any) -> float:
    best = 0.0
    for value in values:
        best = max(best, value)
    return best


USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "item": lambda loss, n, h: loss.item(),
    "float": lambda loss, n, h: float(loss),
    "float of an int": lambda loss, n, h: float(n) / 2,
    "int": lambda loss, n, h: int(n),
    "int of a float": lambda loss, n, h: int(100 * loss),
    "detached": lambda loss, n, h: loss.detach().cpu().item(),
    "ratio": lambda loss, n, h: n.item() / len(h),
    "percent": lambda loss, n, h: 100.0 * n.item() / h.numel(),
    "rounded": lambda loss, n, h: round(loss.item(), 3),
    "whole": lambda loss, n, h: round(10 * loss.item()),
    "floor": lambda loss, n, h: n.item() // 4 + n.item() % 4 + (-n.item()) // 4 + (-n.item()) % 4,
    "power": lambda loss, n, h: loss.item() ** 2 + 2 ** -loss.item() + abs(-loss.item()),
    "power of an int": lambda loss, n, h: torch.arange(3).mul(n.item() ** 2).bitwise_and(6).double().sum()
    + n.item() ** -1,
    "math": lambda loss, n, h: math.sqrt(loss.item()) + math.log(n.item()) + math.exp(-loss.item()),
    "a base": lambda loss, n, h: math.log(n.item(), 10) + math.log(2 + loss.item(), 1 + n.item()) + math.log(7, n.item()),
    "hundreds": lambda loss, n, h: round(97 * n.item(), -2) + round(n.item() > 3) + round(97 * n.item() + 0.5, -1),
    "ceil": lambda loss, n,
    h: math.ceil(10 * loss.item()) + math.floor(10 * loss.item()) + math.trunc(-10 * loss.item()),
    "sum": lambda loss, n, h: sum([loss.item(), n.item(), 1]),
    "list": lambda loss, n, h: sum(h.mean(0).tolist()) / h.shape[1],
    "matrix": lambda loss, n, h: h[:2, :2].tolist()[1][0],
    "max": lambda loss, n, h: max(h.mean(0).tolist()) - min(loss.item(), 0.25) + max(loss.item(), 5.0),
    "running": lambda loss, n, h: counted(h.abs().mean(0).tolist()),
    "bool": lambda loss, n, h: torch.isfinite(loss).item(),
    "truth": lambda loss, n, h: (loss.item() > 0.1) + 0.0,
    "global": lambda loss, n, h: SCALE * loss.item() - 1,
    "weight": lambda loss, n, h: loss * loss.item(),
    "beside int": lambda loss, n, h: (torch.arange(3) * loss.item()).sum(),
    "dtype": lambda loss, n, h: (h * loss.item() / n.item()).sum() * 1.0,
    "detached weight": lambda loss, n, h: loss / (float(loss) + 1e-3),
    "clamped": lambda loss, n, h: torch.clamp(h, max=loss.item()).sum(),
    "tensor": lambda loss, n,
    h: h.mean() * torch.tensor(loss.item()) + torch.tensor([loss.item(), 2.0]).sum(),
    "ints": lambda loss, n,
    h: h.sum() * torch.tensor(n.item(), dtype=torch.float32) + torch.tensor([n.item(), 1]).sum(),
    "full": lambda loss, n, h: (h * torch.full((6,), loss.item())).sum(),
    "filled": lambda loss, n,
    h: torch.zeros(3).fill_(loss.item()).sum() + h.masked_fill(h > 0, loss.item()).sum(),
    "isinstance": lambda loss, n,
    h: loss.item() if isinstance(loss.item(), float) and isinstance(n.item(), int) else 0,
    "a kind": lambda loss, n,
    h: float(isinstance(2.0, float) + (int is not float) + int("3") + int(2.7)) * loss.item(),
    "text": lambda loss, n,
    h: loss.item() + 0 * bool(print(f"{loss.item():.3f} {loss:.2f} {n}" + str(loss) + repr(h))),
}  # fmt: skip


@pytest.mark.parametrize("name", marked(USES, [*USES][::2]))
def test_values_are_those_that_python_computes(name: str) -> None:
    ours, python = both(USES[name])
    assert ours == pytest.approx(python, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    "value", [0, 7, -3, 1234, 1250, 1350, -1250, -1249, 10**18, True, False, 1234.5, -0.25]
)
def test_round_as_python_does(value: float) -> None:
    """Digits before the point round integers, and a truth value becomes an integer."""
    dtype = {int: torch.int64, float: torch.float64, bool: torch.bool}[type(value)]
    for digits in (None, 0, 1, 2, -1, -2, -3, -18, -19, 400, -400):
        found = round(DeferredNumber(torch.tensor(value, dtype=dtype)), digits)
        wanted = round(value, digits)
        assert (type(found.tensor.item()), found.tensor.item()) == (type(wanted), wanted), digits
    assert round(1250, -2) == 1200 and round(1350, -2) == 1400, "halves, to the even one"


def multiclass(h: Any) -> tuple[Any, Any]:
    return h[:, :3].softmax(1), h[:, 3:].argmax(1)


def binary(h: Any) -> tuple[Any, Any]:
    return h[:, 0], (h[:, 1] > 0).long()


METRICS: dict[str, Callable[[Any], Any]] = {
    "accuracy": lambda h: metrics.accuracy(*multiclass(h), task="multiclass", num_classes=3),
    "macro": lambda h: metrics.accuracy(*multiclass(h), task="multiclass", num_classes=3, average="macro"),
    "top 2": lambda h: metrics.accuracy(*multiclass(h), task="multiclass", num_classes=3, top_k=2),
    "f1": lambda h: metrics.f1_score(*multiclass(h), task="multiclass", num_classes=3, average="weighted"),
    "confusion": lambda h: (
        metrics.confusion_matrix(*multiclass(h), task="multiclass", num_classes=3).float().diagonal().sum()
    ),
    "logits": lambda h: metrics.accuracy(*binary(h), task="binary"),
    "probabilities": lambda h: metrics.f1_score(binary(h)[0].sigmoid(), binary(h)[1], task="binary"),
    "multilabel": lambda h: metrics.recall(h, (h.roll(1, 0) > 0).long(), task="multilabel", num_labels=6),
    "auroc": lambda h: metrics.auroc(*binary(h), task="binary", thresholds=8),
    "cosine": lambda h: metrics.cosine_similarity(h[:, :3], h[:, 3:]),
    "normal": lambda h: torch.distributions.Normal(h[:, 0], h[:, 1].abs() + 0.1).log_prob(h[:, 2]).mean(),
}


@pytest.mark.parametrize("name", marked(METRICS, [*METRICS][::3]))
def test_functional_metrics_that_check_values_are_captured(name: str) -> None:
    ours, python = both(lambda loss, n, h: METRICS[name](h).item(), samples=40)
    assert ours == pytest.approx(python, rel=1e-6) and ours not in (0.0, 1.0)


def test_what_checks_values_does_so_again_afterwards() -> None:
    both(lambda loss, n, h: METRICS["accuracy"](h).item())
    with pytest.raises(RuntimeError, match="Detected more unique values"):
        metrics.accuracy(
            torch.tensor([0, 1, 7, 8]), torch.tensor([0, 1, 1, 1]), task="multiclass", num_classes=3
        )
    assert (
        isinstance(2, int) and type(float(2)) is float and "float" not in globals() and "max" not in globals()
    )


def test_a_capture_keeps_no_value() -> None:
    """The same code on other parameters gives other values."""
    torch.manual_seed(1)
    module, batch = Using(USES["ratio"]), regression(6)
    step = capture(module, batch)
    found = []
    for factor in (1.0, -1.0):
        tensors = {name: factor * x.detach() for name, x in module.named_parameters()}
        found.append(float(interpret(build_dag(step), tensors, step.inputs(list(batch))).metrics["found"]))
    assert found[0] != found[1]


def test_values_of_microbatches_are_merged() -> None:
    module, batch = Using(USES["ratio"]), regression(6)
    program = [piper.Place(filter={}, devices=[0]), piper.Split(filter={}, dim_name="MB", num_microbatches=2)]
    compiled = compile(module, batch, program)
    tensors = {name: x.detach() for name, x in module.named_parameters()}
    whole = float(interpret(build_dag(compiled.step), tensors, list(batch)).metrics["found"])
    assert float(interpret(compiled.dag, tensors, list(batch)).metrics["found"]) == pytest.approx(
        whole, rel=1e-6
    )
    halves = [
        float(
            interpret(
                build_dag(capture(module, regression(3))), tensors, [x[i : i + 3] for x in batch]
            ).metrics["found"]
        )
        for i in (0, 3)
    ]
    assert whole == pytest.approx(sum(halves) / 2) and halves[0] != halves[1]


class Crossing(MLP):
    """A module in which a number of the first stage weights the loss of the second stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(batch[0]))
            scale = 1 + h.abs().mean().item()
        with piper.annotate("PP", 1):
            loss = scale * (self.second(h) - batch[1]).square().mean()
            self.log("scaled", loss.item() / scale)
            return loss


def test_a_number_crosses_stages_with_its_microbatch() -> None:
    torch.manual_seed(1)
    module = Crossing().double()
    batch = [x.double() for x in regression(6)]
    program = piper.schedules.one_f_one_b(2, 3)
    report = piper.verify(module, batch, program)
    assert report.ok and "differs" not in str([row.single for row in report.rows])
    existing = transfers._existing

    def another(dag: Any, ref: Any, devices: Any) -> Any:
        for send in dag.of_type(Send):
            alike = (
                send.devices == dag.nodes[ref[0]].devices
                and send.outputs[0].tensors == dag.value(ref).tensors
            )
            if (
                alike
                and send.peers == devices
                and send.inputs[0] != ref
                and not send.outputs[0].tensors[0].shape
            ):
                return (dag.users(send)[0].id, 0)  # the number of another microbatch
        return existing(dag, ref, devices)

    with mock.patch.object(transfers, "_existing", another), pytest.raises(piper.VerificationError):
        compile(module, batch, program)


# Words of the errors. They are names, because an error shows the line of the step, which is a line of the table below.
DECIDES = r"this line needs the value of a tensor \(for an if"
PASSED = "this line needs the value of a tensor as a Python number"
TORCH = r"aten\S* (reads|makes a shape that depends on) the values of a tensor"
SELECTS = "depends on tensor values"
REFUSED: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "if": (lambda loss, n, h: 1.0 if loss.item() > 0 else 2.0, DECIDES),
    "while": (lambda loss, n, h: [1 for _ in iter(lambda: bool(n.item()), False)], DECIDES),
    "index": (lambda loss, n, h: h[n.item()].sum(), SELECTS),
    "range": (lambda loss, n, h: float(len(range(int(n)))), DECIDES),
    "key": (lambda loss, n, h: {1: 2.0}[n.item()], DECIDES),
    "assert": (lambda loss, n, h: 1.0 if bool(torch.isfinite(loss)) else 0.0, DECIDES),
    "nonzero": (lambda loss, n, h: h[h > 0].sum(), SELECTS),
    "repeats": (lambda loss, n, h: h.repeat_interleave((h > 0).sum(1), 0).sum(), TORCH),
    "many": (lambda loss, n, h: sum(torch.cat([h] * 99).flatten().tolist()), "makes a list of the .* at most 1,024"),
    "sorted": (lambda loss, n, h: sorted([loss.item(), n.item()])[0], DECIDES),
    "sizes": (lambda loss, n, h: h.split(h.sum(1).long().tolist())[0].sum(), PASSED),
    "shape": (lambda loss, n, h: torch.zeros(int(n)).sum(), PASSED),
    "shapes": (lambda loss, n, h: torch.zeros(int(n) + 1, 2).sum(), PASSED),
    "new": (lambda loss, n, h: h.new_zeros(int(n), 2).sum(), PASSED),
    "expand": (lambda loss, n, h: h[:1].expand(int(n), 6).sum(), PASSED),
    "list of sizes": (lambda loss, n, h: torch.zeros([n.item(), 2], dtype=h.dtype).sum(), PASSED),
    "view": (lambda loss, n, h: h.view(n.item(), -1).sum(), PASSED),
    "arange": (lambda loss, n, h: torch.arange(n.item()).sum(), PASSED),
    "classes": (lambda loss, n, h: torch.nn.functional.one_hot((h > 0).long(), n.item()).sum(), PASSED),
    "method": (lambda loss, n, h: loss.item().hex(), PASSED),
    "gamma": (lambda loss, n, h: math.gamma(loss.item()), PASSED),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_value_decides_is_refused(name: str) -> None:
    use, says = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"test_deferred_numbers.py:\d+ .*{says}"):
        capture(Using(use), regression(6)).at(6)


class Named(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log(f"at {loss.item()}", loss)
        return loss


class Weighted(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("x", loss, batch_size=(batch[0] > 0).sum().item())
        return loss


class WeightedByTensor(MLP):
    """Lightning accepts a tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"x": loss}, batch_size=(batch[0] > 0).sum())  # type: ignore[arg-type]
        return loss


class Metric(MLP):
    """Lightning ignores the batch size of a metric object."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, count = super().training_step(batch, batch_idx), (batch[0] > 0).sum()
        self.mean(loss)
        self.log("x", self.mean, batch_size=count.item() if self.current_epoch else count)  # type: ignore[arg-type]
        return loss


class Keeps(MLP):
    last = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Named, "makes a text of the value of a tensor"),
        (Weighted, r"self.log\('x'\): the argument batch_size is made from the value of a tensor"),
        (WeightedByTensor, r"self.log\('x'\): the argument batch_size is made from the value of a tensor"),
        (Keeps, "changes self.last"),
    ],
)
def test_a_value_goes_nowhere_else(cls: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(cls(), regression(4)).at(4)


@pytest.mark.parametrize("epoch", [0, 1])
def test_lightning_ignores_the_batch_size_of_a_metric_object(epoch: int) -> None:
    module = Metric()
    with mock.patch.object(Metric, "current_epoch", epoch):
        step = capture(module, regression(4))
        step.at(4)
