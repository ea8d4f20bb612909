"""A training step that is not captured: one region, whose passes run the user's code under autograd.

The region has the same kind of interface as any other region. Its forward pass reads parameters, and its
backward pass computes the gradients of this replica's batch. So directives can place and replicate the
region, the static check and plans apply to it, and the same runtime runs it. Because the code inside is not
known, batches are not cut, and each replica's loss has the same weight, as with DistributedDataParallel.

A parameter that no replica has used has no gradient, which an optimizer treats differently from a zero
gradient. The sum over replicas identifies such parameters: a replica that has not used a parameter
contributes -0.0 for each element, and a replica that has used it never contributes -0.0 for the first
element. In IEEE 754, a sum is -0.0 only if all its terms are -0.0, and adding -0.0 changes no number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from lightning_piper.capture.joint.trace_text import TraceText
from lightning_piper.capture.proxies.batch import BatchSpec
from lightning_piper.capture.python_state.side_effects import ResultBuilder
from lightning_piper.capture.steps.named_tensors import named_tensors
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Division
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.regions import Code, Interface, Output, PassKey, Region, StepCode, Undivided
from lightning_piper.ir.terms import Term, Weighing
from lightning_piper.ir.values import Kind, TensorSpec


class EagerStep:
    """A step (see `ir.regions.Step`) that runs the user's code uncaptured.

    Attributes:
        backward: Returns the gradients of `trained`, in this order, from this process's batch. The entry of a
            parameter without a gradient is None. Whoever runs the step sets this function.
        found: for each trained parameter, whether this process had a gradient in the last step. Empty before
            the first step.

    Args:
        module: a LightningModule.
        replicas: the number of batches that a step gets at once.
        trained: canonical names of the parameters that get gradients.
        device: The device of the tensors.
        reads: The parameters that the region reads (default: all).
    """

    name = "training_step"
    batch_spec = BatchSpec(None, (), ())  # not used, because the step accepts every batch
    divisions: tuple[Division, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        replicas: int,
        trained: Sequence[str],
        device: torch.device,
        reads: Sequence[str] | None = None,
    ) -> None:
        self.module, self.size, self.trained, self._device = module, replicas, tuple(trained), device
        self._reads = reads
        self._code: dict[int, StepCode] = {}
        self.params, self.buffers, self.canonical, _ = named_tensors(module)
        self.backward: Callable[[], Sequence[torch.Tensor | None]] = lambda: [None] * len(self.trained)
        self.found: tuple[bool, ...] = ()

    @property
    def member(self) -> EagerStep:
        """The step itself, because an uncaptured step shards no tensors along an axis of ranks."""
        return self

    def divided(self, divisions: Sequence[Division]) -> EagerStep:
        """Raise the `CaptureError` for a program that shards tensors of an uncaptured step."""
        raise CaptureError(
            f"{self.name} runs uncaptured, so Piper does not know its tensors and cannot shard them. Remove "
            "shard_weights and shard_sequences (or tp, cp), or change the step so that Piper captures it "
            "[PIPER-C019]"
        )

    def recomputing(self, recomputation: Recomputation) -> EagerStep:
        """Raise the `CaptureError` for a program that recomputes values of an uncaptured step."""
        raise CaptureError(
            f"{self.name} runs uncaptured, so Piper does not know which values it saves and cannot "
            "recompute them. Remove recompute, or change the step so that Piper captures it "
            "[PIPER-C019]"
        )

    def chunking_losses(self, chunk: int) -> EagerStep:
        """Raise the `CaptureError` for a program that computes the losses of an uncaptured step in chunks."""
        raise CaptureError(
            f"{self.name} runs uncaptured, so Piper does not know its losses and cannot compute them in chunks. "
            "Remove chunk_loss and call piper.linear_cross_entropy, or change the step so that Piper "
            "captures it [PIPER-C019]"
        )

    @property
    def said(self) -> TraceText:
        """The step as text, which is equal on all processes that run the same step."""
        lines = (
            f"{self.name} runs uncaptured",
            *(f"gradient of {name}: {self.params[name].spec}" for name in self.trained),
        )
        return TraceText(lines, ("",) * len(lines), ((),) * len(lines))

    @property
    def text(self) -> str:
        return "\n".join(self.said.lines)

    def at(self, size: int, degrees: tuple[int, ...] = ()) -> StepCode:
        """Return the step's code, which is one region.

        Args:
            size: number of batches that the replicas run at once, one batch each. It is only recorded in the
                code.
            degrees: has no effect.
        """
        if size not in self._code:
            self._code[size] = self._code_for(size)
        return self._code[size]

    def batch_specs_at(self, size: int) -> tuple[TensorSpec, ...]:
        """Return an empty tuple, because the code gets no tensors of the batch."""
        return ()

    def _code_for(self, size: int) -> StepCode:
        """Make the code that `at` returns."""
        specs = tuple(self.params[name].spec for name in self.trained)
        reads = tuple(self.params) if self._reads is None else tuple(self._reads)
        forward = Interface((), (Output(Kind.SAVED, ("B",)),), reads, tuple(self.buffers))
        gradients = (Output(Kind.GRAD, self.trained),) if self.trained else ()
        backward = Interface(((0, "F", 0),), gradients, seeds=(0,))
        empty = torch.fx.Graph()
        code: Mapping[PassKey, Code] = {
            (0, "F"): Code(lambda: (_nothing, empty), ((),)),
            (0, "B"): Code(lambda: (self._backward, empty), (specs,) if gradients else ()),
        }
        source = f"{type(self.module).__name__}.{self.name}, which runs uncaptured"
        return StepCode(
            size,
            (Region(0, {}, source),),
            {(0, "F"): forward, (0, "B"): backward},
            code,
            (),
            (),
            terms=(Term(Weighing.SAMPLES, "batches"),),
            undivided=Undivided(self.size, f"it belongs to {source}"),
        )

    def shaped(self, batch_spec: object) -> EagerStep:
        """Return this step itself, because it is the same for all batches."""
        return self

    def _backward(self, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the backward pass, set `found`, and return the weighted gradients of all trained parameters. A
        parameter without a gradient gets -0.0 in each element; see the module's docstring.

        Args:
            given: one tensor: the weight of this replica's loss.
        """
        (weight,) = given
        made = self.backward()
        self.found = tuple(x is not None for x in made)
        specs = (self.params[name].spec for name in self.trained)
        return tuple(
            torch.full(spec.shape, -0.0, dtype=spec.dtype, device=self._device)
            if x is None
            else _weighed(x, weight)
            for spec, x in zip(specs, made, strict=True)
        )


def _weighed(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a gradient, dense and times the weight. Its first element is never -0.0. If `grad` is dense, the
    function changes it in place and returns it."""
    grad = (grad if grad.layout is torch.strided else grad.to_dense()).mul_(weight)
    grad[_FIRST[: grad.dim()]].add_(0.0)  # turns -0.0 into 0.0
    return grad


_FIRST = (slice(1),) * 64  # its first n entries select the first element of a tensor with n dimensions


def is_of_none(total: torch.Tensor) -> torch.Tensor:
    """Return, as a tensor of one bool, whether no replica has used a parameter.

    Args:
        total: the sum of the parameter's gradients over replicas. Its first element is -0.0 only if no
            replica has used the parameter.
    """
    first = torch.view_as_real(total) if total.is_complex() else total
    first = first[_FIRST[: first.dim()]]
    return (first.signbit() & (first == 0)).all()


class RegatherStep(EagerStep):
    """A forward-only step that gathers parameters after an optimizer has updated their shards.

    Its region reads whole parameters, so the directives of a program gather them.

    Args:
        module, replicas, device: see `EagerStep`.
        names: the canonical names of the parameters.
    """

    name = "optimizer_step"

    def __init__(self, module: nn.Module, replicas: int, names: Sequence[str], device: torch.device) -> None:
        super().__init__(module, replicas, (), device, names)

    def at(self, size: int, degrees: tuple[int, ...] = ()) -> StepCode:
        """Return code that computes nothing. Its only pass, a forward pass, reads the parameters."""
        key, code = (0, "F"), super().at(size, degrees)
        reads = dataclasses.replace(code.interfaces[key], outputs=(), buffers=())
        empty = torch.fx.Graph()
        return dataclasses.replace(
            code,
            interfaces={key: reads},
            code={key: Code(lambda: (_nothing, empty), ())},
            terms=(),
            rebuild=ResultBuilder(self.batch_spec, self.batch_spec, ()),
        )


def _nothing(given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    given.clear()
    return ()
