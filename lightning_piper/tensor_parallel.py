"""`tensor_parallel`: find the directives that shard a module's weights over an axis of devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import CapturedStep, capture
from lightning_piper.capture.tensor_sharding.shardable_params import find_params
from lightning_piper.common.garbage_collection import uncollected
from lightning_piper.common.limits import integer, shown
from lightning_piper.common.units import counted
from lightning_piper.directives import Directive, Place, ShardWeights
from lightning_piper.errors import PiperError
from lightning_piper.ir.values import Sharded

AXIS = "tp"
OTHERS = (2, 3, 4, 8)  # degrees that an error may suggest


def tensor_parallel(module: nn.Module, batch: Any, degree: int, *, sequence: bool = False) -> list[Directive]:
    """Return a program in which `degree` devices shard a module's weights.

    The program shards the columns of one weight matrix and the rows of the next weight matrix, if all
    operations between their two products can work on shards. Examples are the heads of an attention, and a
    gated product. It also shards the rows of embedding tables and the columns of output heads, if no operation
    needs their whole result. All other weights stay whole.

    Args:
        module: A LightningModule. Its parameters may be on the meta device.
        batch: The batch of one step.
        degree: Number of devices.
        sequence: Also shard the values between regions along dimension 1, so that norms and residuals work on
            parts.

    Returns:
        A `Place` of everything on devices 0 to `degree` - 1; and a `ShardWeights` whose `params` name the weights,
            with `*` for the number of a layer. You can change these directives, and combine them with other
            directives.

    Raises:
        CaptureError: The step cannot be captured.
        PiperError: No weight of the module can be sharded.
    """
    if (number := integer(degree)) is None or number < 2:
        raise PiperError(
            f"tensor_parallel(degree={shown(degree)}) is not usable. Give a number of devices >= 2 [PIPER-D024]"
        )
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    step = capture(module, batch, device.type if device.type != "meta" else "cpu")
    values = {"*": 1} if sequence else {}
    devices = list(range(number))
    return [
        Place(filter={}, devices=devices, axes=(AXIS,)),
        ShardWeights(
            filter={},
            devices=devices,
            params=weights_to_shard(step, number, values),
            values=values or None,
        ),
    ]


def weights_to_shard(
    step: CapturedStep, number: int, values: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int | tuple[int, int]]:
    """Return the `params` of a `ShardWeights` that shards the weights of a step over a number of devices.

    Args:
        values: The `values` of the directive.

    Raises:
        CaptureError: The step cannot be captured.
        PiperError: No weight of the module can be sharded.
    """
    step.at(step.size)  # generates the code, which says which parameters the step reads
    dims = {name: Sharded(dim) for name, dim in values.items()}
    with uncollected():
        params = find_params(step.joint_graph, AXIS, number, dims)
    if not params:
        others = (n for n in OTHERS if n != number and find_params(step.joint_graph, AXIS, n, dims))
        _, names = step.joint_graph()
        read = {name for x, name in names.params.items() if x.users}
        shapes = {name: info.spec.shape for name, info in step.params.items() if name in read}
        raise _nothing_found(type(step.module).__name__, number, shapes, next(others, None))
    return _patterns(params, step.params)


def _nothing_found(
    name: str, degree: int, shapes: Mapping[str, Sequence[int]], other: int | None
) -> PiperError:
    """Return the error for a module without weights to shard over `degree` devices.

    Args:
        name: The module's class.
        degree: The number of devices.
        shapes: The shape of each parameter that the step reads.
        other: A number of devices over which weights can be sharded; None if none is known.
    """
    why = "an operation would need each weight, or its result, whole"
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    if not matrices:
        why = "its step does not use a matrix"
    elif not any(size % degree == 0 for shape in matrices for size in shape):
        why = f"{degree} does not divide any dimension of a weight matrix"
    weight = next(
        (
            f"{{{param!r}: {dim}}}"
            for param, shape in shapes.items()
            for dim, size in enumerate(shape)
            if len(shape) == 2 and size % degree == 0
        ),
        None,
    )
    advice = "Use replicas instead (dp)"
    if other is not None:
        advice = f"Give another number of devices, such as {other}"
    elif weight is not None:
        devices = "[0, 1]" if degree == 2 else f"list(range({degree}))"
        advice = (
            "You can still shard weights by the directives "
            f"Place(devices={devices}, axes=[{AXIS!r}]) and ShardWeights(params={weight})"
        )
    return PiperError(
        f"tensor parallelism: Piper found no weight of {name} to shard over {counted(degree, 'device')}, because "
        f"{why}. {advice} [PIPER-D024]"
    )


def _patterns(parts: Mapping[str, Sharded], names: Mapping[str, Any]) -> dict[str, int | tuple[int, int]]:
    """Return name -> dimension, or (dimension, number of blocks), to shard. If all layers are sharded
    equally, one entry with `*` instead of the layer's number stands for all layers.

    Args:
        parts: Name of a parameter to shard -> its shards.
        names: All parameters, by name.
    """
    found = {name: part.dim if part.blocks == 1 else (part.dim, part.blocks) for name, part in parts.items()}
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    made: dict[str, int | tuple[int, int]] = {}
    for pattern, members in alike.items():
        dims = {found.get(name) for name in members}
        if len(dims) == 1 and (dim := dims.pop()) is not None:
            made[pattern] = dim
        elif dims:
            made |= {name: found[name] for name in members if name in found}
    return made
