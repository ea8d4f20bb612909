"""Assign each node of a joint graph to a region.

Forward nodes come in trace order. A region is a maximal run of nodes with equal tags. So a forward pass
depends only on earlier regions, and a backward pass only on gradients from later regions. A run is cut
further:
- Work on dispatched tokens is a separate region.
- Work that reads sums over the whole batch (`totals.total`), or values after a change of placement, is a
  separate region. If further sums are computed from it, the work that reads those sums is again a separate
  region.
- Work on gathered samples (`joined_part.py`) is separate from all other work.

Three kinds of nodes do not decide where regions begin:
- *views*: cheap views (or casts) of a parameter. Each region that uses a view computes it, because
  sending a view would send the weight.
- *constants*: untagged work that reads only tensors of the batch and constant buffers (masks, positions,
  slices of the batch). Each region that uses a constant computes it again.
- *glue*: other untagged work that reads no parameter (a metric after the last stage, a loss outside of the
  context). It belongs to the region that computed the latest of its inputs. If no region computes its inputs, it
  belongs to the region of its first reader.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.annotate import META_KEY, SOURCE_KEY
from lightning_piper.capture.joint.backward_cuts import backward_cuts
from lightning_piper.capture.joint.joined_part import (
    EMPTY,
    differentiates_joined,
    is_sampled,
    joined_nodes,
    rows_of_samples,
    sampled,
)
from lightning_piper.capture.joint.sample_dimension import shape_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.user_code.source import LINE_KEY
from lightning_piper.common.operation_families import PERMUTATIONS, RESHAPES, SQUEEZES
from lightning_piper.common.user_lines import shown_line
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import Region
from lightning_piper.placements.placement_changes import AFTER, CHANGE, FOLLOWS
from lightning_piper.routing import COMBINE, ROUTE
from lightning_piper.sample_gathering import GATHER
from lightning_piper.totals import TOTAL

aten = torch.ops.aten
BORDERS = (TOTAL, CHANGE)  # the training DAG does the work of these nodes between two passes
ENDS = (*BORDERS, GATHER)  # a pass ends at these nodes, and their readers are in other passes
# Cheap operations. Applied to a parameter only, each region that uses the result computes it.
VIEWS = {
    *PERMUTATIONS, *RESHAPES, *SQUEEZES, aten.expand.default, aten.unsqueeze.default, aten.select.int,
    aten.slice.Tensor,
    aten.alias.default, aten.detach.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.unbind.int,
    aten._to_copy.default, operator.getitem,
}  # fmt: skip


@dataclass(frozen=True)
class RegionAssignment:
    """The region of each node of a joint graph.

    Attributes:
        regions: the regions in trace order.
        of: node -> index of its region, for all forward and backward nodes except those in `shared`.
        shared: views and constants. Each region that uses such a node computes it again.
    """

    regions: tuple[Region, ...]
    of: Mapping[Node, int]
    shared: frozenset[Node]


def tags_of(node: Node) -> dict[str, int]:
    return dict(node.meta.get("custom", {}).get(META_KEY, {}))


def source_line(node: Node) -> str:
    """Return the user's source line that opened the innermost annotation around a node, or the text "outside
    of any annotation"."""
    return str(node.meta.get("custom", {}).get(SOURCE_KEY, "outside of any annotation"))


def own_line(node: Node) -> str:
    """Return the user's source line of an operation. If that line is not known, return `source_line`."""
    file, _, number = str(node.meta.get("custom", {}).get(LINE_KEY, "")).rpartition(":")
    return shown_line(file, int(number)) if file else source_line(node)


def _first_line(node: Node) -> str:
    """Return the line to show for a region that begins with this node: the line of the node's annotation, or
    outside of any annotation the node's own line."""
    return source_line(node) if tags_of(node) else own_line(node)


def assign(graph: torch.fx.Graph, state: frozenset[Node]) -> RegionAssignment:
    """Assign every operation and constant of a joint graph to a region. The graph is not changed.

    Args:
        state: placeholders of buffers that the step changes.

    Raises:
        CaptureError: a sum over the whole batch, a change of placement, or work on gathered samples is
            between dispatch and combine.
    """
    calls = [n for n in graph.nodes if n.op != "placeholder" and n.op != "output"]
    forward = [n for n in calls if not _torch.is_backward(n)]
    shared, weights = _shared(forward, state)
    of: dict[Node, int] = {}
    backward = [n for n in calls if _torch.is_backward(n)]
    joined = joined_nodes(forward, shared)
    behind = backward_cuts(forward, backward, shared)
    regions = _segments([n for n in forward if n not in shared], joined, weights, behind, of)
    _assign_backward(backward, regions, of, joined, shared)
    # A change of placement in the backward pass of region 0 gives the gradients after it negative indices.
    # Add regions for the negative indices before region 0, with empty forward passes. Then all indices begin
    # at 0.
    if (more := -min(of.values(), default=0)) > 0:
        regions = [
            *(replace(regions[0], index=i) for i in range(more)),
            *(replace(r, index=r.index + more) for r in regions),
        ]
        of = {node: i + more for node, i in of.items()}
    return RegionAssignment(tuple(regions), of, frozenset(shared))


def settle_glue(graph: torch.fx.Graph) -> None:
    """Give each glue node, and each gradient of a glue node, the tags of the region to which it belongs. The
    graph is changed in place.

    `tensor_sharding.propagation` calls this before changes of placement are inserted, so that such a change can
    cut the graph at glue.
    """
    calls = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    forward = [n for n in calls if not _torch.is_backward(n)]
    shared, weights = _shared(forward, frozenset())
    # node -> an increasing number of its run, and the first node of the run
    runs: dict[Node, tuple[int, Node]] = {}
    last: tuple[int, Node] | None = None
    for node in forward:
        found = [runs[x] for x in node.all_input_nodes if x in runs]
        if tags_of(node) or any(x in weights for x in node.all_input_nodes):
            if last is None or tags_of(last[1]) != tags_of(node):
                last = len(runs), node
            runs[node] = last
        elif found and node not in shared:
            runs[node] = max(found, key=operator.itemgetter(0))
            _tag_as(node, runs[node][1])
    first: dict[Any, Node] = {}
    # An operation without a gradient has the sequence number of the operation before it. `setdefault` keeps
    # the first node of each number, so shared nodes come last.
    for node in sorted(forward, key=shared.__contains__):
        first.setdefault(_torch.sequence_number(node), node)
    for node in calls:
        own = first.get(_torch.sequence_number(node))
        # An addition may merge gradients from several regions, so it gets no tags.
        if (
            _torch.is_backward(node)
            and own in runs
            and not tags_of(node)
            and node.target is not aten.add.Tensor
        ):
            _tag_as(node, own)


def _tag_as(node: Node, other: Node) -> None:
    about = other.meta.get("custom", {})
    node.meta["custom"] = node.meta.get("custom", {}) | {
        k: about[k] for k in (META_KEY, SOURCE_KEY) if k in about
    }


def _shared(forward: list[Node], state: frozenset[Node]) -> tuple[set[Node], set[Node]]:
    """Return two sets: the views and constants that regions share, and the parameters that are used, with their
    views. Nodes that read `state`, the placeholders of buffers that the step changes, are not constants."""
    shared: set[Node] = set()
    weights: set[Node] = set()
    for node in forward:
        inputs = node.all_input_nodes
        for x in inputs:
            if x.op == "placeholder" and isinstance(x.meta.get("desc"), _torch.ParamAOTInput):
                weights.add(x)
        if any(x in state or (x.op != "placeholder" and x not in shared) for x in inputs) or _torch.is_random(
            node
        ):
            continue
        if node.target in ENDS:
            continue
        if inputs and all(x in weights for x in inputs):
            if node.target in VIEWS:
                shared.add(node)
                weights.add(node)
        elif not any(x in weights for x in inputs) and not tags_of(node):
            shared.add(node)
    return shared, weights


# Where a node lies: the number of its run of equal tags, whether it is in the joined part, and the number of
# boundaries before it in this run. The nodes at one spot are in one region.
Spot = tuple[int, bool, int]


def _segments(
    forward: list[Node],
    joined: Collection[Node],
    weights: set[Node],
    behind: tuple[Mapping[Node, set[Node]], Mapping[Node, int]],
    of: dict[Node, int],
) -> list[Region]:
    """Return the regions of the forward pass, at least one, and record the region of each forward node in `of`.

    Args:
        forward: the forward nodes that are not shared.
        shared, weights: the results of `_shared`. The argument after them has both results of `backward_cuts`.
    """
    places = _places(forward, joined, weights, *behind)
    first: dict[Spot, Node] = {}  # spot -> its first node that may begin a region
    for node, (place, own) in places.items():
        if own:
            first.setdefault(place, node)
    for (run, whole, depth), node in list(first.items()):
        # Every smaller depth has a region too, even if only its backward pass has work.
        for before in range(depth):
            first.setdefault((run, whole, before), node)
        # Before a joined region, an unjoined region gathers the samples.
        if whole:
            first.setdefault((run, False, 0), node)
    number = {place: i for i, place in enumerate(sorted(first))}
    regions = [
        Region(i, tags_of(first[at]), _first_line(first[at]), joined=at[1]) for at, i in number.items()
    ]
    of |= {node: number[place] for node, (place, _) in places.items()}
    if not regions:  # if all nodes are glue, the whole step is one untagged region
        regions.append(Region(0, {}, source_line(forward[0]) if forward else "training_step"))
    # In reverse order, because the readers of a node may themselves have no region yet.
    for node in reversed([node for node in forward if node not in of]):
        users = [of[u] for u in node.users if u in of and (node in joined or u not in joined)]
        # A gathered tensor of the batch is gathered in the last unjoined region before its reader.
        if node.target is GATHER:
            users = [max(r.index for r in regions[: of[u]] if not r.joined) for u in node.users if u in of]
        of[node] = min(users, default=0)
    return regions


def _places(
    forward: list[Node],
    joined: Collection[Node],
    weights: set[Node],
    after: Mapping[Node, set[Node]],
    depths: Mapping[Node, int],
) -> dict[Node, tuple[Spot, bool]]:
    """Return node -> its spot, and whether the node may begin a region. The result leaves out glue before the
    first region.

    Args:
        after, depths: the results of `backward_cuts`.

    Raises:
        CaptureError: a sum over the whole batch, a change of placement, or work on gathered samples is
            between dispatch and combine.
    """
    away = _away(forward)
    for node in away:
        if node.target in ENDS or node in joined:
            what, act = "a tensor that is sharded along an axis", "Move the computation"
            if node.target is TOTAL:
                what = "a sum over the whole batch (the statistics of a synchronized batch norm)"
                act = "Use a norm over each row (a layer norm), or move the computation"
            elif node.target is GATHER or node in joined:
                what = "a value computed from gathered samples"
            raise CaptureError(
                f"{source_line(node)}: {what} is used between dispatch and combine, where the rows of all "
                f"devices are mixed. {act} outside of dispatch and combine [PIPER-C015]"
            )
    parts = _parts([n for n in forward if n in away or not _is_glue(n, away, weights)], away)
    places: dict[Node, tuple[Spot, bool]] = {}
    run, current = -1, None
    for node in forward:
        inputs = [places[x][0] for x in node.all_input_nodes if x in places]
        follows = FOLLOWS in node.meta and not any(x.target in BORDERS for x in node.all_input_nodes)
        if inputs and (node not in parts or node.target in (operator.getitem, *ENDS) or follows):
            # Glue, and a term of a sum, stay in the region that computes their latest input.
            latest = max(inputs)
            begins = latest[1] != (node in joined)
            places[node] = (latest[0], True, 0) if begins else latest, begins
        elif node in parts:
            if (tags_of(node), parts[node]) != current:  # the node begins a run
                run, current = run + 1, (tags_of(node), parts[node])
            here = (run, node in joined)
            # Input -> the number of boundaries before it. Only inputs in the same run count, which are joined
            # if the node is joined.
            depth = {
                x: places[x][0][2] for x in node.all_input_nodes if x in places and places[x][0][:2] == here
            }
            # Each entry is a lower limit for the number of boundaries before the node. The limits come from
            # its inputs, from `after` (so that the backward pass can be cut), and from its metadata `AFTER`.
            behind = [before + (x.target in BORDERS) for x, before in depth.items()]
            for x in after.get(node, ()):
                if x not in places and tags_of(x) == tags_of(node):
                    behind.append(1)  # `x` is a view of a parameter, so only its gradient has a region
                elif x in places and places[x][0][:2] == here:
                    behind.append(places[x][0][2] + 1)
            for x, by in node.meta.get(AFTER, {}).items():
                behind.append(by + (places[x][0][2] if x in places and places[x][0][:2] == here else 0))
            places[node] = (*here, depths.get(node, 0) + max(behind, default=0)), True
        elif node in joined:  # untagged, and it reads only gathered tensors of the batch: a run of its own
            if run < 0 or current is not None:
                run, current = run + 1, None
            places[node] = (run, True, 0), True
    return places


def _is_glue(node: Node, away: set[Node], weights: set[Node]) -> bool:
    """Return whether a node is glue, so that it does not decide where regions begin.

    These nodes are not glue: tagged nodes, sums over the batch and changes of placement (`BORDERS`),
    the readers of `BORDERS`, of a parameter or of a node in `away`, and nodes with `AFTER`.
    """
    # After `combine`, rows no longer belong to the experts' region. The result of a sum does not belong to the
    # region of its terms.
    if AFTER in node.meta:
        return False
    came_back = any(x in away or x.target in BORDERS for x in node.all_input_nodes)
    return (
        not tags_of(node)
        and node.target not in BORDERS
        and not came_back
        and not any(x in weights for x in node.all_input_nodes)
    )


def _away(forward: list[Node]) -> set[Node]:
    """Return the nodes that work on dispatched tokens, up to and including `combine`."""
    away: set[Node] = set()
    for node in forward:
        if node.target is ROUTE or any(x in away and not _combines(x) for x in node.all_input_nodes):
            away.add(node)
    return away


def _combines(node: Node) -> bool:
    return node.target is ROUTE and node.args[3] == COMBINE


def _parts(nodes: list[Node], away: set[Node]) -> dict[Node, int]:
    """Return for each node whether it comes before (0), within (1) or after (2) the work on dispatched tokens
    in its run of equal tags. In a run without such work, all nodes have 0."""
    parts: dict[Node, int] = {}
    for _, run in itertools.groupby(nodes, tags_of):
        together = list(run)
        inside = [i for i, node in enumerate(together) if node in away]
        first, last = (inside[0], inside[-1]) if inside else (len(together), len(together))
        parts |= {node: (i >= first) + (i > last) for i, node in enumerate(together)}
    return parts


def _assign_backward(
    backward: list[Node],
    regions: list[Region],
    of: dict[Node, int],
    joined: Collection[Node],
    shared: Collection[Node],
) -> None:
    """Assign each backward node to the region of the forward operation that it differentiates, and record
    this region in `of`.

    If the node reads a gradient of an earlier region, it is in that earlier region, so that passes never wait
    for each other in a circle. At a change of placement, the index of this region may be negative (see `assign`).
    An addition that merges gradients of a value used several times has no tags.
    It is in the earliest region of its inputs.
    """
    by_sequence: dict[Any, int] = {}
    # (sequence number, whether the region is joined) -> region. An operation without a gradient has the
    # sequence number of the operation before it, so the first operation counts.
    for node, forward in of.items():
        by_sequence.setdefault((_torch.sequence_number(node), node in joined), forward)
    tags = [(dict(r.tags), r.joined) for r in regions]
    last = {whole: max((r.index for r in regions if r.joined == whole), default=0) for whole in (False, True)}
    joined = differentiates_joined(backward, joined, shared)
    floating: list[Node] = []

    def before(x: Node, node: Node) -> int:
        """Return the largest index of a region in which `node` may read the gradient `x`."""
        # Gradients go from the joined part to the parts of the batch.
        if x in joined and node not in joined:
            return max(r.index for r in regions[: of[x]] if not r.joined)
        # The result of `BORDERS` is read in the region before, except by another change of placement.
        return of[x] - (x.target in BORDERS and node.target is not CHANGE)

    for node in backward:
        inputs = [x for x in node.all_input_nodes if x in of and _torch.is_backward(x)]
        bound = min((before(x, node) for x in inputs), default=last[node in joined])
        region: int | None
        if AFTER in node.meta:
            region = min(bound, *(of[x] - by for x, by in node.meta[AFTER].items()))
        elif node.target in BORDERS:
            region = bound if inputs else None
        elif META_KEY in node.meta.get("custom", {}):
            own = tags_of(node), node in joined
            region = by_sequence.get((_torch.sequence_number(node), node in joined))
            if region is None or tags[region] != own:
                region = next((r for r in range(bound, -1, -1) if tags[r] == own), bound)
        elif node.target is aten.add.Tensor and inputs:
            region = bound
        else:
            region = by_sequence.get(
                (_torch.sequence_number(node), node in joined), bound if inputs else None
            )
        if region is None:
            floating.append(node)
        elif node.target is operator.getitem:  # in the region of the operation with several results
            of[node] = bound
        else:
            of[node] = min(region, bound)
    # A node that reads no gradient belongs to the region of its first reader in the backward pass.
    for node in reversed(floating):
        of[node] = max((of[u] for u in node.users if u in of), default=last[False])


def gradient_terms(node: Any, of: Mapping[Node, int]) -> list[Node]:
    """Return a parameter's gradient as terms of different regions, in the order of summation.

    The gradient of a parameter that several regions use is a chain of additions. Splitting the chain lets
    each region keep its own term. Any other gradient is returned as one term.
    """
    if (
        node.target is aten.add.Tensor
        and META_KEY not in node.meta.get("custom", {})
        and not node.kwargs
        and len(node.users) == 1
        and all(isinstance(x, Node) and x in of and x.target not in BORDERS for x in node.args)
        and len({of[x] for x in node.args}) == 2
    ):
        return [*gradient_terms(node.args[0], of), *gradient_terms(node.args[1], of)]
    return [node]


def refuse_parts(graph: torch.fx.Graph) -> Collection[Node]:
    """Check that the joined part reads only three kinds of values: its own values, rows of samples, and
    values that are the same for each part of the batch. Values that no result needs are not checked.

    Returns:
        The forward nodes of the joined part.

    Raises:
        CaptureError: the joined part reads any other value, or `gather_samples` gets a value without one row
            for each sample.
    """
    forward = [n for n in graph.nodes if n.op == "call_function" and not _torch.is_backward(n)]
    shared, _ = _shared(forward, frozenset())
    joined = joined_nodes(forward, shared)
    rows, varies = (rows_of_samples(forward), sampled(forward)) if joined else (EMPTY, EMPTY)
    stack, seen = list(graph.output_node().all_input_nodes), set[Node]()
    while stack and joined:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack += node.all_input_nodes
        for x in node.all_input_nodes if node in joined or node.target is GATHER else ():
            if node.target is GATHER and node not in joined:
                fits = x in rows or is_sampled(x)
            elif x in shared or x.op != "call_function":
                # The joined part computes this value again. So it must be the same for each part of the
                # batch.
                fits = x not in varies and not is_sampled(x)
            else:
                fits = x in rows or x in joined or x.target is GATHER
            if fits:
                continue
            if node.target is GATHER:
                found = (
                    "does not have one row for each sample, in order. Gather a value with one row for each sample, and "
                    "compute this value from the gathered rows"
                    if x in varies
                    else "does not depend on the samples. Use it without gather_samples. If it needs one row for each "
                    "sample, make it from the gathered rows' shape[0]"
                )
                raise CaptureError(
                    f"{own_line(node)}: gather_samples gets a value of shape {list(shape_of(x))} "
                    f"({own_line(x)}), which {found} [PIPER-C016]"
                )
            raise CaptureError(
                f"{own_line(node)}: {node.target} computes with gathered samples and with {x.target} "
                f"({own_line(x)}) of shape {list(shape_of(x))}, which code that runs on each microbatch "
                "also reads. Compute the result twice: once from the gathered samples, and once from the microbatch "
                "[PIPER-C016]"
            )
    return joined
