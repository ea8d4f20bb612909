"""Rows of `python_state`: attributes of the module, of its parts, and of objects that it holds."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategy.python_state import Net


class Float(Net):
    microbatches = 2

    def build(self) -> None:
        self.beta = 1.0

    def factor(self, batch_idx: int) -> Any:
        return self.beta

    def change(self, step: int) -> None:
        self.beta += 0.25


class FloatInTheFirstStage(Net):
    def build(self) -> None:
        self.beta = 1.0

    def hidden(self, x: Tensor) -> Tensor:
        return F.tanh(self.first(x)) * self.beta

    def change(self, step: int) -> None:
        self.beta += 0.25


class Int(Net):
    def build(self) -> None:
        self.count = 1

    def factor(self, batch_idx: int) -> Any:
        return self.count / 2

    def change(self, step: int) -> None:
        self.count += 1


class Depth(Net):
    """A number that decides how the code runs."""

    captures = 6

    def build(self) -> None:
        self.depth = 1

    def hidden(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(self.depth):
            h = F.tanh(h)
        return h

    def change(self, step: int) -> None:
        self.depth += 1


class Bool(Net):
    captures = 2

    def build(self) -> None:
        self.warm = True

    def factor(self, batch_idx: int) -> Any:
        return 0.5 if self.warm else 1.0

    def change(self, step: int) -> None:
        self.warm = not self.warm


class Mode(Net):
    captures = 2

    def build(self) -> None:
        self.mode = "l2"

    def loss(self, out: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(out, y) if self.mode == "l2" else F.l1_loss(out, y)

    def change(self, step: int) -> None:
        self.mode = "l1" if step % 2 else "l2"


class NoneAtFirst(Net):
    captures = 4

    def build(self) -> None:
        self.beta: float | None = None

    def factor(self, batch_idx: int) -> Any:
        return 1.0 if self.beta is None else self.beta

    def change(self, step: int) -> None:
        self.beta = 0.25 * step


class Missing(Net):
    """An attribute that a hook makes, and takes away."""

    def factor(self, batch_idx: int) -> Any:
        return getattr(self, "late", 1.0)

    def change(self, step: int) -> None:
        if step == 2:
            self.late = 0.5
        elif step == 4:
            del self.late


class DropoutP(Net):
    captures = 2

    def build(self) -> None:
        self.dropout = nn.Dropout(0.0)

    def hidden(self, x: Tensor) -> Tensor:
        return self.dropout(self.first(x))  # type: ignore[no-any-return]

    def change(self, step: int) -> None:
        self.dropout.p = float(step % 2)  # all or nothing: nothing is left to chance


class LayerNormEps(Net):
    captures = 6

    def build(self) -> None:
        self.norm = nn.LayerNorm(5)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))  # type: ignore[no-any-return]

    def change(self, step: int) -> None:
        self.norm.eps = 0.1 * step


class Hparams(Net):
    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def factor(self, batch_idx: int) -> Any:
        return self.hparams.beta  # type: ignore[attr-defined]

    def change(self, step: int) -> None:
        self.hparams.beta += 0.25  # type: ignore[attr-defined]


class NestedModule(Net):
    def build(self) -> None:
        self.block = nn.Sequential(nn.Tanh(), nn.Identity())
        self.block[1].gain = 1.0  # type: ignore[assignment]

    def hidden(self, x: Tensor) -> Tensor:
        return self.block(self.first(x)) * self.block[1].gain  # type: ignore[no-any-return]

    def change(self, step: int) -> None:
        self.block[1].gain *= 1.25  # type: ignore[operator, assignment]


@dataclasses.dataclass
class Config:
    beta: float = 1.0
    inner: Any = None


class Dataclass(Net):
    def build(self) -> None:
        self.config = Config()

    def factor(self, batch_idx: int) -> Any:
        return self.config.beta

    def change(self, step: int) -> None:
        self.config.beta += 0.25


class Replaced(Net):
    """Another object in the place of the first."""

    captures = 6

    def build(self) -> None:
        self.config = Config()

    def factor(self, batch_idx: int) -> Any:
        return self.config.beta

    def change(self, step: int) -> None:
        self.config = dataclasses.replace(self.config, beta=1 + 0.25 * step)


class NestedObject(Net):
    def build(self) -> None:
        self.config = Config(inner=Config(inner=Config()))

    def factor(self, batch_idx: int) -> Any:
        return self.config.inner.inner.beta

    def change(self, step: int) -> None:
        self.config.inner.inner.beta += 0.25


class Warmup:
    def __init__(self) -> None:
        self.steps = 1

    def weight(self) -> float:
        return min(1.0, self.steps / 5)

    __call__ = weight


class Counters(Net):
    def build(self) -> None:
        self.warmup = Warmup()

    def factor(self, batch_idx: int) -> Any:
        return self.warmup.steps * 0.5

    def change(self, step: int) -> None:
        self.warmup.steps += 1


class Method(Net):
    captures = 5

    def build(self) -> None:
        self.warmup = Warmup()

    def factor(self, batch_idx: int) -> Any:
        return self.warmup.weight()

    def change(self, step: int) -> None:
        self.warmup.steps += 1


class Callable_(Net):
    captures = 5

    def build(self) -> None:
        self.weight = Warmup()

    def factor(self, batch_idx: int) -> Any:
        return self.weight()

    def change(self, step: int) -> None:
        self.weight.steps += 1


class BoundMethod(Net):
    """A method of an object that is held nowhere else."""

    captures = 5

    def build(self) -> None:
        self.weight = Warmup().weight

    def factor(self, batch_idx: int) -> Any:
        return self.weight()

    def change(self, step: int) -> None:
        self.weight.__self__.steps += 1  # type: ignore[attr-defined]


class Simple(Net):
    def build(self) -> None:
        self.config = SimpleNamespace(beta=1.0)

    def factor(self, batch_idx: int) -> Any:
        return self.config.beta

    def change(self, step: int) -> None:
        self.config.beta += 0.25


class Arguments(Net):
    def build(self) -> None:
        self.args = argparse.Namespace(beta=1.0)

    def factor(self, batch_idx: int) -> Any:
        return self.args.beta

    def change(self, step: int) -> None:
        self.args.beta += 0.25


class Slotted:
    __slots__ = ("beta",)

    def __init__(self) -> None:
        self.beta = 1.0


class Slots(Net):
    def build(self) -> None:
        self.config = Slotted()

    def factor(self, batch_idx: int) -> Any:
        return self.config.beta

    def change(self, step: int) -> None:
        self.config.beta += 0.25


class Property(Net):
    def build(self) -> None:
        self._steps = 0

    @property
    def beta(self) -> float:
        return 1 + self._steps / 4

    def factor(self, batch_idx: int) -> Any:
        return self.beta

    def change(self, step: int) -> None:
        self._steps = step


class Dynamic:
    """Attributes out of a dict."""

    def __init__(self, **entries: Any) -> None:
        self.__dict__["entries"] = entries

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["entries"][name]
        except KeyError:
            raise AttributeError(name) from None


class GetAttr(Net):
    def build(self) -> None:
        self.config = Dynamic(beta=1.0)

    def factor(self, batch_idx: int) -> Any:
        return self.config.beta

    def change(self, step: int) -> None:
        self.config.entries["beta"] += 0.25


class AttributeDict(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class DictWithAttributes(Net):
    def build(self) -> None:
        self.config = AttributeDict(beta=1.0)

    def factor(self, batch_idx: int) -> Any:
        return self.config.beta

    def change(self, step: int) -> None:
        self.config["beta"] += 0.25


class SharedNumber(Net):
    """A number that processes share, such as workers of the loader and the step."""

    captures = 6

    def build(self) -> None:
        self.beta = multiprocessing.Value("d", 1.0)

    def factor(self, batch_idx: int) -> Any:
        return self.beta.value

    def change(self, step: int) -> None:
        self.beta.value += 0.25


class SharedNumbers(Net):
    captures = 6

    def build(self) -> None:
        self.betas = multiprocessing.Array("d", [1.0, 2.0])

    def factor(self, batch_idx: int) -> Any:
        return self.betas[0] * self.betas[1]

    def change(self, step: int) -> None:
        self.betas[1] += 0.25


class SharedFlag(Net):
    captures = 2

    def build(self) -> None:
        self.warm = multiprocessing.Event()

    def factor(self, batch_idx: int) -> Any:
        return 0.5 if self.warm.is_set() else 1.0

    def change(self, step: int) -> None:
        (self.warm.set if step % 2 else self.warm.clear)()
