"""Cut the joint graph of a step into passes of regions, each with its interface and a separate graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.capture.cutting.extraction import extract
from lightning_piper.capture.cutting.recomputation import check_names, recomputed_nodes
from lightning_piper.capture.cutting.row_counts import refuse_joined_rows, routed_of, rows_of
from lightning_piper.capture.cutting.row_independence import refuse_row_dependence
from lightning_piper.capture.cutting.split_backward import save_values, split_backward, wire_inputs
from lightning_piper.capture.joint.region_assignment import (
    BORDERS,
    RegionAssignment,
    assign,
    gradient_terms,
    own_line,
)
from lightning_piper.capture.joint.region_passes import OutputRef, PlaceholderNames, RegionPass, reads_of
from lightning_piper.capture.losses.changed_buffers import changed_buffers
from lightning_piper.capture.losses.loss_weights import WeightedStep
from lightning_piper.capture.metrics.metric_objects import object_of, uncopied
from lightning_piper.capture.tensor_sharding.propagation import Propagation
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.graph_nodes import copy_into
from lightning_piper.errors import CaptureError
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.regions import Code, Interface, Output, PassKey, Region, Routed
from lightning_piper.ir.values import Kind, Placement, Replicated, Sharded
from lightning_piper.placements.local_graph import localize
from lightning_piper.placements.placement_changes import CHANGE, PLACEMENTS, changes_of, unchanged
from lightning_piper.totals import TOTAL

aten = torch.ops.aten
Extracted = dict[PassKey, tuple[Interface, Code]]


@dataclass(frozen=True)
class GraphCut:
    """A joint graph that is cut into passes.

    Attributes:
        graph: The joint graph.
        regions: The regions, in trace order.
        passes: The passes F and B. A pass without work and without outputs is missing. Exceptions: a forward pass that
            has lost all its unused operations, and the only pass of a step.
        parts: Region -> {"BI": pass, "BW": pass}, or only one of the two, which then does all the work of B.
        routed: Index of each routed region -> its experts.
        names: The meaning of the graph's placeholders.
        state: The placeholders of buffers that the step changes.
    """

    graph: Graph
    regions: tuple[Region, ...]
    passes: Mapping[PassKey, RegionPass]
    parts: Mapping[int, Mapping[str, RegionPass]]
    routed: Mapping[int, Routed]
    names: PlaceholderNames
    state: frozenset[Node]

    def extracted(self) -> tuple[dict[PassKey, Interface], dict[PassKey, Code], Extracted]:
        """Return three dicts: (region, "F" or "B") -> interface; (region, "F" or "B") -> code; and (region, "BI" or
        "BW") -> interface and code of the two parts of each B. If B has only one part, the entry is the entry of B.

        Raises:
            CaptureError: Rows between dispatch and combine depend on each other.
        """
        rows = {region: rows_of(self.passes[region, "F"]) for region in self.routed}
        for region, open_rows in rows.items():
            if open_rows is not None:
                refuse_joined_rows(self.passes[region, "F"])

        def extracted(p: RegionPass) -> tuple[Interface, Code]:
            region, constants = p.key[0], self.graph.owning_module
            return extract(p, self.names, self.state, constants, region in self.routed, rows.get(region))

        found = {key: extracted(p) for key, p in self.passes.items()}
        tried: set[Any] = set()
        for region in self.routed:
            experts = self.routed[region]
            refuse_row_dependence(self.passes[region, "F"], *found[region, "F"], self.names, experts, tried)
        split: Extracted = {}
        for region, by_kind in self.parts.items():
            if len(by_kind) == 1:
                split |= {part.key: found[region, "B"] for part in by_kind.values()}
            else:
                split |= {part.key: extracted(part) for part in by_kind.values()}
        return {key: p[0] for key, p in found.items()}, {key: p[1] for key, p in found.items()}, split

    def of_member(self, propagations: Sequence[Propagation]) -> GraphCut:
        """Return the same passes as one rank runs them, on its shards, in a new graph.

        Args:
            propagations: The placements of the graph's values, one for each axis.
        """
        cut, copies = self.copied()
        for propagation in propagations:
            held = {copies[x]: placement for x, placement in propagation.held.items() if x in copies}
            for x, copy in copies.items():
                if copy not in held:  # an operation that `cut` has added
                    held[copy] = dict(x.meta.get(PLACEMENTS, ())).get(propagation.division.axis, Replicated())
            localize(cut.graph, held, propagation.degree)
        return cut

    def copied(self) -> tuple[GraphCut, Mapping[Node, Node]]:
        """Return a copy with a new graph, and node -> its copy."""
        graph, copies = Graph(self.graph.owning_module), dict[Node, Node]()
        copy_into(graph, self.graph, copies)

        def copied(p: RegionPass) -> RegionPass:
            def of(nodes: Iterable[Node]) -> list[Node]:
                return [copies[x] for x in nodes]

            return RegionPass(
                p.key,
                of(p.nodes),
                [(out, of(nodes)) for out, nodes in p.outputs],
                dict.fromkeys(of(p.reads)),
                {ref: of(nodes) for ref, nodes in p.inputs.items()},
            )

        cut = replace(
            self,
            graph=graph,
            passes={key: copied(p) for key, p in self.passes.items()},
            parts={region: {kind: copied(p) for kind, p in by.items()} for region, by in self.parts.items()},
            names=self.names.renamed(copies),
            state=frozenset(copies[x] for x in self.state),
        )
        return cut, copies


def cut(
    weighed: WeightedStep,
    canonical: Mapping[str, str],
    routed: Mapping[int, Routed] | None = None,
    recomputed: Sequence[Recomputation] = (),
) -> GraphCut:
    """Cut a joint graph into passes. Sums and weights of parameter gradients are added to the graph.

    Args:
        weighed: a traced step. Its graph gets additional nodes.
        canonical: each name of a parameter or buffer -> its canonical name.
        routed: the `Routed` regions, if the graph has only shards of their parameters. By default, the
            function finds these regions in the graph.
        recomputed: the user's choices of values that backward passes compute again. A choice with a memory
            budget stores its result in `Recomputation.chosen`.

    Raises:
        CaptureError: Passes cannot run an operation of the step. For example, the step changes a parameter in
            place, or the gradient of a parameter is sparse.
    """
    graph, plain = weighed.graph, weighed.plain
    names = PlaceholderNames.of(graph, canonical, weighed.tangents)
    results = graph.output_node()
    described = list(zip(results.args[0], results.meta["desc"], strict=True))  # type: ignore[arg-type]
    changed = changed_buffers(described, canonical)
    _refuse_changed_parameters(described, canonical)
    # The placeholders of buffers that the step changes.
    state = frozenset(n for n, name in names.buffers.items() if name in changed)
    assignment = assign(graph, state)
    passes = {(r.index, p): RegionPass((r.index, p)) for r in assignment.regions for p in "FB"}
    for node in graph.nodes:
        if node in assignment.of and node not in assignment.shared:
            passes[assignment.of[node], "B" if _torch.is_backward(node) else "F"].nodes.append(node)

    if routed is None:
        routed = routed_of(passes, names.params, assignment.shared)
    _results(described, names, changed, assignment, passes, plain, routed)
    if weighed.weight is not None:
        _weigh_gradients(weighed.weight, names, passes, assignment)
    forward = {key for key, p in passes.items() if key[1] == "F" and p.nodes}
    _drop_unused(passes)
    _refuse_read_terms(assignment)
    check_names(passes, assignment.regions, recomputed)
    parts = _connect(assignment, passes, state, recomputed)
    forward = forward or {(0, "F")}  # a step that computes nothing still has one pass
    passes = {key: p for key, p in passes.items() if p.nodes or p.outputs or key in forward}
    return GraphCut(graph, assignment.regions, passes, parts, routed, names, state)


def _refuse_changed_parameters(
    described: list[tuple[Node | None, Any]], canonical: Mapping[str, str]
) -> None:
    """Check that the step changes no parameter in place. `described` pairs each output of the graph with its
    description.

    Raises:
        CaptureError: The step changes a parameter in place.
    """
    for node, desc in described:
        if isinstance(desc, _torch.InputMutationAOTOutput) and isinstance(
            desc.mutated_input, _torch.ParamAOTInput
        ):
            name = canonical[desc.mutated_input.target.removeprefix("module.")]
            raise CaptureError(
                f"{'the step' if node is None else own_line(node)}: the step changes the parameter {name} in place. In a "
                "captured step only the optimizer changes parameters. Change it in a hook, such as on_train_batch_start. "
                "If the program shards the parameter, change the shards in trainer.optimizers[0].param_groups there "
                "[PIPER-C003]"
            )


def _refuse_read_terms(assignment: RegionAssignment) -> None:
    """Check that only later passes read the result of an operation that runs between two passes (`BORDERS`).

    For example, a pass computes one term of a sum over the whole batch, and only a later pass receives the
    sum.

    Raises:
        CaptureError: The pass that computes the term reads the sum, or the step returns the sum. Or the pass
            before an exchange along an axis reads the result of the exchange, or the step returns it.
    """
    for node in assignment.of:
        for user in [x for x in node.users if x.target is not CHANGE] if node.target in BORDERS else ():
            here = (
                user in assignment.of
                and assignment.of[user] == assignment.of[node]
                and _torch.is_backward(user) == _torch.is_backward(node)
            )
            if here or user.op == "output":
                what = (
                    "the sum over the whole batch"
                    if node.target is TOTAL
                    else f"the result of the exchange along {node.args[1]!r}"
                )
                problem = (
                    f"the step returns {what} directly, but only a later region gets this result. Return a "
                    "value computed from it (total * 1.0)"
                    if user.op == "output"
                    else f"the region that contributes to {what} also reads it. Annotate the code that reads it "
                    "as a later region"
                )
                raise CaptureError(f"{own_line(node)}: {problem} [PIPER-C021]")


def _results(
    described: list[tuple[Node | None, Any]],
    names: PlaceholderNames,
    changed: Mapping[str, Node],
    assignment: RegionAssignment,
    passes: Mapping[PassKey, RegionPass],
    plain: Sequence[Output],
    routed: Mapping[int, Routed],
) -> None:
    """Add every result of the step to the outputs of the pass that computes it.

    Results are the loss, logged values, arguments of metric objects, returned tensors, new values of buffers,
    and gradients of parameters. Three kinds of results have their own rule:

    - If several regions compute terms of a gradient, each of these regions outputs the sum of its own terms.
    - All arguments of one metric object are outputs of the latest region that computes one of them.
    - A result without a region is an output of the last region.

    Args:
        described: each result of the graph with its descriptor. The result is None for a missing gradient.
        changed: canonical name -> new value of a buffer.
        plain: the outputs of the traced function (`WeightedStep.plain`). `PlainAOTOutput.idx` is an index
            into them.

    Raises:
        CaptureError: The gradient of a parameter is sparse.
    """
    # region -> name -> node, or the terms of a gradient
    buffers: dict[int, dict[str, Node]] = {}
    results: dict[int, dict[str, Node]] = {}
    grads: dict[int, dict[str, list[Node]]] = {}
    # metric object -> argument -> node: all arguments of an object leave the same region
    arguments: dict[str, dict[str, Node]] = {}
    trained = {x.meta["desc"]: name for x, name in names.params.items()}
    for node, desc in described:
        if node is None:
            continue
        if isinstance(desc, _torch.PlainAOTOutput):
            output = plain[desc.idx]
            if output.kind == Kind.RESULT:
                results.setdefault(_region_of(node, assignment), {})[output.names[0]] = node
            elif output.kind == Kind.ARGUMENT:
                arguments.setdefault(object_of(output.names[0]), {})[output.names[0]] = uncopied(node)
            else:
                passes[_region_of(node, assignment), "F"].outputs.append((output, [node]))
        elif isinstance(desc, _torch.GradAOTOutput):
            param = trained.get(desc.grad_of)
            if param is None:
                # the gradient of a batch tensor with `requires_grad_`, which the step does not return
                continue
            if node.meta["val"].layout is not torch.strided:
                raise CaptureError(
                    f"the gradient of {param} is sparse, but Piper sends and sums only dense gradients. "
                    "Create the embedding with sparse=False (torch.gather: sparse_grad=False). If the optimizer is SparseAdam, use "
                    "Adam [PIPER-C017]"
                )
            for term in gradient_terms(node, assignment.of):
                grads.setdefault(_region_of(term, assignment), {}).setdefault(param, []).append(term)
    for name, node in changed.items():
        buffers.setdefault(_region_of(node, assignment), {})[name] = node
    for kind, by_region in ((Kind.BUFFER, buffers), (Kind.RESULT, results)):
        for region, by_name in by_region.items():
            passes[region, "F"].outputs.append((Output(kind, tuple(by_name)), list(by_name.values())))
    for by_name in arguments.values():
        regions = [assignment.of[node] for node in by_name.values() if node in assignment.of]
        region = max(regions, default=len(assignment.regions) - 1)
        passes[region, "F"].outputs.append((Output(Kind.ARGUMENT, tuple(by_name)), list(by_name.values())))
    users: dict[str, set[int]] = {}  # parameter -> regions that compute a gradient of it
    for region, by_param in grads.items():
        for param in by_param:
            users.setdefault(param, set()).add(region)
    for region, by_param in grads.items():
        # A bundle holds gradients of parameters that the same regions use, so that no gradient waits for the
        # gradient of a tied parameter. Parameters that a `shard_experts` may divide are not in one bundle with other
        # parameters, because their gradients may be on other devices. The key of a bundle: whether a `shard_experts`
        # may divide its parameters, the regions that use them, and the placements of the gradients.
        bundles: dict[tuple[bool, tuple[int, ...], tuple[tuple[str, Placement], ...]], list[str]] = {}
        for param, terms in by_param.items():
            apart = region in routed and param in routed[region].params
            held = terms[0].meta.get(PLACEMENTS, ())
            # In a bundle of gradients, `Sharded(0)` stands for a shard along each parameter's own dimension.
            held = tuple((axis, Sharded(0) if isinstance(p, Sharded) else p) for axis, p in held)
            bundles.setdefault((apart, tuple(sorted(users[param])), held), []).append(param)
        for (*_, held), params in bundles.items():
            merged = [_sum(by_param[param], passes[region, "B"], assignment) for param in params]
            passes[region, "B"].outputs.append((Output(Kind.GRAD, tuple(params), held=held), merged))


def _region_of(node: Node, assignment: RegionAssignment) -> int:
    """Return the index of the region whose pass outputs a result.

    Nodes without a region (placeholders, and views and constants in `RegionAssignment.shared`) are outputs of
    the last region.
    """
    return assignment.of.get(node, len(assignment.regions) - 1)


def _sum(terms: list[Node], into: RegionPass, assignment: RegionAssignment) -> Node:
    """Return the node of the sum of a parameter's gradient terms in one region.

    The additions become nodes of the joint graph and of the pass `into`, and are added to `assignment.of`. A
    single term is returned unchanged.
    """
    total = terms[0]
    for term in terms[1:]:
        graph = total.graph
        with graph.inserting_after(max(total, term)):
            added = graph.call_function(aten.add.Tensor, (total, term))
        added.meta = {
            "val": total.meta["val"],
            "partitioner_tag": "is_backward",
            PLACEMENTS: total.meta.get(PLACEMENTS, ()),
        }
        assignment.of[added] = into.key[0]  # type: ignore[index]
        into.nodes.append(added)
        total = added
    return total


def _weigh_gradients(
    weight: Node, names: PlaceholderNames, passes: Mapping[PassKey, RegionPass], assignment: RegionAssignment
) -> None:
    """Multiply the parameter gradients by `weight` divided by the gradient of the loss. The products replace
    the gradients in the outputs of their passes.

    This is for a step with `StepCode.weighs_gradients`. There, the backward pass of each part of the batch
    starts with the same gradient of the loss. `weight` is the product of this gradient and the weight of the
    part, so the division leaves the weight of the part.
    """
    loss, graph = next(x for x in names.tangents if x is not weight), weight.graph
    for p in passes.values():
        for _, _, nodes in p.bundles(Kind.GRAD):
            with graph.inserting_before(graph.output_node()):
                share = graph.call_function(aten.div.Tensor, (weight, loss))
                made = [graph.call_function(aten.mul.Tensor, (node, share)) for node in nodes]
            share.meta = {"val": loss.meta["val"], "partitioner_tag": "is_backward"}
            for node, new in zip(nodes, made, strict=True):
                new.meta = {
                    "val": node.meta["val"],
                    "partitioner_tag": "is_backward",
                    PLACEMENTS: node.meta.get(PLACEMENTS, ()),
                }
            for new in (share, *made):
                assignment.of[new] = p.key[0]  # type: ignore[index]
                p.nodes.append(new)
            nodes[:] = made


def _drop_unused(passes: Mapping[PassKey, RegionPass]) -> None:
    """Remove each node on which no output depends from its pass. Otherwise other passes would send values that
    only these nodes read.

    The removed nodes are unused operations of the user, and the additions of gradients that `_results` has
    split into terms. Such an addition would make a pass send the gradient of a tied weight with every
    microbatch.
    """
    used: set[Node] = set()
    stack = [node for p in passes.values() for _, nodes in p.outputs for node in nodes]
    while stack:
        node = stack.pop()
        if node not in used:
            used.add(node)
            stack += node.all_input_nodes
    for p in passes.values():
        p.nodes = [node for node in p.nodes if node in used]


def _connect(
    assignment: RegionAssignment,
    passes: Mapping[PassKey, RegionPass],
    state: frozenset[Node],
    recomputed: Sequence[Recomputation],
) -> dict[int, dict[str, RegionPass]]:
    """Find the values that each pass reads from other passes. Add each value to the outputs of the pass that
    computes it, and to the inputs of the passes that read it.

    The function sets `reads`, `inputs` and the further `outputs` of all passes.

    Returns:
        Region -> {"BI": pass, "BW": pass}, or only one of the two (see `split_backward`). Regions whose
        backward pass outputs nothing are missing.
    """
    # (value, pass that computes it, exchange) -> passes that read it, except from a saved bundle
    crossing: dict[tuple[Node, PassKey, str], list[PassKey]] = {}
    # Region -> values that its forward pass saves for its backward pass: the forward pass computed or
    # received them.
    kept: dict[int, dict[Node, None]] = {}
    shared: dict[int, Collection[Node]] = {}  # region -> nodes that its backward pass computes itself
    for (region, kind), p in passes.items():
        p.reads = reads_of(p.nodes, p.outputs, assignment.shared)
        if kind == "B":
            again = recomputed_nodes(
                assignment.regions[region], passes[region, "F"], p, assignment.shared, recomputed
            )
            shared[region] = assignment.shared | again if again else assignment.shared
            p.reads = reads_of(p.nodes, p.outputs, shared[region]) if again else p.reads
        for node in p.reads:
            if kind == "B" and _saved_by(node, region, passes, assignment, state):
                kept.setdefault(region, {})[node] = None
            elif node in assignment.of:
                source = (assignment.of[node], "B" if _torch.is_backward(node) else "F")
                exchange = _exchange(assignment.regions[source[0]], assignment.regions[region])
                crossing.setdefault((node, source, exchange), []).append((region, kind))
    order = {node: i for i, node in enumerate(assignment.of)}
    taken: dict[PassKey, list[OutputRef]] = {}  # pass -> the bundles that it receives from other regions
    for node, source, exchange in sorted(crossing, key=lambda item: (order[item[0]], item[2])):
        kind = Kind.COTANGENT if source[1] == "B" else Kind.ACTIVATION
        for reader in crossing[node, source, exchange]:
            taken.setdefault(reader, []).append((*source, len(passes[source].outputs)))
        held = unchanged(node).meta.get(PLACEMENTS, ())
        out = Output(
            kind,
            (node.name,),
            partial=node.target is TOTAL,
            exchange=exchange,
            held=held,
            changes=changes_of(node),
        )
        passes[source].outputs.append((out, [node]))
    backward = {region: p for (region, kind), p in passes.items() if kind == "B" and p.outputs}
    parts: dict[int, dict[str, RegionPass]] = {}
    for region, p in backward.items():
        parts[region] = split_backward(p, shared[region], kept.get(region, {}))
        save_values(passes[region, "F"], parts[region], kept.get(region, {}))
    for region, p in backward.items():
        wire_inputs(p, parts[region], passes, taken.get(p.key, ()))
    for key, p in passes.items():
        if key[1] == "F":
            p.take(taken.get(key, ()), passes)
    return parts


def _exchange(source: Region, reader: Region) -> str:
    """Return the exchange (`Output.exchange`) for a value that `reader` reads from `source`.

    This is `gather` if only the reader works on the whole batch, and `scatter` if only the source works on
    the whole batch. In all other cases, this is "".
    """
    if source.joined == reader.joined:
        return ""
    return "gather" if reader.joined else "scatter"


def _saved_by(
    node: Node,
    region: int,
    passes: Mapping[PassKey, RegionPass],
    assignment: RegionAssignment,
    state: frozenset[Node],
) -> bool:
    """Return whether the forward pass of `region` saves the value `node` for the region's backward pass.

    The forward pass saves forward values that it computes or receives, and old values of buffers that the
    step changes. It does not save backward values, or results of `BORDERS`, which the training DAG computes
    after the forward pass.
    """
    if _torch.is_backward(node) or node.target in BORDERS:
        return False
    if node in assignment.of:
        return assignment.of[node] == region or node in passes[region, "F"].reads
    return node in state  # the buffer's value before this step changes it
