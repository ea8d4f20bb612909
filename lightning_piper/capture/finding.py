"""Which weights members of an axis may have parts of, found by placing the values of a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch.fx import Graph, Node

from lightning_piper.capture.passes import Names
from lightning_piper.capture.placed import Placing
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Division
from lightning_piper.ir.values import Replicate, Shard
from lightning_piper.placements.changing import CHANGE, PLACEMENT, placement_of
from lightning_piper.placements.rule import shape_of


def find_params(make: Callable[[], tuple[Graph, Names]], axis: str, degree: int, values: Mapping[str, int]) -> dict[str, int]:
    """Weights that members of an axis may have parts of, with their dimensions: columns of the first product, rows of the next one.

    A weight is left whole where what comes of it, or itself, is needed whole before another product takes it.

    Args:
        make: gives a joint graph of the step, a new one each time.
    """
    left: set[str] = set()
    while True:
        graph, names = make()
        weights = {name for x, name in names.params.items() if len(shape_of(x)) == 2}
        placing = Placing(graph, Division(axis, degree, {}, values), names, weights - left)
        try:
            found = placing.run()
        except CaptureError:
            if not (more := _followed(placing, placing.refused) & (weights - left)):
                raise
            left |= more
            continue
        needed = {name for x in placing.gathered for name in _made_with(placing, x)} & found.keys()
        if not needed:
            return {name: dim for name, dim in found.items() if name in weights}
        left |= needed


def _followed(placing: Placing, params: Collection[str]) -> set[str]:
    """Parameters, and the weights that vectors among them follow."""
    found = set(params)
    for x, name in placing.names.items():
        if name in params and len(shape_of(x)) == 1:
            found.update(*(_made_with(placing, user) for user in x.users if PLACEMENT in user.meta))
    return found


def _made_with(placing: Placing, x: Node) -> set[str]:
    """The divided weights that make a value what it is, up to the last change."""
    found: set[str] = set()
    stack, seen = [x], {x}
    while stack:
        node = stack.pop()
        if node in placing.fixed:
            if isinstance(placement_of(node), Shard):
                found.add(placing.param_of(node))
            continue
        for source in node.all_input_nodes if node.target is not CHANGE else ():
            if source not in seen and source.op != "output" and source.meta.get(PLACEMENT) != Replicate():
                seen.add(source)
                stack.append(source)
    return found
