"""Lists with a dict of tensors for each sample (boxes, scores and labels of each image), as metrics of detection take them.

How many tensors these are follows the number of samples, and a microbatch would have fewer. Where all entries are of one form, they
are stacked: a few tensors with the samples in their first dimension, which are joined over microbatches as others are. The list is
made of them when the step has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from lightning_piper.capture.batch import BatchSpec, flatten
from lightning_piper.capture.selected import PerSample


def stacked(argument: Any, samples: int) -> Any:
    """A list with one entry a sample, as it goes into a structure; all else as it is."""
    if type(argument) not in (list, tuple) or len(argument) != samples or not all(isinstance(x, Mapping) for x in argument):
        return argument
    found = [flatten(entry, "argument") for entry in argument]
    first = found[0][1]
    if any(spec.key != first.key or spec.computed or spec.carried for _, spec in found) or not first.specs:
        return argument
    columns = zip(*(leaves for leaves, _ in found), strict=True)
    return PerSample(partial(_listed, first, type(argument)), [torch.stack(column) for column in columns])


def _listed(entry: BatchSpec, kind: type, *tensors: torch.Tensor) -> Any:
    return kind(entry.rebuild(leaves) for leaves in zip(*tensors, strict=True))
