"""A step without a backward pass, as a module that can be traced. Its outputs are the tensors that the user's
method returns, keeps in attributes, and logs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.metrics.metric_objects import MetricRecorder
from lightning_piper.capture.proxies.batch import BatchSpec, flatten
from lightning_piper.capture.python_state.side_effects import EffectLog, ResultBuilder, take_attributes
from lightning_piper.capture.python_state.state_protection import Attribute
from lightning_piper.capture.python_state.state_reads import StateReads
from lightning_piper.capture.tracing.step_trace import TracedStep
from lightning_piper.ir.regions import Output
from lightning_piper.ir.values import Kind


class ForwardStep(TracedStep):
    """A `validation_step`, `test_step` or `predict_step` as a function from tensors to returned, kept and
    logged tensors.

    Args:
        module, batch_spec, context, degrees, reads, blocks: see `TracedStep`.
        name: the name of the method.
        dataloader_idx: the method's `dataloader_idx`, if there are several loaders.
    """

    gradients = torch.no_grad

    def __init__(
        self,
        module: nn.Module,
        batch_spec: BatchSpec,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        degrees: tuple[int, ...],
        name: str,
        dataloader_idx: int | None,
        reads: StateReads | None = None,
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__(module, batch_spec, context, degrees, reads, blocks)
        self.name, self._dataloader_idx = name, dataloader_idx
        self.metrics = MetricRecorder(module, name)
        self._returned = self._kept = BatchSpec(None, (), ())
        self._keeping = EffectLog()
        if reads is not None:
            reads.keeping = self._keeping

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return clones of the tensors that the step returns and keeps, then the logged tensors and the
        arguments of metric objects."""
        self._keeping.clear()
        returned = self._call(leaves, self._dataloader_idx)
        results, self._returned = flatten(returned, f"result of {self.name}")
        kept, self._kept = flatten(self._keeping.found, f"state that {self.name} keeps")
        self.metrics.use([*self._returned.computed, *self._kept.computed])
        # Clone the results: the user may change them, and a result may be a part of the batch, a buffer, or
        # returned twice.
        return (*(x.detach().clone() for x in [*results, *kept]), *self._logged, *self.metrics.tensors)

    @property
    def plain(self) -> tuple[Output, ...]:
        results = (
            Output(Kind.RESULT, (str(i),)) for i in range(len(self._returned.specs) + len(self._kept.specs))
        )
        return (*results, *self._plain_logs, *self.metrics.outputs)

    @property
    def rebuild(self) -> ResultBuilder:
        return ResultBuilder(self._returned, self._kept, self._keeping.places)

    def _take_kept(self, before: list[Attribute]) -> None:
        if self.reads is not None:
            take_attributes(
                self.module,
                before,
                self.reads.was_read,
                lambda place, x: self._keeping.note(place, (), "attribute", x),
            )
