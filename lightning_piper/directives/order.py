"""`order`: the order in which parts of the step run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import networkx as nx

from lightning_piper.common.limits import shown
from lightning_piper.directives.base import Contract, Directive, names_absent, one_microbatch, register
from lightning_piper.directives.rewrites.backward import split_backward
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import (
    AGAIN,
    STORE,
    Filter,
    Index,
    copies,
    describe,
    names_again,
    names_copies,
    names_split_backward,
)
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.regions import Region
from lightning_piper.ir.values import Kind
from lightning_piper.ops.communication.total import Total
from lightning_piper.ops.order import Barrier

Cycle = Sequence[tuple[int, int]]  # the edges of a cycle: (id of the first node, id of the second node)
# Why orders make a cycle, as a text about the user's module, and what to do. None: the cause is not known.
Cause = tuple[str, str] | None
Lanes = Sequence[Sequence[Node]]  # For a group: the nodes that each of its filters selects.


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Order(Directive):
    """Run each group of chunks before the next group. Chunks of one group may interleave.

        F[MB=0] @0   F[MB=1] @0   B[MB=0] @0      --order [F MB=1], [B MB=0]-->      F[MB=0]   F[MB=1] ==> B[MB=0]

    Attributes:
        filters: The groups in order. A group is a filter or a list of filters. A filter that selects several
            chunks puts all of them into its group. The filters of a group take turns, chunk by chunk, so that
            one computes while another communicates. The chunks of one filter run in their default order.

    A filter whose PASS is `BI` or `BW` splits the backward passes that it selects. BI makes the gradients
    that other regions wait for, and BW makes the gradients of weights. If a region does not have the pass,
    the filter skips it: a first stage outputs no gradient, so its whole backward pass is BW. A pass that no
    order names runs in the default order.

    A filter whose PASS is `R` selects second forward passes (`recompute`). A second forward pass in an order
    does not wait for a gradient.

    A filter whose PASS is `STORE` or `FETCH` selects the copies to the host, or back, that an `offload` makes
    for the chunks that the filter names. Such a filter must be a group of its own between groups of chunks.

    If a step gathers samples (`gather_samples`), a backward pass that waits for all samples cannot run before
    the last forward pass. So the forward passes of all groups come first, then the part that works on the
    whole batch, then the backward passes, each in the given order.

    The order holds between chunks of one device. Between devices, it may only repeat an order that the data
    already requires. The bits do not change, because sums of gradients keep their own order.
    """

    op: ClassVar[str] = "order"
    contract: ClassVar[Contract] = "bitwise"

    filters: Sequence[Filter | Sequence[Filter]]

    def kind_in(self, program: Sequence[Directive]) -> str:
        named = [condition for group in self.filters for condition in _members(group)]
        if any(map(names_copies, named)):
            return f"{self.op} of copies"
        return f"{self.op} of R" if any(map(names_again, named)) else self.op

    def check_fields(self) -> None:
        if not isinstance(self.filters, list | tuple) or len(self.filters) < 2:
            self.refuse(
                "filters",
                f"{shown(self.filters)} is not an order",
                "give a list of at least two filters, or lists of filters [PIPER-D003]",
            )
        for i, group in enumerate(self.filters):
            members: Any = [group] if isinstance(group, Mapping) else group
            if not isinstance(members, list | tuple) or not members:
                self.refuse(
                    f"filters[{i}]",
                    f"{shown(group)} is not a group",
                    "give a filter or a non-empty list of filters [PIPER-D003]",
                )
            for condition in members:
                self.check_filter(f"filters[{i}]", condition, copies=True)
        copying = [any(names_copies(condition) for condition in _members(group)) for group in self.filters]
        for i, group in enumerate(self.filters):
            # Piper does not order copies among each other.
            if copying[i] and (len(_members(group)) > 1 or any(copying[i - 1 : i])):
                if len(_members(group)) > 1:
                    self.refuse(
                        f"filters[{i}]",
                        "this group has a filter of copies (STORE or FETCH) and another filter",
                        "give the filter of copies its own group, next to groups of chunks only [PIPER-D008]",
                    )
                self.refuse(
                    f"filters[{i}]",
                    f"this group and filters[{i - 1}] both select copies (STORE or FETCH)",
                    "put a group of chunks between them [PIPER-D008]",
                )

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """Do nothing, because a step without microbatches and backward passes has only the order of its
        data.
        """

    def apply(self, dag: TrainingDAG) -> None:
        """Split the backward passes that filters name by `BI` or `BW`. Add temporal edges from each group to
        the next one, and record the chunks that may interleave. Raise an error if the edges close a cycle.
        """
        self._split_backward(dag)
        groups: list[dict[int, Node]] = []
        for lanes in _around_joined(dag, self._lanes(dag)):
            chunks = {chunk.id: chunk for lane in lanes for chunk in lane}
            if groups and chunks and all(_is_copy(node) for node in (*groups[-1].values(), *chunks.values())):
                groups[-1] |= chunks  # a smaller batch may lack the chunks between two groups of copies
            elif chunks:
                groups.append(chunks)
            if sum(map(bool, lanes)) > 1:
                dag.overlaps.append(tuple(tuple(chunk.id for chunk in lane) for lane in lanes if lane))
        for before, after in itertools.pairwise(groups):
            self._sequence(dag, list(before.values()), list(after.values()))
        self._refuse_cycle(dag)

    def _lanes(self, dag: TrainingDAG) -> list[Lanes]:
        """Return, for each group, the nodes that each of its filters selects.

        Record that this order names these nodes. A second forward pass that a filter selects by `R` no longer
        waits for a gradient. Raise an error if two groups select the same node.
        """
        index, found = Index(dag), list[Lanes]()
        seen: dict[int, int] = {}
        for i, group in enumerate(self.filters):
            lanes = [self._selected(dag, f"filters[{i}]", condition, index) for condition in _members(group)]
            for condition, lane in zip(_members(group), lanes, strict=True):
                for chunk in lane if names_again(condition) else ():
                    if chunk.tags["PASS"] == AGAIN:
                        dag.release(chunk)
            for chunk in {chunk.id: chunk for lane in lanes for chunk in lane}.values():
                if chunk.id in seen:
                    self.refuse(
                        f"filters[{i}]",
                        f"{chunk.label} is already in group {seen[chunk.id]}",
                        "name each chunk in one group [PIPER-D008]",
                    )
                seen[chunk.id] = i
                dag.name(chunk, dag.origin)
            found.append(lanes)
        return found

    def _selected(self, dag: TrainingDAG, field: str, condition: Filter, index: Index) -> Sequence[Node]:
        """Return the chunks that a filter selects, or the copies to the host and back if the filter names
        them.

        Raises:
            DirectiveError: The filter matches nothing. For chunks, the exceptions of `select` apply. For
                copies, the only exception is a filter of microbatches that a smaller batch does not have.
        """
        if not names_copies(condition):
            return self.select(dag, field, condition, index)
        found = copies(dag, condition)
        if not found and not names_absent(dag, condition):
            advice = (
                "correct the tags of this filter" if copies(dag, {}) else "add an offload of these chunks"
            )
            self.refuse(
                field,
                f"{describe(condition)} matches nothing",
                f"{advice}, or remove this filter [PIPER-D004]",
            )
        return found

    def _split_backward(self, dag: TrainingDAG) -> None:
        """Split the backward chunks that filters with PASS `BI` or `BW` select. Raise an error if an earlier
        order names such a chunk."""
        asking = [
            (i, c) for i, group in enumerate(self.filters) for c in _members(group) if names_split_backward(c)
        ]
        if not asking:
            return
        index = Index(dag)
        chosen: dict[int, Chunk] = {}
        for i, condition in asking:
            for chunk in index.select({**condition, "PASS": "B"}):
                if (by := dag.named_by(chunk)) is not None:
                    self.refuse(
                        f"filters[{i}]",
                        f"{describe(condition)} splits {chunk.label} into BI and BW, but directive {by} orders it "
                        "as B",
                        "name BI and BW in all orders, or B in all of them [PIPER-D008]",
                    )
                chosen[chunk.id] = chunk
        split_backward(dag, list(chosen.values()))

    def _sequence(self, dag: TrainingDAG, before: list[Node], after: list[Node]) -> None:
        """Add temporal edges from all of `before` to all of `after` on each device: m + n edges through a
        barrier, not m * n. Between devices, only check that data requires the same order (`_across`).
        """
        by_device: dict[tuple[int, ...], tuple[list[Node], list[Node]]] = {}
        for side, chunks in enumerate((before, after)):
            for chunk in chunks:
                by_device.setdefault(chunk.devices, ([], []))[side].append(chunk)
        for devices, (first, second) in by_device.items():
            if len(first) > 1 and len(second) > 1:
                gate: Node = dag.add(Barrier(devices=devices, placed_by=first[0].placed_by))
                pairs = [(a, gate) for a in first] + [(gate, b) for b in second]
            else:
                pairs = [(a, b) for a in first for b in second]
            for a, b in pairs:
                dag.order(a, b, dag.origin)
        if len(by_device) > 1:
            self._across(dag, before, after)

    def _across(self, dag: TrainingDAG, before: list[Node], after: list[Node]) -> None:
        """Raise an error if a chunk of one device is to run before a chunk of another device, and no data
        flows between them.
        """
        # `reached` maps a node to the nodes of `before` from which a path leads to it, as a bit mask.
        bit = {chunk.id: 1 << i for i, chunk in enumerate(before)}
        reached: dict[int, int] = {}
        try:
            for node in nx.topological_sort(dag.graph):
                mask = bit.get(node, 0)
                for earlier in dag.graph.predecessors(node):
                    mask |= reached[earlier]
                reached[node] = mask
        except nx.NetworkXUnfeasible:
            self._refuse_cycle(dag)
        for chunk in after:
            for other in before:
                if (
                    other.devices != chunk.devices
                    and other.devices
                    and chunk.devices
                    and not reached[chunk.id] & bit[other.id]
                ):
                    self.refuse(
                        "filters",
                        f"{other.label} on device {other.devices[0]} would run before {chunk.label} on "
                        f"device {chunk.devices[0]}, but no data flows from one to the other",
                        "name chunks of one device, or a chunk and a chunk that reads its result "
                        "[PIPER-D008]",
                    )

    def _refuse_cycle(self, dag: TrainingDAG) -> None:
        """Check that the graph has no cycle.

        Raises:
            DirectiveError: There is a cycle. The message shows the cycle, its cause if known, or both.
        """
        if len(dag.in_order()) == len(dag.graph):
            return
        cycle = nx.find_cycle(dag.graph)
        steps = []
        for a, b in cycle:
            steps.append(f"{_name(dag.nodes[a])} -> ({_why(dag, a, b)}) ")
        found = f"this order closes a cycle: {''.join(steps)}{_name(dag.nodes[cycle[0][0]])}"
        ordered = [edge for edge in cycle if not dag.graph.edges[edge]["data"]]
        chunks = _chunks_of(dag, ordered)
        # No numbering of stages lets a backward pass run before a forward pass of the same samples.
        reversed_ = len({c.slice for c in chunks}) == 1 and len({c.kind == "F" for c in chunks}) == 2
        cause, advice = (
            _summed(dag, cycle)
            or _running(dag, cycle)
            or (None if reversed_ else _entered_again(dag, ordered) or _numbered_backwards(dag, ordered))
            or ("", "")
        )
        if not cause:
            advice = "remove or reverse one of the orders in this cycle"
        elif dag.program.degrees is not None:
            found = cause  # The user did not write the orders.
        else:
            found = f"{found}. {cause[0].upper()}{cause[1:]}"
        self.refuse("filters", found, f"{advice} [PIPER-D008]")


def _around_joined(dag: TrainingDAG, groups: list[Lanes]) -> list[Lanes]:
    """Reorder the groups as gathered samples require. Without gathered samples, return them unchanged.

    First come the nodes that the joined part of the step waits for, and all forward passes. Then come the
    forward passes of the joined part, its backward passes, and all other nodes. Within each of these parts,
    the given order stays.
    """
    joined = [chunk for chunk in dag.of_type(Chunk) if dag.regions[chunk.region].joined]
    if not joined:
        return groups
    first = _ancestors(dag, [chunk.id for chunk in joined if chunk.kind == "F"])
    turn = {chunk.id: 1 if chunk.kind == "F" else 2 for chunk in joined}

    def turn_of(node: Node) -> int:
        before = node.id in first or node.tags.get("PASS") in ("F", STORE)
        return turn.get(node.id, 0 if before else 3)

    parts = [
        [[node for node in lane if turn_of(node) == k] for lane in lanes]
        for k in range(4)
        for lanes in groups
    ]
    return [lanes for lanes in parts if any(lanes)]


def _ancestors(dag: TrainingDAG, nodes: list[int]) -> set[int]:
    """Return the ids of all nodes that must run before the nodes with the ids `nodes`. Empties `nodes`."""
    found, stack = set[int](), nodes
    while stack:
        new = [i for i in dag.graph.predecessors(stack.pop()) if i not in found]
        found.update(new)
        stack += new
    return found


def _summed(dag: TrainingDAG, cycle: Cycle) -> Cause:
    """Return the cause of a cycle through a sum over the whole batch. Return None for any other cycle.

    A reader of the sum cannot run for any microbatch before all microbatches have made their terms.
    """
    if not any(isinstance(dag.nodes[node], Total) for node, _ in cycle):
        return None
    cause = "the statistics of a synchronized batch norm need the earlier parts of the step for all microbatches first"
    degrees = dag.program.degrees
    advice = "use one microbatch" if degrees is None else one_microbatch(degrees)
    return cause, f"{advice}, or replace the batch norms by nn.GroupNorm or nn.LayerNorm"


def _running(dag: TrainingDAG, cycle: Cycle) -> Cause:
    """Return the cause of a cycle through a buffer, which microbatches change one after another. Return None for any
    other cycle."""
    buffers = [
        value.names[0]
        for before, after in cycle
        for value in (dag.value(ref) for ref in dag.nodes[after].reads if ref[0] == before)
        if dag.graph.edges[before, after]["data"] and value.kind == Kind.BUFFER
    ]
    if not buffers:
        return None
    return (
        f"each microbatch changes {buffers[0]} after the microbatch before it, but the orders do not run the "
        "microbatches one after another",
        "Order the microbatches of each stage one after another, as the schedule one_f_one_b does",
    )


def _entered_again(dag: TrainingDAG, ordered: Cycle) -> Cause:
    """Return the cause of a cycle in which an order names a part of the step that has the same tags as an earlier
    part. `ordered` has the edges of the cycle that are from orders. Return None for any other cycle.

    An order by tags then orders the two parts of the step that have these tags as one part.
    """
    first: dict[str, Region] = {}
    labels = {dag.regions[chunk.region].label for chunk in _chunks_of(dag, ordered)}
    for region in (region for region in dag.code.regions if region.label in labels):
        before = first.setdefault(region.label, region)
        if before is not region and region.tags:
            return (
                f"the step enters {region.label} at {before.source} and, after other regions, again at "
                f"{region.source}",
                "Give the second part the index of the part before it",
            )
    return None


def _chunks_of(dag: TrainingDAG, cycle: Cycle) -> list[Chunk]:
    """Return the chunks at both ends of edges of a cycle."""
    nodes = [dag.nodes[node] for edge in cycle for node in edge]
    return [node for node in nodes if isinstance(node, Chunk)]


def _numbered_backwards(dag: TrainingDAG, ordered: Cycle) -> Cause:
    """Return the cause of a cycle in a step whose stages are not numbered in the order in which they run. `ordered` has
    the edges of the cycle that are from orders. Return None if the stages of these edges are numbered in this order."""
    regions = sorted({chunk.region for chunk in _chunks_of(dag, ordered)})
    for first, second in itertools.combinations([dag.regions[i] for i in regions], 2):
        for tag, number in first.tags.items():
            if second.tags.get(tag, number) < number:
                return (
                    f"{second.label} ({second.source}) runs after {first.label} ({first.source}), so the "
                    "stages are not numbered in the order in which the step runs them",
                    f"Number the stages in that order: piper.annotate({tag!r}, {second.tags[tag]}) before "
                    f"piper.annotate({tag!r}, {number})",
                )
    return None


def _members(group: Filter | Sequence[Filter]) -> Sequence[Filter]:
    return [group] if isinstance(group, Mapping) else group


def _is_copy(node: Node) -> bool:
    return names_copies(node.tags)


def _why(dag: TrainingDAG, before: int, after: int) -> str:
    """Return why one node comes before another, as a text: an order, a buffer or data."""
    edge = dag.graph.edges[before, after]
    if not edge["data"]:
        return f"order, directive {edge['order']}"
    values = [dag.value(ref) for ref in dag.nodes[after].reads if ref[0] == before]
    return f"buffer {values[0].names[0]}" if {value.kind for value in values} == {Kind.BUFFER} else "data"


def _name(node: Node) -> str:
    return f"{node.label}@{','.join(map(str, node.devices)) or '?'}"
