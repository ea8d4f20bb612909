"""Rows of `python_state`: containers, globals, closures, classes and functions."""

from __future__ import annotations

import enum
import functools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.strategy import elsewhere
from tests.strategy.python_state import Net

BETA = 1.0
TABLE = {"beta": 1.0}
WEIGHTS = [1.0, 2.0]
LOSS: Callable[..., Tensor] = F.mse_loss


class CFG:
    beta = 1.0


class List(Net):
    def build(self) -> None:
        self.weights = [1.0, 2.0]

    def factor(self, batch_idx: int) -> Any:
        return self.weights[0] + self.weights[1]

    def change(self, step: int) -> None:
        self.weights[0] += 0.25


class Grows(Net):
    captures = 6

    def build(self) -> None:
        self.history = [1.0]

    def factor(self, batch_idx: int) -> Any:
        return sum(self.history) / len(self.history)

    def change(self, step: int) -> None:
        self.history.append(float(step))


class Dict(Net):
    def build(self) -> None:
        self.weights = {"a": {"b": [1.0]}}

    def factor(self, batch_idx: int) -> Any:
        return self.weights["a"]["b"][0]

    def change(self, step: int) -> None:
        self.weights["a"]["b"][0] += 0.25


class Tuple(Net):
    captures = 6

    def build(self) -> None:
        self.range = (1.0, 2.0)

    def factor(self, batch_idx: int) -> Any:
        return self.range[1] - self.range[0]

    def change(self, step: int) -> None:
        self.range = (1.0, 2.0 + step)


class Point(NamedTuple):
    beta: float


class Named(Net):
    captures = 6

    def build(self) -> None:
        self.point = Point(1.0)

    def factor(self, batch_idx: int) -> Any:
        return self.point.beta

    def change(self, step: int) -> None:
        self.point = self.point._replace(beta=1 + step / 4)


class Set(Net):
    captures = 2

    def build(self) -> None:
        self.active = {"l2"}

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(out, y) + (F.l1_loss(out, y) if "l1" in self.active else 0)

    def change(self, step: int) -> None:
        (self.active.add if step % 2 else self.active.discard)("l1")


class Deque(Net):
    captures = 4

    def build(self) -> None:
        self.last = deque([1.0, 1.0], maxlen=2)

    def factor(self, batch_idx: int) -> Any:
        return sum(self.last) / len(self.last)

    def change(self, step: int) -> None:
        self.last.append(1 + step / 4)


class Array(Net):
    captures = 6

    def build(self) -> None:
        self.weights = np.ones(2)

    def factor(self, batch_idx: int) -> Any:
        return float(self.weights[0])

    def change(self, step: int) -> None:
        self.weights[0] += 0.25


class NumpyScalar(Net):
    captures = 6

    def build(self) -> None:
        self.beta = np.float64(1)

    def factor(self, batch_idx: int) -> Any:
        return self.beta

    def change(self, step: int) -> None:
        self.beta = self.beta + 0.25


class Phase(enum.Enum):
    WARM = 0.5
    HOT = 1.5


class EnumMember(Net):
    captures = 2

    def build(self) -> None:
        self.phase = Phase.WARM

    def factor(self, batch_idx: int) -> Any:
        return self.phase.value

    def change(self, step: int) -> None:
        self.phase = Phase.HOT if step % 2 else Phase.WARM


class GlobalNumber(Net):
    def build(self) -> None:
        globals()["BETA"] = 1.0

    def factor(self, batch_idx: int) -> Any:
        return BETA

    def change(self, step: int) -> None:
        global BETA
        BETA += 0.25


class GlobalContainers(Net):
    def build(self) -> None:
        TABLE["beta"] = WEIGHTS[0] = 1.0

    def factor(self, batch_idx: int) -> Any:
        return TABLE["beta"] + WEIGHTS[0]

    def change(self, step: int) -> None:
        TABLE["beta"] += 0.25
        WEIGHTS[0] += 0.5


class GlobalClass(Net):
    def build(self) -> None:
        CFG.beta = elsewhere.Settings.beta = 1.0

    def factor(self, batch_idx: int) -> Any:
        return CFG.beta + elsewhere.Settings.beta

    def change(self, step: int) -> None:
        CFG.beta += 0.25
        elsewhere.Settings.beta += 0.5


class GlobalFunction(Net):
    captures = 2

    def build(self) -> None:
        globals()["LOSS"] = F.mse_loss

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return LOSS(out, y)

    def change(self, step: int) -> None:
        global LOSS
        LOSS = F.l1_loss if step % 2 else F.mse_loss


class Elsewhere(Net):
    def build(self) -> None:
        elsewhere.BETA = 1.0

    def factor(self, batch_idx: int) -> Any:
        return elsewhere.BETA

    def change(self, step: int) -> None:
        elsewhere.BETA += 0.25


class Closure(Net):
    def build(self) -> None:
        count = 1

        def weight() -> float:
            return count / 2

        def increase() -> None:
            nonlocal count
            count += 1

        self.weight, self.increase = weight, increase

    def factor(self, batch_idx: int) -> Any:
        return self.weight()

    def change(self, step: int) -> None:
        self.increase()


class ClassAttribute(Net):
    scale: ClassVar[float] = 1.0

    def build(self) -> None:
        ClassAttribute.scale = 1.0

    def factor(self, batch_idx: int) -> Any:
        return type(self).scale + self.scale

    def change(self, step: int) -> None:
        ClassAttribute.scale += 0.25


class Weighing(torch.autograd.Function):
    scale: ClassVar[float] = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * Weighing.scale


class InBackward(Net):
    """An attribute that is named in a backward pass of the user's own, and nowhere else."""

    captures = 6

    def build(self) -> None:
        Weighing.scale = 1.0

    def hidden(self, x: Tensor) -> Tensor:
        made: Tensor = Weighing.apply(super().hidden(x))  # type: ignore[no-untyped-call]
        return made

    def change(self, step: int) -> None:
        Weighing.scale += 0.25


class Default(Net):
    captures = 6

    def factor(self, batch_idx: int, weights: list[float] = [1.0]) -> Any:  # noqa: B006
        return weights[0]

    def build(self) -> None:
        self.weights()[0] = 1.0

    def weights(self) -> Any:
        return type(self).factor.__defaults__[0]  # type: ignore[index]

    def change(self, step: int) -> None:
        self.weights()[0] += 0.25


class Partial(Net):
    microbatches = 2
    captures = 2

    def build(self) -> None:
        self.criterion = partial(F.smooth_l1_loss, beta=0.5)

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return self.criterion(out, y)

    def change(self, step: int) -> None:
        self.criterion = partial(F.smooth_l1_loss, beta=1.5) if step == 2 else self.criterion


class PartialKeywords(Net):
    captures = 6

    def build(self) -> None:
        self.criterion = partial(F.smooth_l1_loss, beta=0.5)

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return self.criterion(out, y)

    def change(self, step: int) -> None:
        self.criterion.keywords["beta"] += 0.5


class Lambda(Net):
    captures = 2

    def build(self) -> None:
        self.weight: Callable[[], float] = lambda: 1.0

    def factor(self, batch_idx: int) -> Any:
        return self.weight()

    def change(self, step: int) -> None:
        self.weight = (lambda: 0.5) if step == 2 else self.weight


class MethodOfTheClass(Net):
    """A method is replaced on the class."""

    captures = 2

    def build(self) -> None:
        MethodOfTheClass.weight = lambda self: 1.0  # type: ignore[method-assign]

    def weight(self) -> float:
        raise NotImplementedError

    def factor(self, batch_idx: int) -> Any:
        return self.weight()

    def change(self, step: int) -> None:
        if step == 2:
            MethodOfTheClass.weight = lambda self: 0.5  # type: ignore[method-assign]


class Cached(Net):
    """Computed once on one device too."""

    refused = r"computes the cached property self\.table"

    @functools.cached_property
    def table(self) -> float:
        return 2.0

    def factor(self, batch_idx: int) -> Any:
        return self.table


def weight() -> float:
    return weight.beta  # type: ignore[attr-defined, no-any-return]


class FunctionAttribute(Net):
    def build(self) -> None:
        weight.beta = 1.0  # type: ignore[attr-defined]

    def factor(self, batch_idx: int) -> Any:
        return weight()

    def change(self, step: int) -> None:
        weight.beta += 0.25  # type: ignore[attr-defined]
