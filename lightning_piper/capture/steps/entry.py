"""`capture`: make a captured step from a module and the spec of one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_piper.capture.proxies.batch import BatchSpec, flatten
from lightning_piper.capture.python_state.state_reads import History
from lightning_piper.capture.steps.captured_step import CapturedStep
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.tracing.forward_step import ForwardStep
from lightning_piper.capture.tracing.step_trace import TracedStep
from lightning_piper.errors import CaptureError


def capture(
    module: nn.Module,
    batch: Any,
    device: torch.device | str = "cpu",
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    name: str = "training_step",
    dataloader_idx: int | None = None,
    history: History | None = None,
    whole_norms: bool = False,
) -> CapturedStep:
    """Return the step `name` of `module`, to be captured for batches with the layout of `batch`.

    This function runs no code of the step. `CapturedStep.at` traces the step when it needs new code.

    A `training_step` is captured with its backward pass. Other steps, such as `validation_step`, are captured
    without a backward pass. Each submodule keeps its mode (train or eval).

    Args:
        module: a LightningModule, or any module with the method `name`. Traces run it without data, and do
            not change it.
        batch: nested dicts, lists, tuples, dataclasses and objects that hold tensors; or a `BatchSpec`.
        device: `torch.device` on which the captured code will run.
        context: returns a new context, which is entered around the step during the trace, e.g.
            `torch.autocast`.
        name: The name of the method to capture.
        dataloader_idx: the loader's index, which a step without a backward pass receives. None if there is
            only one loader.
        history: the findings of the step's earlier captures. With None, the step starts a new `History`.
        whole_norms: if True, all batch norms of a training step use the statistics of the whole batch, like
            `nn.SyncBatchNorm`.

    Raises:
        CaptureError: the module does not have the method, or the batch is empty or holds a value that a
            captured step does not support. `CapturedStep.at` raises the errors of the step.
        PiperError: a parameter or buffer is not dense.
    """
    _torch.warn_if_newer_torch()
    check_step(module, name)
    batch_spec = batch if isinstance(batch, BatchSpec) else flatten(batch)[1]
    if name == TracedStep.name:
        return CapturedStep(module, batch_spec, torch.device(device), context, history, whole_norms)
    return CapturedForward(module, batch_spec, torch.device(device), context, name, dataloader_idx, history)


def check_step(module: nn.Module, name: str) -> None:
    """Raise a `CaptureError` if the class of the module does not have the method `name`."""
    if getattr(type(module), name, None) is None:
        raise CaptureError(
            f"{type(module).__name__} has no {name}. Give a LightningModule that defines one [PIPER-C023]"
        )


class CapturedForward(CapturedStep):
    """A captured step without a backward pass, e.g. `validation_step`.

    Attributes:
        dataloader_idx: the index of the loader, which is an argument of the step. None if there is only one
            loader.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_spec: BatchSpec,
        device: torch.device,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        name: str,
        dataloader_idx: int | None,
        history: History | None = None,
    ) -> None:
        super().__init__(module, batch_spec, device, context, history)
        self.name, self.dataloader_idx = name, dataloader_idx

    def _step(self, degrees: tuple[int, ...]) -> TracedStep:
        about = (self.name, self.dataloader_idx, self.reads, self._blocks)
        return ForwardStep(self.module, self.batch_spec, self.context, degrees, *about)
