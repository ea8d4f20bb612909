"""Decide which values of a region's forward pass the region's backward pass computes again. The forward pass
does not save these values."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch.fx import Node

from lightning_piper.capture.joint.region_assignment import BORDERS
from lightning_piper.capture.joint.region_passes import RegionPass
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.graph_nodes import copied_node
from lightning_piper.errors import CaptureError
from lightning_piper.ir.filters import describe, matches
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.regions import PassKey, Region
from lightning_piper.routing import ROUTE


def recomputed_nodes(
    region: Region,
    forward: RegionPass,
    backward: RegionPass,
    shared: Collection[Node],
    wanted: Sequence[Recomputation],
) -> set[Node]:
    """Return the forward nodes that the backward pass computes again instead of reading saved values.

    The set is new. It is empty if no choice selects the region, or if the forward pass saves all values that
    the backward pass reads.

    Args:
        forward, backward: the passes of the region, with `reads` set.
        shared: nodes that every pass computes itself.
        wanted: the user's choices. If several choices select the region, only the last of them counts. If it
            has a memory budget, the function may store the saved values in its `chosen`.
    """
    said = next((each for each in reversed(wanted) if matches(each.filter, region.tags)), None)
    if said is None:
        return set()
    # The nodes that may run again. Random operations may not, because their second run would draw other
    # numbers. `BORDERS` and exchanges (`ROUTE`) may not, because they run between passes.
    own = {
        node for node in forward.nodes if not _torch.is_random(node) and node.target not in (*BORDERS, ROUTE)
    }
    waiting = [node for node in backward.reads if node in own]
    if not waiting:
        return set()
    keeps = (
        _keeps_by_name(said.keep)
        if isinstance(said.keep, tuple)
        else _keeps_by_budget(said, region, forward, backward, shared)
    )
    again: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in again or node not in own or keeps(node):
            continue
        if node.target is operator.getitem and not (
            node.all_input_nodes[0] in own or node.all_input_nodes[0] in shared
        ):
            # The node takes one of several results of an operation that must not run again, such as a
            # dropout.
            continue
        again.add(node)
        waiting += [x for x in node.all_input_nodes if x in own]
    return again


def check_names(
    passes: Mapping[PassKey, RegionPass], regions: Sequence[Region], wanted: Sequence[Recomputation]
) -> None:
    """Check that each pattern of `keep` matches an operation of a selected region. Regions without a backward
    pass do not count. A choice that selects no region is not checked.

    Raises:
        CaptureError: a pattern does not match any operation.
    """
    for said in wanted:
        selected = [
            region
            for region in regions
            if matches(said.filter, region.tags) and passes[region.index, "B"].nodes
        ]
        nodes = [
            node
            for region in selected
            for node in passes[region.index, "F"].nodes
            if node.target not in BORDERS
        ]
        names = {_name(node) for node in nodes if node.op == "call_function"}
        for pattern in said.keep if isinstance(said.keep, tuple) and selected else ():
            if not fnmatch.filter(names, pattern):
                fix = f"Give a pattern for one of their operations: {', '.join(sorted(names))}"
                raise CaptureError(
                    f"recompute of {describe(said.filter)}: the pattern {pattern!r} in keep matches no "
                    f"operation of the selected regions. {fix if names else 'Leave keep out'} [PIPER-C020]"
                )


def _keeps_by_name(patterns: Sequence[str]) -> Callable[[Node], bool]:
    """Return a function that returns whether the name of a node matches one of the patterns."""
    return lambda node: any(fnmatch.fnmatchcase(_name(node), pattern) for pattern in patterns)


def _name(node: Node) -> str:
    """Return the name of an operation without namespace and overload: `mm` for `aten.mm.default`.

    A node that takes one of the results of an operation has the operation's name. A node whose target is not
    of the form `namespace.name.overload` has its name in the graph.
    """
    if node.target is operator.getitem:
        return _name(node.all_input_nodes[0])
    return str(node.target).split(".")[1] if str(node.target).count(".") == 2 else node.name


def _keeps_by_budget(
    said: Recomputation, region: Region, forward: RegionPass, backward: RegionPass, shared: Collection[Node]
) -> Callable[[Node], bool]:
    """Return a function that returns whether the forward pass saves a node.

    The first call of `_keeps_by_budget` for a region chooses the saved nodes, and stores their names in
    `said.chosen`. Later calls with other batch sizes read these names, so that all sizes save the same nodes.
    """
    if region.index not in said.chosen:
        assert isinstance(said.keep, float)
        said.chosen[region.index] = frozenset(
            node.name for node in _chosen(forward, backward, shared, said.keep)
        )
    names = said.chosen[region.index]
    return lambda node: node.name in names


def _chosen(forward: RegionPass, backward: RegionPass, shared: Collection[Node], budget: float) -> list[Node]:
    """Return the nodes of the joint graph whose values torch's partitioner saves. The partitioner gets a
    separate graph of the region's forward and backward pass.

    Args:
        shared: nodes that every pass computes itself.
        budget: see `Recomputation.keep`.
    """
    graph = torch.fx.Graph()
    env: dict[Node, Node] = {}
    inside = {*forward.nodes, *backward.nodes}

    def emit(node: Node) -> Node:
        """Copy a node into `graph`, after the nodes that it reads, and return the copy. A value from outside
        of the two passes becomes a placeholder, whose name tells the partitioner who computes it: `tangents_`
        for a backward value, `primals_` for any other value."""
        if node not in env:
            if node in inside or node in shared:
                for x in node.all_input_nodes:
                    emit(x)
                env[node] = copied_node(graph, node, env)
            else:
                env[node] = graph.placeholder(
                    ("tangents_" if _torch.is_backward(node) else "primals_") + node.name
                )
                env[node].meta = dict(node.meta)
        return env[node]

    reads = [
        *forward.reads,
        *(node for node in backward.reads if node not in inside and node not in forward.reads),
    ]
    for node in sorted(reads, key=_torch.is_backward):
        emit(node)
    results = [[emit(node) for _, nodes in p.outputs for node in nodes] for p in (forward, backward)]
    graph.output((*results[0], *results[1]))
    back = {copied: node for node, copied in env.items()}
    constants = forward.nodes[0].graph.owning_module
    return [back[node] for node in _torch.saved_values(graph, constants, len(results[0]), budget)]
