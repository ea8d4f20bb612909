"""A training step that is not captured: one region, whose passes are the user's own code under autograd.

The border of the region is typed as that of any other one: its forward pass reads parameters, its backward pass makes gradients,
each of this replica's batch. So directives place and replicate it, the static check and plans hold, and the same runtime runs it.
Nothing is known of what is inside; so no batch is cut, and each replica's loss weighs the same, as with DistributedDataParallel.

A parameter that no replica has used has no gradient, which to an optimizer is not the same as a gradient of zero. The sum says
which those are: a replica that has not used a parameter gives -0.0 for each element, and the others no -0.0 for the first one. In
IEEE 754 only a sum of nothing but -0.0 is -0.0, and adding it changes no number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from lightning_piper.capture.batch import BatchSpec
from lightning_piper.capture.kept import Returned
from lightning_piper.capture.named import named_tensors
from lightning_piper.capture.text import Text
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Division
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.regions import Code, Interface, Output, PassKey, Region, StepCode, Undivided
from lightning_piper.ir.terms import Term, Weighing
from lightning_piper.ir.values import Kind


class EagerStep:
    """See `ir.regions.Step`.

    Attributes:
        backward: gives the gradients of `trained`, of this process's batch; None for a parameter that has none.
        found: whether the parameters have got gradients in this process, in the last step.

    Args:
        module: a LightningModule.
        replicas: how many batches a step gets at once.
        trained: canonical names of the parameters of which it makes gradients.
        device: of the tensors.
        reads: canonical names of the parameters that it reads; all of them if left out.
    """

    name = "training_step"
    batch_spec = BatchSpec(None, (), ())  # nobody looks into its batch
    divisions: tuple[Division, ...] = ()

    def __init__(
        self, module: nn.Module, replicas: int, trained: Sequence[str], device: torch.device, reads: Sequence[str] | None = None
    ) -> None:
        self.module, self.size, self.trained, self._device = module, replicas, tuple(trained), device
        self._reads = reads
        self.params, self.buffers, self.canonical, _ = named_tensors(module)
        self.backward: Callable[[], Sequence[torch.Tensor | None]] = lambda: [None] * len(self.trained)
        self.found: tuple[bool, ...] = ()

    @property
    def member(self) -> EagerStep:
        return self

    def divided(self, divisions: Sequence[Division]) -> EagerStep:
        raise CaptureError(f"{self.name} runs as it is, so nothing is known of its tensors that could be divided")

    def recomputing(self, recomputation: Recomputation) -> EagerStep:
        raise CaptureError(f"{self.name} runs as it is, so nothing is known of what it keeps that could be computed again")

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
        reads = tuple(self.params) if self._reads is None else tuple(self._reads)
        forward = Interface((), (Output(Kind.SAVED, ("B",)),), reads, tuple(self.buffers))
        gradients = (Output(Kind.GRAD, self.trained),) if self.trained else ()
        backward = Interface(((0, "F", 0),), gradients, seeds=(0,))
        empty = torch.fx.Graph()
        code: Mapping[PassKey, Code] = {
            (0, "F"): Code(_nothing, ((),), empty),
            (0, "B"): Code(self._backward, (specs,) if gradients else (), empty),
        }
        source = f"{type(self.module).__name__}.{self.name}, which runs as it is"
        return StepCode(
            size, (Region(0, {}, source),), {(0, "F"): forward, (0, "B"): backward}, code, (), (),
            terms=(Term(Weighing.SAMPLES, "batches"),), undivided=Undivided(self.size, f"those of {source}"),
        )  # fmt: skip

    def shaped(self, batch_spec: object) -> EagerStep:
        """It is the same for all batches."""
        return self

    def _backward(self, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (weight,) = given
        made = self.backward()
        self.found = tuple(x is not None for x in made)
        specs = (self.params[name].spec for name in self.trained)
        return tuple(
            torch.full(spec.shape, -0.0, dtype=spec.dtype, device=self._device) if x is None else _weighed(x, weight)
            for spec, x in zip(specs, made, strict=True)
        )


def _weighed(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    grad = (grad if grad.layout is torch.strided else grad.to_dense()).mul_(weight)
    grad[_FIRST[: grad.dim()]].add_(0.0)  # -0.0 + 0.0 is 0.0
    return grad


_FIRST = (slice(1),) * 64


def is_of_none(total: torch.Tensor) -> torch.Tensor:
    """Of a sum over replicas: has none of them used the parameter?"""
    first = torch.view_as_real(total) if total.is_complex() else total
    first = first[_FIRST[: first.dim()]]
    return (first.signbit() & (first == 0)).all()


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
            code,
            interfaces={key: reads},
            code={key: Code(_nothing, (), torch.fx.Graph())},
            terms=(),
            rebuild=Returned(self.batch_spec, self.batch_spec, ()),
        )


def _nothing(given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    given.clear()
    return ()
