"""Find the weights that can be sharded over an axis, by trying placements on a joint graph."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from lightning_piper.capture.joint.region_passes import PlaceholderNames
from lightning_piper.capture.tensor_sharding.propagation import PRODUCTS, Propagation, propagate
from lightning_piper.common.operation_families import RESHAPES
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Division
from lightning_piper.ir.values import Partial, Replicated, Sharded
from lightning_piper.placements.local_graph import SPLIT
from lightning_piper.placements.placement_changes import CHANGE
from lightning_piper.placements.rule import made_by, shape_of
from lightning_piper.placements.views import regrouped

aten = torch.ops.aten


def find_params(
    make: Callable[[], tuple[Graph, PlaceholderNames]], axis: str, degree: int, values: Mapping[str, Sharded]
) -> dict[str, Sharded]:
    """Return canonical name -> shard for the weight matrices that can be sharded over an axis: along columns
    in the first of two products, along rows in the second. The result is empty if there are no such weights.

    A weight is not sharded if sharding it would need a gather: an operation reads the weight or the result of
    its product replicated. Exception: the weight may consist of several weights next to each other (queries,
    keys and values). Then each of them is sharded: `Sharded.blocks` is their number.

    A LoRA adapter consists of a narrow product and a wide one, and a third product is added to their result. If the
    third weight is sharded along its columns, only the wide weight of the adapter is sharded, also along its columns.
    Then the addition needs no communication.

    Each round tries placements on a new graph. The next round leaves out the weights that failed.

    Args:
        make: Returns a joint graph of the step. Each call must return a new one, because a trial changes it.
        axis: The name of the axis.
        degree: The number of its ranks.
        values: The values that the user shards; see `Division.values`.

    Raises:
        CaptureError: An operation cannot work on the shards of its inputs, and none of these shards comes from
            a weight that the function may leave out.
    """
    search = _Search(make, axis, degree, values)
    runs: dict[str, int] = {}
    found = search.settled(runs)
    while narrow := _narrow_products(found, found.scattered):
        other = search.settled(tried := runs | narrow)
        if _elements(other, narrow) < _elements(found, narrow):
            break
        found, runs = other, tried
    return {name: found.params[name] for name in _matrices(found) if name in found.params}


@dataclass(frozen=True)
class _Search:
    """A search for shards that need no gather. The attributes are the arguments of `find_params`."""

    make: Callable[[], tuple[Graph, PlaceholderNames]]
    axis: str
    degree: int
    values: Mapping[str, Sharded]

    def settled(self, runs: dict[str, int]) -> Propagation:
        """Return placements so that no operation gathers a shard of a weight or of a product.

        Args:
            runs: Weight -> number of its equal blocks, each of which is sharded separately. 0 if the weight must not
                be sharded. Weights without an entry have one block. The search adds entries.
        """
        while True:
            graph, names = self.make()
            weights = [name for x, name in names.params.items() if len(shape_of(x)) == 2]
            seek = {name: runs.get(name, 1) for name in weights if runs.get(name, 1)}
            division = Division(self.axis, self.degree, {}, self.values)
            propagation = Propagation(graph, division, names, seek)
            try:
                propagate(graph, [propagation])
            except CaptureError:  # try again without sharding the refused weights
                if not (more := _followed(propagation, propagation.refused) & seek.keys()):
                    raise
                runs |= dict.fromkeys(more, 0)
                continue
            parts = propagation.params.keys() & seek.keys()
            # The sharded weights that are gathered, or that make a gathered value -> the number of equal blocks
            # into which the reader splits the value. 0 if there are no equal blocks.
            causes = [
                (_made_with(propagation, x) & parts, _beside(propagation, x, reader))
                for x, reader in propagation.gathered
            ]
            needed = {name: count for names_of_one, count in causes for name in names_of_one}
            if not needed:
                return propagation
            beside = {name: count for name, count in needed.items() if count > 1 and runs.get(name, 1) == 1}
            # If some weights can have several blocks, try only these first: the other gathers may then disappear.
            # The magnitudes of DoRA multiply the result of the base weight and of the adapter.
            narrow = {} if beside else _narrow_products(propagation, _factors(propagation))
            runs |= (
                beside or narrow or dict.fromkeys(_certain([names_of_one for names_of_one, _ in causes]), 0)
            )


def _matrices(propagation: Propagation) -> dict[str, Node]:
    """Return the weight matrices of the graph by name."""
    return {name: x for x, name in propagation.names.items() if len(shape_of(x)) == 2}


def _elements(propagation: Propagation, without: Collection[str]) -> int:
    """Return the number of elements of all sharded weight matrices, except these."""
    found = propagation.params
    return sum(
        math.prod(shape_of(x))
        for name, x in _matrices(propagation).items()
        if name in found and name not in without
    )


def _factors(propagation: Propagation) -> list[tuple[Node, Sharded]]:
    """Return the partial sums whose other factor is gathered for their product, each with the shard of the factor."""
    return [
        (other, held)
        for x, reader in propagation.gathered
        for other in reader.all_input_nodes
        if reader.target is aten.mul.Tensor and other is not x and propagation.held[other] == Partial()
        if isinstance(held := propagation.held[x], Sharded)
    ]


def _narrow_products(propagation: Propagation, partial: Sequence[tuple[Node, Sharded]]) -> dict[str, int]:
    """Return the runs that let an operation read the result of two products without communication.

    The first product is narrow, and both are sharded, so the result is a partial sum. The operation reads it as a
    shard, because its other input is a shard. If the first weight is whole (0 runs) and the second weight has the
    runs of the other input, the result is such a shard at once. Narrow means that the first result has at most as
    many columns as a shard of the second result. The dict is empty if there are no such products.

    Args:
        propagation: The placements.
        partial: Partial sums, each with the shard of the operation's other input.
    """
    runs: dict[str, int] = {}
    matrices = _matrices(propagation)
    for x, wanted in partial:
        product = _product_of(propagation, x)
        if product is None:
            continue
        left, right = product.all_input_nodes[-2:]
        narrow = shape_of(left)[-1] * propagation.degree <= shape_of(product)[-1]
        if narrow and isinstance(propagation.held[left], Sharded) and right in propagation.fixed:
            first = _made_with(propagation, left) & matrices.keys()
            runs |= dict.fromkeys(first, 0) | {propagation.param_of(right): wanted.blocks}
    return runs


def _product_of(propagation: Propagation, x: Node) -> Node | None:
    """Return the product whose partial sum the value `x` is, or None if `x` comes from several values or from another
    operation."""
    while x.target not in PRODUCTS:
        sources = [y for y in x.all_input_nodes if propagation.held[y] == Partial()]
        if len(sources) != 1:
            return None
        (x,) = sources
    return x


def _certain(causes: Sequence[Collection[str]]) -> set[str]:
    """Return the weights that must not be sharded, from the weights that determine each gathered value.

    If several weights determine a value, the last of them may be the only cause: the first product of a layer
    is sharded although an earlier layer should have ended with a sum. So only weights that alone determine a
    gathered value count, and the same weights of the other layers. If there are none, all weights count.
    """
    found = set[str]().union(*causes)
    sufficient = {_in_any_layer(name) for names in causes if len(names) == 1 for name in names}
    return {name for name in found if _in_any_layer(name) in sufficient} or found


def _in_any_layer(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _beside(propagation: Propagation, x: Node, reader: Node) -> int:
    """Return the number of equal blocks into which `reader` splits the sharded dimension of the value `x`, as
    `chunk` or a view do. Return 0 if it does not split this dimension into equal blocks."""
    placement = propagation.held[x]
    if not isinstance(placement, Sharded):
        return 0
    if reader.target in SPLIT:
        sizes = [made.shape[placement.dim] for made in made_by(reader) if made is not None]
        return len(sizes) if len(sizes) > 1 and len(set(sizes)) == 1 else 0
    if reader.target in RESHAPES:
        for mine, theirs in regrouped(shape_of(x), shape_of(reader)):
            if mine == (placement.dim,) and len(theirs) > 1:
                return shape_of(reader)[theirs[0]]
    return 0


def _followed(propagation: Propagation, params: Collection[str]) -> set[str]:
    """Return the names `params`, and for each vector among them (a bias) also the names of the sharded
    weights whose values it meets in an operation. The placement of a bias follows from these weights."""
    found = set(params)
    for x, name in propagation.names.items():
        if name in params and len(shape_of(x)) == 1:
            found.update(*(_made_with(propagation, user) for user in x.users if user in propagation.held))
    return found


def _made_with(propagation: Propagation, x: Node) -> set[str]:
    """Return the names of the sharded parameters that determine the placement of the value `x`: all from
    which it is computed without a change of placement or a replicated value in between."""
    found: set[str] = set()
    stack, seen = [x], {x}
    while stack:
        node = stack.pop()
        if node in propagation.fixed:
            if isinstance(propagation.held[node], Sharded):
                found.add(propagation.param_of(node))
            continue
        for source in node.all_input_nodes if node.target is not CHANGE else ():
            if source not in seen and source.op != "output" and propagation.held.get(source) != Replicated():
                seen.add(source)
                stack.append(source)
    return found
