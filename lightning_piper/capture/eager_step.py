"""A training step that is not captured: one region, whose passes are the user's own code under autograd.

The border of the region is typed as that of any other one: its forward pass reads parameters and makes the loss, its backward pass
makes gradients, each of this replica's batch. So directives place and replicate it, the static check and plans hold, and the same
runtime runs it. Nothing is known of what is inside; so no batch is cut, and the loss of each replica weighs the same, as with
DistributedDataParallel.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from lightning_piper.capture.step import named_tensors
from lightning_piper.capture.text import Text
from lightning_piper.ir.regions import LOSS, Code, Interface, Logged, Output, PassKey, Region, StepCode, Undivided
from lightning_piper.ir.terms import Term, Weighing
from lightning_piper.ir.values import Kind, TensorSpec

# A number for the set of parameters that got gradients: the largest and the smallest one of all replicas.
_SETS = {"largest set of parameters": Weighing.MAX, "smallest set of parameters": Weighing.MIN}
_SCALAR = (TensorSpec((), torch.float64, ()),)


class EagerStep:
    """See `ir.regions.Step`.

    Attributes:
        backward: gives the gradients of `trained`, of this process's batch; None for a parameter that has none.
        found: whether the parameters have got gradients, in the last step.

    Args:
        module: a LightningModule.
        replicas: how many batches a step gets at once.
        trained: canonical names of the parameters of which it makes gradients.
        device: of the tensors.
        reads: canonical names of the parameters that it reads; all of them if left out.
    """

    name = "training_step"

    def __init__(
        self, module: nn.Module, replicas: int, trained: Sequence[str], device: torch.device, reads: Sequence[str] | None = None
    ) -> None:
        self.module, self.size, self.trained, self._device = module, replicas, tuple(trained), device
        self._reads = reads
        self.params, self.buffers, self.canonical, _ = named_tensors(module)
        self.backward: Callable[[], Sequence[torch.Tensor | None]] = lambda: [None] * len(self.trained)
        self.found: tuple[bool, ...] = ()

    @property
    def said(self) -> Text:
        """What can be said of it: equal for the same step, on any process."""
        lines = (f"{self.name} runs as it is", *(f"gradient of {name}: {self.params[name].spec}" for name in self.trained))
        return Text(lines, ("",) * len(lines), ((),) * len(lines))

    @property
    def text(self) -> str:
        return "\n".join(self.said.lines)

    def at(self, size: int, degrees: tuple[int, ...] = ()) -> StepCode:
        """The region. Its code is the same for any number of batches, of which each replica runs one."""
        specs = tuple(self.params[name].spec for name in self.trained)
        sets = tuple(Output(Kind.LOG, (name,), 1 + i) for i, name in enumerate(_SETS))
        reads = tuple(self.params) if self._reads is None else tuple(self._reads)
        forward = Interface((), (Output(Kind.LOSS, (LOSS,), 0), Output(Kind.SAVED, ("B",))), reads, tuple(self.buffers))
        gradients = (Output(Kind.GRAD, self.trained),) if self.trained else ()
        backward = Interface(((0, "F", 1),), (*gradients, *sets), seeds=(0,))
        empty = torch.fx.Graph()
        code: Mapping[PassKey, Code] = {
            (0, "F"): Code(self._forward, (_SCALAR, ()), empty),
            (0, "B"): Code(self._backward, (*([specs] if gradients else []), _SCALAR, _SCALAR), empty),
        }
        source = f"{type(self.module).__name__}.{self.name}, which runs as it is"
        terms = (Term(Weighing.SAMPLES, "batches"), *(Term(fold, fold) for fold in _SETS.values()))
        return StepCode(
            size, (Region(0, {}, source),), {(0, "F"): forward, (0, "B"): backward}, code,
            tuple(Logged(name, str(fold), {}) for name, fold in _SETS.items()), (), terms=terms,
            undivided=Undivided(self.size, f"those of {source}"),
        )  # fmt: skip

    def shaped(self, batch_spec: object) -> EagerStep:
        """It is the same for all batches."""
        return self

    def _forward(self, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given.clear()  # the user's code has them in the module, and has run
        return (torch.zeros((), dtype=torch.float64, device=self._device),)

    def _backward(self, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (weight,) = given
        made = self.backward()
        self.found = tuple(x is not None for x in made)
        specs = (self.params[name].spec for name in self.trained)
        grads = [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) if x is None else _dense(x).mul_(weight)
            for spec, x in zip(specs, made, strict=True)
        ]
        number = torch.tensor(float(number_of(self.found)), dtype=torch.float64, device=self._device)
        return (*grads, number, number)


class Regather(EagerStep):
    """What follows an optimizer's step that has updated shards of parameters: a step without a backward pass that reads them whole,
    so that a program of directives gathers them.

    Args:
        module, replicas, device: as in `EagerStep`.
        names: of the parameters.
    """

    name = "optimizer_step"

    def __init__(self, module: nn.Module, replicas: int, names: Sequence[str], device: torch.device) -> None:
        super().__init__(module, replicas, (), device, names)

    def at(self, size: int, degrees: tuple[int, ...] = ()) -> StepCode:
        key, code = (0, "F"), super().at(size, degrees)
        reads = dataclasses.replace(code.interfaces[key], outputs=(), buffers=())
        return dataclasses.replace(
            code, interfaces={key: reads}, code={key: Code(_nothing, (), torch.fx.Graph())}, logs=(), terms=(), rebuild=_nothing
        )


def _nothing(given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    given.clear()
    return ()


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()


def number_of(found: Iterable[bool]) -> int:
    """A number for which parameters have got gradients: equal for equal ones."""
    return zlib.crc32(bytes(found))
