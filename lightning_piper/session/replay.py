"""Replays the step's `self.log` calls with the values of the batch that it just ran on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import LOSS
from lightning_piper.ir.values import Kind
from lightning_piper.ops.metrics import first_log, metric_names

# The values that a plan reports are the same in every process; reducing them again would only cost time.
_NOT_REPLAYED = ("sync_dist", "sync_dist_group", "enable_graph")


class Replay:
    """The logging of one compiled program: every process logs the same values under the same keys, in the order of the step.

    Attributes:
        dtype: of the loss; None for a forward-only step.
        tensors: the step logs tensors, not only numbers.
    """

    def __init__(self, compiled: Compiled) -> None:
        names = metric_names(compiled.dag.code)
        dtypes = _dtypes(compiled.dag)
        self.dtype = dtypes.get(LOSS)
        self.tensors = len(names) > first_log(compiled.dag.code)
        self._calls: list[tuple[str, int | float | Callable[[], float], torch.dtype | None, dict[str, Any]]] = []
        self._context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        for log in compiled.dag.code.logs:
            kwargs: dict[str, Any] = {k: v for k, v in log.kwargs.items() if k not in _NOT_REPLAYED}
            kwargs.setdefault("batch_size", compiled.dag.size)
            kwargs["reduce_fx"] = log.reduce
            if log.constant is None:
                # Lightning keeps metrics in float32 at least.
                dtype = torch.promote_types(dtypes[log.name], torch.float32)
                self._calls.append((log.name, names.index(log.name, first_log(compiled.dag.code)), dtype, kwargs))
            else:
                self._calls.append((log.name, log.constant, None, kwargs))
                self._context = compiled.step.context

    def __call__(self, module: nn.Module, metrics: torch.Tensor) -> None:
        """Call the module's `log`."""
        log: Any = module.log
        with self._context():  # numbers become tensors of the precision's default dtype
            for name, value, dtype, kwargs in self._calls:
                known = value() if callable(value) else value
                log(name, known if dtype is None else metrics[int(known)].to(dtype), **kwargs)


def _dtypes(dag: TrainingDAG) -> dict[str, torch.dtype]:
    """What the step computes the loss and its logged tensors in."""
    found = {}
    for key, interface in dag.code.interfaces.items():
        for output, specs in zip(interface.outputs, dag.code.code[key].outputs, strict=True):
            if output.kind == Kind.LOSS:
                found[LOSS] = specs[0].dtype
            elif output.kind == Kind.LOG:
                found.setdefault(output.names[0], specs[0].dtype)
    return found
