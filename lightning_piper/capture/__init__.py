"""Trace `training_step` into a joint forward and backward graph, and cut the graph into passes of regions."""

from lightning_piper.capture._torch import clipping_replaced, dict_version, has_gradient_hooks, storage_id
from lightning_piper.capture.batch import BatchSpec, flatten
from lightning_piper.capture.capturing import capture
from lightning_piper.capture.reads import History
from lightning_piper.capture.rest_step import PartlyCaptured
from lightning_piper.capture.step import CapturedStep
from lightning_piper.capture.text import difference
from lightning_piper.capture.undoing import as_before

__all__ = [
    "BatchSpec", "CapturedStep", "History", "PartlyCaptured", "as_before", "capture", "clipping_replaced", "dict_version",
    "difference", "flatten", "has_gradient_hooks", "storage_id",
]  # fmt: skip
