"""Insert placement changes into a joint graph. All readers that need the same placement share one change."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.annotate import META_KEY
from lightning_piper.capture.joint.region_assignment import tags_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.values import Partial, Placement, Replicate, Shard, is_shift
from lightning_piper.placements.local_graph import VIEWS
from lightning_piper.placements.placement_changes import CHANGE, FOLLOWS, PlacementMap
from lightning_piper.placements.rule import shape_of
from lightning_piper.placements.views import regrouping

aten = torch.ops.aten
# metadata keys that say to which place in the step a node belongs
PLACE = ("custom", "seq_nr", "stack_trace", "partitioner_tag")


class PlacementWriter:
    """A writer of placement changes along one axis into a graph.

    Args:
        held: the placements along the axis.
        said: the shards that the user declares for values of the step.
        beside: sets the placements of a new node along the other axes.
    """

    def __init__(
        self,
        graph: Graph,
        axis: str,
        degree: int,
        held: PlacementMap,
        said: Collection[Shard],
        beside: Callable[[Node], None],
    ) -> None:
        self.graph, self.axis, self.degree, self.held, self.said = graph, axis, degree, held, said
        self._beside = beside
        # key of a change -> the node with the changed value
        self._made: dict[tuple[Node, Placement, Any], Node] = {}

    def made(self, x: Node, wanted: Placement, reader: Node) -> Node | None:
        """Return an existing change of `x` whose result the reader may use. Return None if no such change
        exists."""
        return self._made.get(self._key(x, wanted, reader))

    def changed(self, x: Node, wanted: Placement, reader: Node) -> Node:
        """Return the value of `x` with another placement. Readers with the same `_key` share one change."""
        if x.target is CHANGE and x.args[1] == self.axis:  # one change replaces two
            x = x.all_input_nodes[0]
            if self.held[x] == wanted:
                return x
        if (source := self._seen_through(x, wanted)) is not None:
            return self._changed_before(x, source, wanted, reader)
        parts = [p for p in (self.held[x], wanted) if isinstance(p, Shard)]
        runs = [p.blocks for p in parts if p.blocks > 1]  # of how many runs (blocks) each shard consists
        if runs and not is_shift(self.held[x], wanted):
            # If the degree divides the number of runs, each part of the dimension consists of whole runs.
            along = len({p.dim for p in parts}) < len(parts)
            by_whole = len(runs) == 2 or (along and runs[0] % self.degree)
            return (self._changed_by_whole if by_whole else self._changed_in_runs)(x, wanted, reader)
        # A change in the region of `x` gets the metadata of `x`. Any other change gets the reader's metadata.
        here, key = has_own_region(x), self._key(x, wanted, reader)
        if key not in self._made:
            at = self._before(x, reader) if not here and _torch.is_backward(reader) else reader
            with self.graph.inserting_before(at):
                change = self.graph.call_function(CHANGE, (x, self.axis, str(self.held[x]), str(wanted)))
            about = x.meta if here else reader.meta
            change.meta = {k: v for k, v in about.items() if k in ("custom", "seq_nr", "stack_trace")}
            if here and _torch.is_backward(x):
                change.meta["partitioner_tag"] = "is_backward"
            change.meta["val"] = x.meta["val"]
            self._place(change, wanted)
            self._made[key] = change
        found: Node = self._made[key]
        return found

    def _key(self, x: Node, wanted: Placement, reader: Node) -> tuple[Node, Placement, Any]:
        """Return the key of a change: (value, wanted placement, tags of the reader).

        The tags are None if the change belongs to the region of the value, so that all readers share it.
        """
        return x, wanted, None if has_own_region(x) else tuple(sorted(tags_of(reader).items()))

    def _seen_through(self, x: Node, wanted: Placement) -> Placement | None:
        """Return the placement of a view's source that gives the view the placement `wanted`.

        Return None if the change cannot come before the view, for example because the number of blocks would
        depend on the number of samples.
        """
        if x.target not in VIEWS or FOLLOWS in x.meta:  # `FOLLOWS` marks a view that `_changed_in_runs` made
            return None
        (source,) = x.all_input_nodes
        have, parts = self.held[x], [p for p in (self.held[x], wanted) if isinstance(p, Shard)]
        if isinstance(have, Partial) or len(parts) != 1 or shape_of(source) == shape_of(x):
            return None
        runs = {1, parts[0].blocks, *(said.blocks for said in self.said)}
        pairs = regrouping(shape_of(source), shape_of(x), self.degree, runs)
        before = next((p for p, after in pairs if after == parts[0] and self._of_any_size(p)), None)
        if before is None or self.held[source] != (before if isinstance(have, Shard) else have):
            return None
        return before if isinstance(wanted, Shard) else wanted

    def _of_any_size(self, part: Shard) -> bool:
        """Return whether the number of runs of a shard is the same for any number of samples.

        It is not the same if one dimension holds both samples and positions.
        """
        return part.blocks == 1 or any(
            part.blocks == said.blocks and (part.dim > 0 or said.dim == 0) for said in self.said
        )

    def _changed_before(self, x: Node, placement: Placement, wanted: Placement, reader: Node) -> Node:
        """Change the placement of a view's source, and repeat the view on the result."""
        key = (x, wanted, (tuple(sorted(tags_of(reader).items())), _torch.is_backward(reader)))
        if key not in self._made:
            (source,) = x.all_input_nodes
            with self.graph.inserting_before(reader):
                changed = self.changed(source, placement, reader)
                made = make_like(
                    self.graph,
                    reader if reader.op == "call_function" else x,
                    x.target,
                    (changed, x.args[1]),
                    x.meta["val"],
                )
            self._place(made, wanted)
            self._made[key] = made
        return self._made[key]

    def _changed_by_whole(self, x: Node, wanted: Placement, reader: Node) -> Node:
        """Change the placement of a value in two steps: replicate the value first."""
        whole = self.changed(x, Replicate(), reader)
        with self.graph.inserting_before(reader):
            at = reader if reader.op == "call_function" else x
            made = make_like(self.graph, at, aten.alias.default, (whole,), val=x.meta["val"])
        self._place(made, Replicate())
        return self.changed(made, wanted, reader)

    def _changed_in_runs(self, x: Node, wanted: Placement, reader: Node) -> Node:
        """Change a placement whose shards consist of runs, or change to such a placement. The change happens
        in a view that has a separate dimension for the runs, because the number of runs may depend on the
        number of samples."""
        key = (x, wanted, (tuple(sorted(tags_of(reader).items())), _torch.is_backward(reader)))
        if key not in self._made:
            (runs,) = (p for p in (self.held[x], wanted) if isinstance(p, Shard) and p.blocks > 1)
            shape = list(shape_of(x))
            apart = [*shape[: runs.dim], runs.blocks, shape[runs.dim] // runs.blocks, *shape[runs.dim + 1 :]]
            before, after = (_in_runs(p, runs) for p in (self.held[x], wanted))
            with self.graph.inserting_before(reader):
                value = x.meta["val"]
                at = x if has_own_region(x) else reader
                made = make_like(self.graph, at, aten.view.default, (x, apart), val=value.view(apart))
                made.meta[FOLLOWS] = True
                self._place(made, before)
                changed = self.changed(made, after, reader)
                # The graph's output is not an operation.
                after_it = reader if reader.op == "call_function" else x
                self._made[key] = make_like(
                    self.graph, after_it, aten.view.default, (changed, shape), val=value
                )
                self._place(self._made[key], wanted)
        return self._made[key]

    def _place(self, node: Node, placement: Placement) -> None:
        """Set the placement of a new node, and give it a sequence number that no gradient has."""
        self.held[node] = placement
        if not _torch.is_backward(node):
            node.meta["seq_nr"] = (node.name,)
        self._beside(node)

    def _before(self, x: Node, reader: Node) -> Node:
        """Return the first operation after `x` that is the reader or has the reader's tags. Return the reader
        if there is no such operation."""
        found = x.op != "call_function"
        for node in self.graph.nodes:
            if found and node.op == "call_function" and (node is reader or tags_of(node) == tags_of(reader)):
                first: Node = node
                return first
            found = found or node is x
        return reader


def make_like(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], val: Any = None) -> Node:
    """Return a new operation with the metadata of `node`, and with the same traced value unless `val` is
    given."""
    made = graph.call_function(target, args)
    made.meta = {key: node.meta[key] for key in PLACE if key in node.meta} | {
        "val": node.meta["val"] if val is None else val
    }
    return made


def has_own_region(x: Node) -> bool:
    """Return whether a change of this value belongs to the region that computes the value.

    This holds for tagged and for backward operations. A change of any other value belongs to the region of
    the value's reader.
    """
    return x.op == "call_function" and (META_KEY in x.meta.get("custom", {}) or _torch.is_backward(x))


def _in_runs(placement: Placement, runs: Shard) -> Placement:
    """Return the placement of a value after a view has given its runs a separate dimension."""
    if not isinstance(placement, Shard):
        return placement
    # The dimension of the runs comes before the dimension along which `runs` cuts each run. A shard along the
    # same dimension that does not consist of runs holds some of the runs whole, so it follows the first of
    # the two dimensions.
    dim = placement.dim + (placement.dim > runs.dim or placement == runs)
    return Shard(dim, turn=placement.turn)
