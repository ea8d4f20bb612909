"""Decide by a trial whether an operation keeps samples apart: if random values replace one sample, the results
for other samples must keep all bits.

Rules decide this for most operations (`placements.rules`). Any other operation runs here on random values, on
the CPU and without the batch, once for each combination of arguments and shapes. Large shapes are made small
first.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from lightning_piper.accelerators import seeded
from lightning_piper.capture.joint.operations import CONSTANTS, SAME
from lightning_piper.ir.values import Placement, Sharded
from lightning_piper.placements.rule import P, R, made_by, tensors_of

aten = torch.ops.aten
LARGE = 1 << 16  # number of elements above which shapes are made small
FEW = 4  # number of samples in shapes that were made small
_RANDOM = torch.Tag.nondeterministic_seeded
Constants = dict[Node, torch.Tensor | None]  # node -> its value; None if `constant` does not compute it
# an operation with its arguments and shapes -> the result of `try_samples`
_tried: dict[Any, tuple[Placement | None, ...] | None] = {}


def try_samples(
    node: Node, held: Sequence[Placement], size: int, constants: Constants
) -> tuple[Placement | None, ...] | None:
    """Return how the results of an operation depend on the samples.

    Args:
        held: the placement of each tensor input along the samples: `S` or `R`.
        size: number of samples.
        constants: a cache of constants of the graph. The trial adds to it.

    Returns:
        For each result: `S` (rows of samples), `P` (a sum over samples), `R` (independent of the samples), or
            None if the result mixes samples. If the operation cannot run here, None instead of a tuple.
    """
    inputs = tensors_of(node)
    values = [_replacement(x, constants) if p == R else None for x, p in zip(inputs, held, strict=True)]
    fixed = tuple(None if x is None else str(x.tolist()) for x in values)
    index_of = {x: i for i, x in enumerate(inputs)}
    shapes = tuple((tuple(x.meta["val"].shape), x.meta["val"].dtype) for x in inputs)
    key = (
        str(node.target),
        str(map_arg((node.args, node.kwargs), lambda x: index_of.get(x, -1))),
        shapes,
        tuple(held),
        size,
        fixed,
    )
    if key not in _tried:
        try:
            with torch.no_grad():
                _tried[key] = _run(node, inputs, values, held, size)
        except Exception:  # the operation does not accept random values, or is not available on the CPU
            _tried[key] = None
    return _tried[key]


def constant(node: Node, known: Constants) -> torch.Tensor | None:
    """Return the value of a node that is computed from numbers alone, such as `torch.arange(n)`.

    Return None if the node is computed from other values, has more than `LARGE` elements, or cannot be
    computed.

    Args:
        known: a cache of the values of one graph. The function adds to it.
    """
    if node not in known:
        known[node] = _computed(node, known)
    return known[node]


def _computed(node: Node, known: Constants) -> torch.Tensor | None:
    """Do the work of `constant` for a node that is not in the cache."""
    value = node.meta.get("val")
    if (
        node.op != "call_function"
        or not isinstance(value, torch.Tensor)
        or value.numel() > LARGE
        or is_random(node)
    ):
        return None
    given = {x: constant(x, known) for x in node.all_input_nodes}
    if any(x is None for x in given.values()):
        return None
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: given[x])
        target: Any = node.target
        return target(*args, **_on_cpu(kwargs))  # type: ignore[no-any-return]
    except Exception:
        return None


def _replacement(node: Node, constants: Constants) -> torch.Tensor | None:
    """Return the value of an input in a trial: ones if all elements are equal, or the value of a constant.
    Return None if the trial draws the input."""
    value = node.meta["val"]
    if value.numel() <= LARGE and is_uniform(node):
        return torch.ones(value.shape, dtype=value.dtype)
    return constant(node, constants)


def is_uniform(node: Any) -> bool:
    """Return whether all elements of the value are certainly equal."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        value, target = node.meta.get("val"), node.target
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            continue
        if target in CONSTANTS or target in (aten.full.default, aten.ones.default, aten.zeros.default):
            continue
        follows = target is aten.expand.default or target in SAME - {operator.getitem} or is_pointwise(node)
        if not (follows and node.all_input_nodes):
            return False
        waiting += node.all_input_nodes
    return True


def is_pointwise(node: Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.pointwise in node.target.tags
        and not is_random(node)
    )


def is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and _RANDOM in node.target.tags


def _run(
    node: Node,
    inputs: Sequence[Node],
    values: Sequence[torch.Tensor | None],
    held: Sequence[Placement],
    size: int,
) -> tuple[Placement | None, ...]:
    """Run an operation several times. Each time, other samples are drawn again or swapped. Return how each
    result depends on the samples.

    Args:
        values: for each of `inputs`, its known value, or None for random values.
        held, size: see `try_samples`.
    """
    generator = torch.Generator().manual_seed(0)
    shrink = _SmallerSizes(size) if sum(x.meta["val"].numel() for x in inputs) > LARGE else None
    count = size if shrink is None else shrink.samples
    shapes = [x.meta["val"].shape if shrink is None else shrink.shape(x.meta["val"].shape) for x in inputs]
    drawn = [
        _drawn(shape, x.meta["val"].dtype, generator) if known is None or shrink is not None else known
        for x, shape, known in zip(inputs, shapes, values, strict=True)
    ]
    other = [_another(x, generator) for x in drawn]

    # The results if these samples are drawn again.
    def replaced(*samples: int) -> list[Any]:
        return results(
            _replaced(x, y, p, samples, count) if isinstance(p, Sharded) else x
            for x, y, p in zip(drawn, other, held, strict=True)
        )

    def results(given: Iterable[torch.Tensor]) -> list[Any]:
        """Run the operation on these inputs, and return its results."""
        remaining = iter(given)
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: next(remaining).clone())
        if shrink is not None:
            args = map_aggregate(args, shrink.argument)
        target: Any = node.target
        with seeded(0, torch.device("cpu")):  # seeding all devices would change the draws of a GPU
            made = target(*args, **_on_cpu(kwargs))
        return list(made) if isinstance(made, list | tuple) else [made]

    first, last = 0, count - 1
    swapped = results(
        _swapped(x, p, first, last, count) if isinstance(p, Sharded) else x
        for x, p in zip(drawn, held, strict=True)
    )
    found = zip(
        replaced(),
        replaced(first),
        replaced(last),
        replaced(first, last),
        swapped,
        made_by(node),
        strict=True,
    )
    rows = [p for p in held if isinstance(p, Sharded)]
    return tuple(
        _of(list(made), turned, (first, last), rows, count) if isinstance(was, torch.Tensor) else R
        for *made, turned, was in found
    )


def _of(
    made: list[torch.Tensor],
    swapped: torch.Tensor,
    samples: tuple[int, int],
    rows: Sequence[Sharded],
    count: int,
) -> Placement | None:
    """Return how one result depends on the samples.

    Args:
        made: four versions of the result: the original, with one sample drawn again, with another sample
            drawn again, and with both samples drawn again.
        swapped: the result with the two samples swapped. A sum over samples does not change.
        samples: the indices of the two samples.
        rows: the shards of the inputs along the samples.
        count: number of samples.

    Returns:
        See `try_samples`.
    """
    moved = [(x != made[0]) & ~((x != x) & (made[0] != made[0])) for x in made[1:]]
    for shard in _candidates(made[0], rows, count):
        if all(not _outside(mask, shard, i, count).any() for mask, i in zip(moved, samples, strict=False)):
            return shard
    if not any(mask.any() for mask in moved):
        return R
    before, one, two, both = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in made)
    scale = max(float((x - before).abs().max()) for x in (one, two))
    eps = torch.finfo(made[0].dtype).eps if made[0].is_floating_point() or made[0].is_complex() else 0.0
    rounding = 64 * eps * max(float(x.abs().max()) for x in (before, one, two, both))
    adds = all(
        float(x.abs().max()) <= max(rounding, 1e-3 * scale)
        for x in (both - one - two + before, swapped.to(before.dtype) - before)
    )
    return P if adds and scale > rounding else None


def _candidates(x: torch.Tensor, rows: Sequence[Sharded], count: int) -> Iterator[Sharded]:
    """Iterate over the dimensions of a result `x` that may be the sample dimension. First come the sample
    dimensions of the inputs (`rows`)."""
    like = [shard for shard in rows if shard.dim < x.ndim]
    more = [
        Sharded(d, blocks)
        for d in range(x.ndim)
        for blocks in dict.fromkeys((1, *(shard.blocks for shard in rows)))
    ]
    for shard in dict.fromkeys([*like, *more]):
        if x.shape[shard.dim] > 1 and x.shape[shard.dim] % (count * shard.blocks) == 0:
            yield shard


def _indices(shard: Sharded, length: int, sample: int, count: int) -> torch.Tensor:
    """Return the indices of a sample along the sharded dimension."""
    return torch.arange(length).unflatten(0, (shard.blocks, count, -1))[:, sample].flatten()  # type: ignore[no-any-return]


def _outside(mask: torch.Tensor, shard: Sharded, sample: int, count: int) -> torch.Tensor:
    """Return a copy of the mask that is False for the elements of one sample."""
    return mask.index_fill(shard.dim, _indices(shard, mask.shape[shard.dim], sample, count), False)


def _replaced(
    x: torch.Tensor, other: torch.Tensor, shard: Sharded, samples: Collection[int], count: int
) -> torch.Tensor:
    """Return a copy of `x` that has the elements of these samples from `other`."""
    for i in samples:
        indices = _indices(shard, x.shape[shard.dim], i, count)
        x = x.index_copy(shard.dim, indices, other.index_select(shard.dim, indices))
    return x


def _swapped(x: torch.Tensor, shard: Sharded, one: int, two: int, count: int) -> torch.Tensor:
    a, b = (_indices(shard, x.shape[shard.dim], i, count) for i in (one, two))
    return x.index_copy(shard.dim, torch.cat([a, b]), x.index_select(shard.dim, torch.cat([b, a])))


def _drawn(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return random values. Integers may be indices, so they are 0 or 1, like bools. Other values are
    positive, because some operations accept only positive values."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(tuple(shape), generator=generator, dtype=torch.float64).add_(0.1).to(dtype)
    return torch.randint(2, tuple(shape), generator=generator).to(dtype)


def _another(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return values that differ from `x`: drawn again, or for integers and bools, 0 and 1 exchanged."""
    if x.is_floating_point() or x.is_complex():
        return _drawn(x.shape, x.dtype, generator)
    return x.logical_not().to(x.dtype)


def _on_cpu(kwargs: Any) -> dict[str, Any]:
    """Return keyword arguments with the CPU as device, and without `pin_memory`."""
    return {
        k: torch.device("cpu") if k == "device" and v is not None else v
        for k, v in kwargs.items()
        if k != "pin_memory"
    }


class _SmallerSizes:
    """A map from sizes to smaller sizes. Equal sizes stay equal. A multiple of the number of samples becomes
    a multiple of `samples`.

    Args:
        size: the number of samples.

    Attributes:
        samples: the smaller number of samples.
    """

    def __init__(self, size: int) -> None:
        self._size, self.samples = size, min(size, FEW)
        self._sizes: dict[int, int] = {}

    def size(self, n: int) -> int:
        if n not in self._sizes:
            follows = n % self._size == 0 and n > 0
            self._sizes[n] = self.samples * min(n // self._size, 3) if follows else min(n, 5)
        return self._sizes[n]

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.size(int(n)) for n in shape)

    def argument(self, value: Any) -> Any:
        """Return the smaller size for an argument that is one of the mapped sizes. Return any other argument
        unchanged."""
        known = type(value) is int and value > 5 and value in self._sizes
        return self._sizes[value] if known else value
