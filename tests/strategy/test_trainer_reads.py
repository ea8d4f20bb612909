"""A step reads objects of the Trainer through operators, loops and texts. When a hook changes such an object, the
next step sees the change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sized
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture.proxies.deferred_numbers import NAMES
from lightning_piper.capture.python_state.trainer_proxy import ObjectReads, TrainerProxy, _class_for
from lightning_piper.errors import CaptureError
from tests.strategy.fitting import Batches, local, trainer


def caught(read: Callable[[], float], error: type[Exception]) -> float:
    try:
        return read()
    except error:
        return 0.25


# The hook changes `rates` (a dict of numbers), `found` (a dict of tensors, first empty), `counts` (a list) and
# `last` (first None).
READS: dict[str, Callable[[Any], float]] = {
    "found == {}": lambda t: float(t.found == {}),
    "rates != {...}": lambda t: float(t.rates != {"a": 0.5}),
    "counts == [0, 1]": lambda t: float(t.counts == [0, 1]),
    "counts == counts": lambda t: float(t.counts == t.others),
    "counts < [1, 1]": lambda t: float(t.counts < [1, 1]),
    "str": lambda t: float(str(t.rates) == "{'a': 0.5}"),
    "repr": lambda t: float(f"{t.rates!r}" == "{'a': 0.5}"),
    "format": lambda t: float(f"{t.counts}" == "[0, 1]"),
    "values()": lambda t: float(sum(t.found.values())),
    "items()": lambda t: float(sum(x for _, x in t.found.items())),
    "reversed(dict)": lambda t: float(len(list(reversed(t.found)))),
    "reversed(list)": lambda t: float(next(iter(reversed(t.counts)))),
    "dict | dict": lambda t: float((t.rates | {"b": 1.0})["a"]),
    "dict | proxy": lambda t: float(({"b": 1.0} | t.rates)["a"]),
    "list + list": lambda t: float(sum(t.counts + [1])),
    "list + proxy": lambda t: float(sum([1] + t.counts)),
    "KeyError": lambda t: caught(lambda: float(t.found["a"]), KeyError),
    "IndexError": lambda t: caught(lambda: float(t.last[0]), TypeError),
    "item": lambda t: t.found["a"].item() if t.found else 0.5,
    "detach": lambda t: (0.5 * t.found["b"].detach().cpu()).clone() if t.found else 0.5,
    "is None": lambda t: float(t.other is None),
    "is itself": lambda t: float(t.counts is t.counts),
    "is another": lambda t: float(t.counts is t.others),
    "is no longer": lambda t: float(t.counts is t.once),
    "the only optimizer": lambda t: float(t.optimizers[0] is t.lightning_module.optimizers(False)),
    "an object of the module": lambda t: float(t.helper is t.lightning_module.helper),
    "its number": lambda t: t.helper.number,
    "the module": lambda t: float(t.lightning_module is t.strategy.lightning_module),
    "type": lambda t: float(type(t.rates) is dict and type(t) is L.Trainer),
    "name of type": lambda t: float(type(t.optimizers[0]).__name__ == "SGD"),
    "type in a dict": lambda t: {torch.optim.SGD: 0.5}.get(type(t.optimizers[0]), 0.0),
    "type of a number": lambda t: float(type(t.global_step) is int and type(t.rates["a"]) is float),
    "type of another kind": lambda t: float(type(t.other) is list),
    "type of the module": lambda t: float(
        type(t.lightning_module) is Reading is t.lightning_module.__class__
    ),
    "a new type": lambda t: float(type("Made", (), {"x": 0.5})().x + isinstance(dict, type)),
    "isinstance of a tensor": lambda t: float(isinstance(t.found.get("a"), Tensor)),
    "type of a tensor": lambda t: float(type(t.found.get("a")) is Tensor) + torch.is_tensor(t.found.get("b")),
    "item of a tensor": lambda t: float(isinstance(t.found["a"].item(), float)) if t.found else 0.5,
    "callable": lambda t: float(callable(t.own)) + 0.5 * callable(t.optimizers[0]),
    "protocols": lambda t: float(isinstance(t.optimizers[0], Iterable)) + 0.5 * isinstance(t.rates, Sized),
    "vars": lambda t: vars(t.own)["_step"],
    "__dict__": lambda t: t.own.__dict__["_step"],
    "a private name": lambda t: t.own._step + t.own._where,
    "dir": lambda t: float("extra" in dir(t.own)),
    "is_dataclass": lambda t: float(dataclasses.is_dataclass(t.config)),
    "asdict": lambda t: dataclasses.asdict(t.config)["rate"],
    "a copied number": lambda t: copy.deepcopy({"n": t.own._step})["n"],
    "the Trainer of a submodule": lambda t: t.lightning_module.part.trainer.rates["a"],
    "a step number of a submodule": lambda t: float(t.lightning_module.part.global_step),
    "the Trainer of a helper": lambda t: t.lightning_module.helper.trainer.rates["a"],
    "a private attribute": lambda t: t.lightning_module._trainer.rates["a"],
    "a property by its class": lambda t: float(L.LightningModule.global_step.fget(t.lightning_module)),
    "the Trainer": lambda t: float(t.fit_loop.trainer is t.lightning_module.trainer is t),
}


@dataclasses.dataclass
class Config:
    rate: float


class Own:
    """An object that only the Trainer has. It can be called, and has attributes with the names of a proxy's."""

    def __init__(self, step: float) -> None:
        self._step, self._where = step, 0.5
        if step > 1:
            self.extra = 1.0

    def __call__(self) -> float:
        return self._step

    def __matmul__(self, other: float) -> float:
        return self._step * other


class Helper:
    """An object that the module has. The Trainer has it too, except for one batch."""

    number = 0.0
    trainer: Any = None


class Reading(L.LightningModule):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.helper, self.part = Helper(), L.LightningModule()
        self.read, self.first, self.last = read, *(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        n, trainer = batch_idx, self.trainer
        trainer.found = {} if n < 2 else {"a": torch.tensor(n + 0.0), "b": torch.tensor(2.0 * n)}
        trainer.rates, trainer.counts, trainer.others = {"a": n // 2 * 0.5}, [n // 3, n // 2], [0, 1]
        trainer.last, trainer.other = None if n < 2 else [n], [1] if n < 3 else None
        trainer.helper = Helper() if n == 3 else self.helper
        self.helper.number, self.helper.trainer = 0.5 * n, trainer
        trainer.own, trainer.config = Own(0.5 * n), Config(0.25 * n)
        trainer.once = trainer.counts if n < 2 else [0, 1]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = torch.tanh(self.first(batch))
        with piper.annotate("PP", 1):
            return self.last(hidden).square().mean() * (1 + self.read(self.trainer))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(read: Callable[[Any], float], strategy: Any) -> list[Tensor]:
    module = Reading(read)
    fit, _ = trainer(strategy, max_steps=5)
    fit.fit(
        module,
        Batches(torch.randn(8, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(5)),
    )
    return list(module.state_dict().values())


def far(one: list[Tensor], two: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("name", READS)
def test_a_read_of_the_trainer_is_seen_again(name: str) -> None:
    assert far(trained(READS[name], "auto"), trained(READS[name], local())) < 1e-12


def test_with_a_proxy_for_each_read_an_object_is_not_itself() -> None:
    def proxy(reads: ObjectReads, value: Any) -> TrainerProxy:
        return _class_for(type(value))(reads)

    with mock.patch.object(ObjectReads, "proxy", proxy):
        found = trained(READS["is itself"], local())
    assert far(trained(READS["is itself"], "auto"), found) > 1e-3


def test_without_a_guard_the_step_keeps_the_first_result() -> None:
    read = READS["found == {}"]
    with (
        mock.patch.object(ObjectReads, "ask", lambda self, question, of: of(self.get())),
        pytest.raises(CaptureError, match="now differs from the captured step"),
    ):
        trained(read, local())


@pytest.mark.parametrize("name", ["type", "type in a dict", "type of the module"])
def test_without_the_replacement_of_type_the_class_of_a_proxy_differs(name: str) -> None:
    with mock.patch.dict(NAMES):
        del NAMES["type"]
        assert far(trained(READS[name], "auto"), trained(READS[name], local())) > 1e-3


REFUSED: dict[str, tuple[Callable[[Any], float], str]] = {
    "call": (lambda t: t.own(), r"calls self.trainer.own\(\)"),
    "exchange": (
        lambda t: t.strategy.reduce(0.5),
        r"calls self.trainer.strategy.reduce\(\).*To join the samples of all processes, use piper.gather_samples",
    ),
    "operator": (lambda t: t.own @ 0.5, "uses __matmul__ of self.trainer.own"),
    "copy": (lambda t: copy.copy(t.own)._step, "uses a copy of self.trainer.own"),
    "a parameter": (
        lambda t: float(t.optimizers[0].param_groups[0]["params"][0].sum()),
        "reads a parameter from the param_groups of an optimizer. Read it from the module",
    ),
    "a tensor's method": (
        lambda t: float(t.found["a"].sqrt()) if t.found else 0.0,
        r"reads the tensor self.trainer.found\['a'\]",
    ),
    "set": (
        lambda t: setattr(t.lightning_module.helper.trainer, "seen", 1.0) or 0.0,  # type: ignore[func-returns-value]
        "sets self.trainer.seen",
    ),
    "del": (lambda t: delattr(t.own, "_step") or 0.0, "deletes self.trainer.own._step"),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_that_a_captured_step_cannot_repeat_is_an_error(name: str) -> None:
    read, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        trained(read, local())
