"""Trainings whose steps take numbers out of tensors, log them, and check values, compared with a plain
Trainer on one device.
"""

from __future__ import annotations

import contextlib
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics.functional as metrics
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.compiler import compile
from lightning_piper.errors import CaptureError
from lightning_piper.verify import interpret
from tests.strategy.fitting import Batches, distance, local, trainer, values

ONE = [piper.Place(filter={}, devices=[0])]
STAGES = [piper.Place(filter={"PP": 0}, devices=[0]), piper.Place(filter={"PP": 1}, devices=[1])]
SPLIT = piper.Split(filter={}, dim_name="MB", num_microbatches=2)


class Classifier(L.LightningModule):
    """A model in float64, so that Python computes what tensors compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()

    def logits(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(x))
        with piper.annotate("PP", 1):
            return self.second(h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.logits(x)
        with piper.annotate("PP", 1):
            loss = F.cross_entropy(logits, y)
            correct = (logits.argmax(1) == y).sum().item()
            print(f"loss {loss.item():.3f}, {loss}, {loss:.2f}", loss)
            self.log("accuracy", correct / len(y), on_step=True, on_epoch=True)
            self.log_dict(
                {
                    "float": float(loss),
                    "rounded": round(100.0 * correct / len(y), 2),
                    "batch": batch_idx + loss.item(),
                }
            )
            self.log("largest", max(logits.detach().amax(1).tolist()), reduce_fx=max)
            self.log(
                "f1",
                metrics.f1_score(logits.softmax(1), y, task="multiclass", num_classes=3, average="macro"),
            )
            self.log("micro", metrics.accuracy(logits, y, task="multiclass", num_classes=3))
            return loss * (1 + loss.item())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.logits(x)
        with piper.annotate("PP", 1):
            loss = F.cross_entropy(logits, y)
            self.log("val", loss.item())
            self.log("val_accuracy", metrics.accuracy(logits, y, task="multiclass", num_classes=3).item())
            return {"loss": loss.item(), "rows": [len(y), (y > 0).sum().item()]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Outputs(L.Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.found.append(outputs)


def fitted(strategy: Any, seed: int = 1) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    data = [
        (torch.randn(6, 4, generator=draw, dtype=torch.float64), torch.randint(3, (6,), generator=draw))
        for _ in range(4)
    ]
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = Classifier()
    outputs = Outputs()
    fit, record = trainer(strategy, [outputs], max_steps=4, num_sanity_val_steps=0)
    fit.fit(module, Batches(data), Batches(data[:2]))
    return {"values": values(module), "logged": [*record.logged, *record.epochs], "outputs": outputs.found}


def logged(found: dict[str, Any], but: tuple[str, ...] = ()) -> list[dict[str, float]]:
    return [{name: float(x) for name, x in step.items() if name not in but} for step in found["logged"]]


@pytest.mark.parametrize("program", [ONE, STAGES, [*STAGES, SPLIT]], ids=["one", "stages", "microbatches"])
def test_values_in_python_train_and_are_logged_as_on_one_device(program: Any, capsys: Any) -> None:
    plain = fitted("auto")
    said = capsys.readouterr().out
    cut = SPLIT in program
    with (
        pytest.warns(UserWarning, match="the loss is not a sum of means") if cut else contextlib.nullcontext()
    ):
        ours, other_seed = fitted(local(program)), fitted(local(program), seed=2)
    if cut:  # what a microbatch computes with its own loss, and what is no mean, is that of a microbatch
        for name in ("accuracy_step", "micro", "batch"):
            assert float(ours["logged"][0][name]) == pytest.approx(
                float(plain["logged"][0][name]), rel=1e-6
            ), name
        assert distance(plain["values"], ours["values"]) < 0.1
    else:
        assert distance(plain["values"], ours["values"]) < 1e-14
        for one, other in zip(logged(plain), logged(ours), strict=True):
            assert other == pytest.approx(one, rel=1e-6)
    assert logged(plain) != logged(other_seed)
    text = capsys.readouterr().out
    assert "loss <value known after the step>" in text and "loss <value known after the step>" not in said
    assert not any(line in text for line in said.splitlines())


def test_what_a_validation_returns_are_numbers() -> None:
    torch.manual_seed(1)
    module, batch = Classifier(), (torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,)))
    compiled = compile(module, batch, STAGES, step="validation_step")
    outcome = interpret(
        compiled.dag, {n: x.detach() for n, x in module.named_parameters()}, compiled.step.inputs(list(batch))
    )
    found: Any = compiled.dag.code.rebuild(
        [outcome.results[0][str(i)] for i in range(len(outcome.results[0]))]
    )  # type: ignore[misc]
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    assert (
        found == module.validation_step(batch, 0)
        and type(found["loss"]) is float
        and type(found["rows"][1]) is int
    )


def test_a_counter_in_a_tensor_is_logged() -> None:
    """As large as the batch in its second step, and 0 in the first, of which there is a trace with other
    samples.
    """

    class Counting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            number = torch.tensor(batch_idx, dtype=torch.long)
            self.log("first", number, on_step=False, on_epoch=True, reduce_fx=min)
            self.log("last", number, on_step=False, on_epoch=True, reduce_fx=max)
            return F.cross_entropy(self.logits(batch[0]), batch[1])

    data = [(torch.randn(1, 4, dtype=torch.float64), torch.tensor([k])) for k in range(3)]
    fit, _ = trainer(local(ONE, capture="always"), max_steps=-1, max_epochs=1)
    fit.fit(Counting(), Batches(data))
    assert {name: float(x) for name, x in fit.callback_metrics.items()} == {"first": 0, "last": 2}


@pytest.mark.filterwarnings("ignore:the loss is not a sum of means")
def test_a_loss_times_its_own_number_is_logged() -> None:
    """As on one device: of the whole batch, from parts of several shapes."""

    class Squared(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.logits(batch[0])
            with piper.annotate("PP", 1):
                loss = F.cross_entropy(logits, batch[1])
                loss = loss * loss.item()
                self.log("squared", loss)
            return loss

    module, batch = Squared(), (torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,)))
    whole = F.cross_entropy(module.logits(batch[0]), batch[1]).item()
    fit, record = trainer(local([*STAGES, SPLIT]), max_steps=1)
    fit.fit(module, Batches([batch]))
    assert float(record.logged[0]["squared"]) == pytest.approx(whole**2, rel=1e-14)


class Texts(Classifier):
    """A classifier that keeps a text, a key and an attribute made from values, and predicts texts."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []
        self.of: dict[Any, Any] = {}
        self.last: Any = None

    def classes(self, batch: Any) -> Tensor:
        return self.logits(batch[0]).argmax(1)

    def keep(self, batch: Any) -> Any:
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.keep(batch)

    predict_step = validation_step


class Joined(Texts):
    def keep(self, batch: Any) -> None:
        self.lines.append(" ".join(map(str, self.classes(batch).tolist())))


class Keyed(Texts):
    def keep(self, batch: Any) -> None:
        self.of[f"sum {batch[1].sum().item()}"] = self.classes(batch)


class Attribute(Texts):
    def keep(self, batch: Any) -> None:
        self.last = f"sum {self.classes(batch).sum().item():.2f}"


class Returned(Texts):
    def keep(self, batch: Any) -> Any:
        return {"text": [f"class {x}" for x in self.classes(batch).tolist()]}


class Printed(Texts):
    """The control: the text is only printed, and the numbers are kept."""

    def keep(self, batch: Any) -> None:
        found = self.classes(batch).tolist()
        print(f"classes {found}")
        self.lines.append(found)


def compiled_texts(cls: type[Texts], step: str) -> Any:
    torch.manual_seed(1)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    return compile(cls(), batch, STAGES, step=step)


@pytest.mark.parametrize("step", ["validation_step", "predict_step"])
@pytest.mark.parametrize("cls", [Joined, Keyed, Attribute, Returned])
def test_an_evaluation_that_keeps_a_text_of_a_value_is_not_captured(cls: type[Texts], step: str) -> None:
    with pytest.raises(CaptureError, match=r"test_values.py:\d+ .*makes a text of the value of a tensor"):
        compiled_texts(cls, step)


def test_an_evaluation_that_prints_a_text_and_keeps_numbers_is_captured(capsys: Any) -> None:
    assert compiled_texts(Printed, "validation_step").plans
    assert "classes [<value known after the step>" in capsys.readouterr().out
