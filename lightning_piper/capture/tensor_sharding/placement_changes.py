"""Insert placement changes into a joint graph. Readers in one region that need the same placement of a value
share one change."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.annotate import META_KEY
from lightning_piper.capture.joint.region_assignment import tags_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import RESHAPES
from lightning_piper.ir.values import Partial, Placement, Replicated, Sharded, is_shift
from lightning_piper.placements.placement_changes import CHANGE, FOLLOWS, PLACEMENTS, PlacementMap
from lightning_piper.placements.rule import shape_of
from lightning_piper.placements.views import regrouping

aten = torch.ops.aten
# Metadata keys with a node's annotations, sequence number, stack trace, and pass (forward or backward). A new
# node gets the entries of the node to whose region it belongs.
PLACE = ("custom", "seq_nr", "stack_trace", "partitioner_tag")


class PlacementWriter:
    """A writer of placement changes along one axis into a graph. Each `Propagation` has one.

    Args:
        held: the placements along the axis. The writer adds the placements of its nodes.
        said: the shards that the user declares for values of the step.
        beside: sets the placements of a new node along the other axes.
    """

    def __init__(
        self,
        graph: Graph,
        axis: str,
        degree: int,
        held: PlacementMap,
        said: Collection[Sharded],
        beside: Callable[[Node], None],
    ) -> None:
        self.graph, self.axis, self.degree, self.held, self.said = graph, axis, degree, held, said
        self._beside = beside
        # key of a change -> the node with the changed value
        self._made: dict[tuple[Node, Placement, Any], Node] = {}

    def made(self, x: Node, wanted: Placement, reader: Node) -> Node | None:
        """Return the result of an existing change of `x` to `wanted` that the reader may use. Return None if
        there is no such change."""
        return self._made.get(self._key(x, wanted, reader))

    def changed(self, x: Node, wanted: Placement, reader: Node) -> Node:
        """Return the value of `x` with the placement `wanted` to be read by `reader`. Insert the nodes that
        compute it.

        Readers with the same `_key` share one change. The result is an existing node if one has this value:
        for example, if `x` is itself a change of a value that already has the wanted placement. If a view
        computes `x`, the change may come before the view. A change of shards with several blocks may need
        further views or two changes.

        Args:
            x: a value whose placement is not `wanted`.
        """
        if x.target is CHANGE and x.args[1] == self.axis:  # one change replaces two
            x = x.all_input_nodes[0]
            if self.held[x] == wanted:
                return x
        if (source := self._seen_through(x, wanted)) is not None:
            return self._changed_before(x, source, wanted, reader)
        parts = [p for p in (self.held[x], wanted) if isinstance(p, Sharded)]
        runs = [p.blocks for p in parts if p.blocks > 1]  # the numbers of runs (blocks) of such shards
        if runs and not is_shift(self.held[x], wanted):
            # Replicate first if both shards consist of runs. Also if both shards are along one dimension,
            # unless the degree divides the number of runs: then each contiguous shard consists of whole runs.
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
        """Return the placement to which the source of the view `x` must change so that `x` gets the placement
        `wanted`.

        Return None if `x` is not a view, or if the change cannot come before the view. For example, `x` is a
        partial sum, or the number of blocks would depend on the number of samples.
        """
        if (
            x.target not in RESHAPES or FOLLOWS in x.meta
        ):  # `FOLLOWS` marks a view that `_changed_in_runs` made
            return None
        (source,) = x.all_input_nodes
        have, parts = self.held[x], [p for p in (self.held[x], wanted) if isinstance(p, Sharded)]
        if isinstance(have, Partial) or len(parts) != 1 or shape_of(source) == shape_of(x):
            return None
        runs = {1, parts[0].blocks, *(said.blocks for said in self.said)}
        pairs = regrouping(shape_of(source), shape_of(x), self.degree, runs)
        before = next((p for p, after in pairs if after == parts[0] and self._of_any_size(p)), None)
        if before is None or self.held[source] != (before if isinstance(have, Sharded) else have):
            return None
        return before if isinstance(wanted, Sharded) else wanted

    def _of_any_size(self, part: Sharded) -> bool:
        """Return whether the number of runs of a shard is the same for any number of samples.

        This is so for one run, and for a number of runs that the user declares. In all other cases, one
        dimension may hold both samples and positions, with a run for each sample.
        """
        return part.blocks == 1 or any(
            part.blocks == said.blocks and (part.dim > 0 or said.dim == 0) for said in self.said
        )

    def _changed_before(self, x: Node, placement: Placement, wanted: Placement, reader: Node) -> Node:
        """Change the placement of a view's source, and return the view of the result. Readers in one region
        and pass share it.

        Args:
            x: the view.
            placement: the new placement of the source.
            wanted: the placement of the new view.
        """
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
        """Change the placement of a value in two steps, and return the result: first replicate the value, then
        cut it. An `alias` between the two changes keeps them from being merged."""
        whole = self.changed(x, Replicated(), reader)
        with self.graph.inserting_before(reader):
            at = reader if reader.op == "call_function" else x
            made = make_like(self.graph, at, aten.alias.default, (whole,), val=x.meta["val"])
        self._place(made, Replicated())
        return self.changed(made, wanted, reader)

    def _changed_in_runs(self, x: Node, wanted: Placement, reader: Node) -> Node:
        """Change a placement whose shards consist of runs, or change to such a placement. Return the result,
        in the shape of `x`.

        The change happens in a view that has a separate dimension for the runs. The reason is that a change
        must be the same for all batch sizes, but the number of runs may depend on the number of samples.
        """
        key = (x, wanted, (tuple(sorted(tags_of(reader).items())), _torch.is_backward(reader)))
        if key not in self._made:
            (runs,) = (p for p in (self.held[x], wanted) if isinstance(p, Sharded) and p.blocks > 1)
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
        """Set the placements of a new node along all axes. If it is a forward node, give it a sequence number
        that no backward operation has."""
        self.held[node] = placement
        if not _torch.is_backward(node):
            node.meta["seq_nr"] = (node.name,)
        self._beside(node)

    def _before(self, x: Node, reader: Node) -> Node:
        """Return the first operation after `x`, in the order of the graph, that is the reader or has the
        reader's tags. Return the reader if there is no such operation."""
        found = x.op != "call_function"
        for node in self.graph.nodes:
            if found and node.op == "call_function" and (node is reader or tags_of(node) == tags_of(reader)):
                first: Node = node
                return first
            found = found or node is x
        return reader


def make_like(graph: Graph, node: Node, target: Any, args: tuple[Any, ...], val: Any = None) -> Node:
    """Add an operation to the graph at its current insertion point, and return its node.

    Args:
        node: the new node gets the metadata `PLACE` of this node.
        val: the traced value of the new node (default: the traced value of `node`).
    """
    made = graph.call_function(target, args)
    made.meta = {key: node.meta[key] for key in PLACE if key in node.meta} | {
        "val": node.meta["val"] if val is None else val
    }
    return made


def return_copies(graph: Graph) -> None:
    """Let the graph return a copy of each changed value that it returns. A change of placement runs between two
    passes, so only a pass after it can return the value."""
    output = graph.output_node()
    for node in [x for x in output.all_input_nodes if x.target is CHANGE]:
        with graph.inserting_after(node):
            copy = make_like(graph, node, torch.ops.aten.clone.default, (node,))
        copy.meta[PLACEMENTS] = node.meta.get(PLACEMENTS, ())
        output.replace_input_with(node, copy)


def has_own_region(x: Node) -> bool:
    """Return whether a change of this value belongs to the region that computes the value.

    This holds for tagged and for backward operations. A change of any other value belongs to the region of
    the value's reader.
    """
    return x.op == "call_function" and (META_KEY in x.meta.get("custom", {}) or _torch.is_backward(x))


def _in_runs(placement: Placement, runs: Sharded) -> Placement:
    """Return the placement of a value after a view has given its runs a separate dimension.

    Args:
        placement: the placement before the view.
        runs: the shard that consists of runs. The view splits its dimension into [runs, elements of a run].
    """
    if not isinstance(placement, Sharded):
        return placement
    # The view replaces `runs.dim` by two dimensions: the number of the run, and the position in the run. The
    # shard `runs` cuts each run, so it is along the second of them. A contiguous shard along `runs.dim`
    # consists of whole runs, so it is along the first of them.
    dim = placement.dim + (placement.dim > runs.dim or placement == runs)
    return Sharded(dim, turn=placement.turn)
