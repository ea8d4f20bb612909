"""Stack lists with a dict of tensors for each sample, which detection metrics receive (boxes, scores,
labels).

The number of tensors in such a list is proportional to the number of samples, so a microbatch would have
fewer tensors. If all dicts have the same keys, shapes and dtypes, the trace stacks their tensors into one
tensor for each key, with the samples along the first dimension. The stacked tensors are joined over
microbatches like any other tensors. After the step has run, Piper rebuilds the list from the joined tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from lightning_piper.capture.proxies.batch import BatchSpec, flatten
from lightning_piper.capture.proxies.data_dependent_shapes import PerSampleList


def stack_dicts(argument: Any, samples: int) -> Any:
    """Stack a list with one dict for each sample into a `PerSampleList`. Return any other argument unchanged,
    and also an empty list, and a list whose dicts have different specs or contents other than tensors."""
    if (
        type(argument) not in (list, tuple)
        or not argument
        or len(argument) != samples
        or not all(isinstance(x, Mapping) for x in argument)
    ):
        return argument
    found = [flatten(entry, "argument") for entry in argument]
    first = found[0][1]
    if any(spec.key != first.key or spec.computed or spec.carried for _, spec in found) or not first.specs:
        return argument
    columns = zip(*(leaves for leaves, _ in found), strict=True)
    return PerSampleList(partial(_listed, first, type(argument)), [torch.stack(column) for column in columns])


def _listed(entry: BatchSpec, kind: type, *tensors: torch.Tensor) -> Any:
    return kind(entry.rebuild(leaves) for leaves in zip(*tensors, strict=True))
