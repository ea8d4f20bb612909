"""Choose the placement of each value in a joint graph whose parameters and values are sharded over an axis of
devices, and insert placement changes.

    h[R] -> mm with W[S(1)] -> [S(1)] -> gelu -> [S(1)] -> mm with V[S(0)] -> [P] --change--> [R] -> + x[R]

Operations keep their order and their values. Some operations cannot work on the partial sums or shards that
they read. Several other operations then replace such an operation. For example, a product and the addition of
the bias replace `addmm`. The changed graph still computes with whole tensors. `placements.local_graph` makes
the graph of one rank from it, with the same nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.capture.joint.region_assignment import VIEWS, own_line, settle_glue, source_line
from lightning_piper.capture.joint.region_passes import PlaceholderNames
from lightning_piper.capture.tensor_sharding.constraints import constraint_lookup, label_of
from lightning_piper.capture.tensor_sharding.decompositions import Decomposer
from lightning_piper.capture.tensor_sharding.parameter_norms import postpone_norms
from lightning_piper.capture.tensor_sharding.placement_changes import PlacementWriter, make_like
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import PERMUTATIONS, RESHAPES
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Division
from lightning_piper.ir.values import Partial, Placement, Replicated, Sharded
from lightning_piper.placements.attention import ATTENTION, attended
from lightning_piper.placements.choice import choose
from lightning_piper.placements.chunked_scores import SCORES_OF
from lightning_piper.placements.placement_changes import CHANGE, PLACEMENTS, PlacementMap, change_of
from lightning_piper.placements.proof import prove
from lightning_piper.placements.rule import Rule, made_by, operation_key, shape_of, tensors_of
from lightning_piper.placements.rules import rules_for

aten = torch.ops.aten
R, P = Replicated(), Partial()
CAST = aten._to_copy.default  # the operation with which autocast casts parameters
PRODUCTS = {aten.mm.default, aten.addmm.default}


def propagate_placements(
    graph: Graph, divisions: Sequence[Division], names: PlaceholderNames
) -> list[Propagation]:
    """Give every value of a joint graph a placement along each axis, and store the placements in the metadata
    of the nodes (`PLACEMENTS`). The graph is changed in place.

    Args:
        divisions: one for each axis; at least one.
        names: the meaning of the graph's placeholders.

    Returns:
        The finished propagation of each division, in the same order.

    Raises:
        CaptureError: an operation cannot work on a shard of a parameter, or two axes would shard the same
            dimension of a value.
    """
    propagations: list[Propagation] = []
    for division in divisions:
        Propagation(graph, division, names, axes=propagations)
    propagate(graph, propagations)
    _check_apart(graph, propagations)
    return propagations


def propagate(graph: Graph, propagations: Sequence[Propagation]) -> None:
    """Give every value of a joint graph a placement along the axes of these propagations. The graph is
    changed in place.

    Args:
        propagations: new propagations along all axes of the graph; at least one.

    Raises:
        CaptureError: an operation cannot work on a shard of a parameter.
    """
    settle_glue(graph)
    postpone_norms(graph, propagations[0].names)
    for node in list(graph.nodes):
        propagations[0].place(node)
    for node in graph.nodes:
        held = {propagation.division.axis: propagation.held[node] for propagation in propagations}
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta[PLACEMENTS] = tuple(sorted((axis, each) for axis, each in held.items() if each != R))


def _check_apart(graph: Graph, propagations: Sequence[Propagation]) -> None:
    """Check that no two axes shard the same dimension of a value, because the order of the two shardings is
    not defined.

    Raises:
        CaptureError: two axes shard the same dimension of a value. The message names the operation that
            computes the value, and its line.
    """
    for node in graph.nodes if len(propagations) > 1 else ():
        for propagation in propagations:
            mine, change = {propagation.held[node]}, change_of(node)
            if change is not None and change.axis == propagation.division.axis:
                mine.add(change.before)
            both = {held.dim for held in mine if isinstance(held, Sharded)} & propagation.elsewhere(node)
            if both:
                axes = " and ".join(repr(each.division.axis) for each in propagations)
                made = node if change is None else node.all_input_nodes[0]
                raise CaptureError(
                    f"{own_line(node)}: dimension {min(both)} of {made.target} would be sharded along {axes} "
                    "at once. Shard another dimension of one of the weights that this operation reads [PIPER-C019]"
                )


class Propagation:
    """The placements of a graph's values along one axis.

    `place` sets the placements of one node after another, in the order of the graph. All later decisions use
    the placements of earlier nodes.

    Args:
        seek: Weights that may be sharded, by canonical name -> the number of runs of a shard
            (default: no weights; only the division shards parameters).
        axes: The propagations along all axes of this graph. This propagation is appended. By default, this
            axis is the only one.

    Attributes:
        held: The placement of each value along the axis. An operation with several results has a tuple of
            placements. A node that was not placed yet has R.
        fixed: Parameters, and views of parameters.
        free: Parameters whose placement is not chosen yet, and views of these parameters.
        sought: Weights of `seek` whose placement is not chosen yet, and views of these weights, each with its
            number of runs.
        views: Views of free parameters -> the parameter or view that they read.
        gathered: (sharded value, operation) for each operation of the forward pass that reads a sharded value
            replicated.
        scattered: (partial sum, shard) for each operation of the forward pass that reads a partial sum as a shard
            which the user does not declare.
        refused: Names of the sharded parameters on whose shards an operation cannot work, after `place` has
            raised an error.
        gone: Replaced operation -> the node that replaces it, or one node for each of its results. All axes
            share this dict.
        along: (number of dimensions, shard) of each value that the user shards (`Division.values`).
    """

    def __init__(
        self,
        graph: Graph,
        division: Division,
        names: PlaceholderNames,
        seek: Mapping[str, int] | None = None,
        axes: list[Propagation] | None = None,
    ) -> None:
        seek = seek or {}
        self.axes = [] if axes is None else axes
        self.axes.append(self)
        self.held = PlacementMap()
        self.graph, self.division, self.degree = graph, division, division.degree
        self.names, self.batch = dict(names.params), names.batch
        self.fixed: set[Node] = set(self.names)
        # The sharding of a weight decides the sharding of its bias: a vector without a declared placement
        # takes the placement that its first reader needs.
        unsaid = {x: name for x, name in self.names.items() if name not in division.params}
        self.free = {x for x, name in unsaid.items() if len(shape_of(x)) == 1 or name in seek}
        self.sought = {x: seek[name] for x, name in unsaid.items() if name in seek}
        self.views: dict[Node, Node] = {}
        self.gathered: list[tuple[Node, Node]] = []
        self.scattered: list[tuple[Node, Sharded]] = []
        self.refused: list[str] = []
        self.gone: dict[Node, Any] = {} if len(self.axes) == 1 else self.axes[0].gone
        said = set(division.values.values())
        self.changes = PlacementWriter(graph, division.axis, division.degree, self.held, said, self._beside)
        self._pinned = constraint_lookup(graph, division.values)
        self.along: set[tuple[int, Sharded]] = set()
        self._rules: dict[tuple[object, ...], Rule] = {}  # `_situation` -> the rule, which is proved
        self.decomposer = Decomposer(graph, division, self.held, self.gone, self.place, self.changes.changed)

    @property
    def params(self) -> dict[str, Sharded]:
        """Canonical name -> shard of each sharded parameter that the graph reads: parameters that the division
        names, weights of `seek`, and biases that follow from their weights."""
        placed = ((name, self.held[x]) for x, name in self.names.items() if x.users)
        return {name: placement for name, placement in placed if isinstance(placement, Sharded)}

    def place(self, node: Node) -> None:
        """Set the placements of a node's results along all axes.

        First, the rules of its operation decide, which may insert changes of its inputs or replace the
        operation. Then its readers get a change if the user declares another placement for this value, or if
        it is the gradient of gathered keys or values.

        Raises:
            CaptureError: no rule allows the placements of its inputs, or a declared shard is not even.
        """
        for propagation in self.axes:
            if node.op == "output":
                propagation._results(node)
            elif node.op != "call_function":
                propagation.held[node] = propagation.division.params.get(propagation.names.get(node, ""), R)
            elif node not in self.gone:
                propagation._operation(node)
        made = self.gone.get(node, node)  # the node itself, or the node that replaced it
        for propagation in self.axes:
            if isinstance(made, Node) and made.op == "call_function" and made.target is not CHANGE:
                propagation._hand_out(made)

    def _beside(self, node: Node) -> None:
        """Set the placements, along the other axes, of a node that was inserted for this axis: a change, or a
        view before or after a change."""
        for propagation in self.axes:
            if propagation is not self:
                propagation._operation(node)

    def _operation(self, node: Node) -> None:
        """Set the placement of an operation's results along this axis, and change the placements of inputs
        for which the chosen rule needs another placement. Several operations may replace the operation.

        A view or cast of a parameter whose placement is not chosen yet gets none either: it joins `free`.

        Raises:
            CaptureError: no rule allows the placements of its inputs.
        """
        if node.target is CHANGE:  # a change along another axis
            self.held[node] = self.held[node.all_input_nodes[0]]
            return
        inputs = tensors_of(node)
        if not inputs:
            self.held[node] = self._as_made(node)
            return
        if inputs[0] in self.free and (
            node.target is CAST or (node.target in PERMUTATIONS and inputs[0] in self.sought)
        ):
            # The reader of the transposed or converted weight decides how the weight is sharded.
            self.views[node] = inputs[0]
            self.fixed.add(node)
            self.free.add(node)
            if inputs[0] in self.sought:
                self.sought[node] = self.sought[inputs[0]]
            return
        # A change before a view serves all products that read the view.
        if node.target in RESHAPES and self._is_for_columns(node):
            node.replace_input_with(inputs[0], self.changes.changed(inputs[0], R, node))
        elif node.target in RESHAPES and (part := self._is_for_rows(node)) is not None:
            node.replace_input_with(inputs[0], self.changes.changed(inputs[0], part, node))
        # If an earlier reader needed the sum of partial sums, this reader also reads the sum.
        for x in tensors_of(node):
            if self.held[x] == P and (total := self.changes.made(x, R, node)) is not None:
                node.replace_input_with(x, total)
        inputs = tensors_of(node)
        # Shard a vocabulary along its rows, because the lookup has a decomposition for this.
        if node.target is aten.embedding.default and self._is_vocabulary(node):
            self._settle(inputs[0], Sharded(0))
        if node.target is SCORES_OF:
            self._settle_classes(node)
        if self.decomposer.write(node):
            return
        if self._without_bias(node):
            return
        situation = self._situation(node, inputs)
        rule = known = self._rules.get(situation)
        if rule is None:
            sought = self.sought if node.target in PRODUCTS else {}
            about = (self.degree, self.fixed, self.free, self.along, sought)
            rule = choose(node, self.held, self.elsewhere, *about, self.division.attention)
        if rule is None:
            raise self._refusal(node)
        # Give each input the placement of the rule: choose it for a free parameter, change it for a value.
        for x, wanted in dict(zip(inputs, rule.inputs, strict=True)).items():
            if x in self.free:
                self._settle(x, wanted)
            elif self.held[x] != wanted:
                if not (_torch.is_backward(node) or self.decomposer.writes):
                    self._note_change(x, wanted, node)
                node.replace_input_with(x, self.changes.changed(x, wanted, node))
        if self.decomposer.write(node):  # try again, because the node may read shards after the changes
            return
        if known is None:
            prove(node, rule, self.degree)
            self._rules[situation] = rule
        self.held[node] = rule.outputs if isinstance(node.meta.get("val"), list | tuple) else rule.outputs[0]
        if node.target in VIEWS and all(x in self.fixed for x in inputs):
            self.fixed.add(node)

    def _situation(self, node: Node, inputs: Sequence[Node]) -> tuple[object, ...]:
        """Return all that the choice of a rule for an operation depends on: the operation, and for each of its
        inputs the placements along all axes and whether Piper may choose them. Layers that repeat have equal
        situations, so Piper chooses and proves a rule once for all of them."""
        made = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else None for x in made_by(node))
        others = [each.held for each in self.axes if each is not self]
        along_others = tuple(held.get(x) for held in others for x in (*inputs, node))
        about = tuple((self.held[x], x in self.fixed, x in self.free, self.sought.get(x)) for x in inputs)
        return operation_key(node, inputs), made, about, along_others, frozenset(self.along)

    def _note_change(self, x: Node, wanted: Placement, reader: Node) -> None:
        """Record that an operation of the forward pass reads a shard replicated, or a partial sum as a shard."""
        if isinstance(self.held[x], Sharded) and wanted == R:
            self.gathered.append((x, reader))
        if self.held[x] == P and isinstance(wanted, Sharded) and (len(shape_of(x)), wanted) not in self.along:
            self.scattered.append((x, wanted))

    def elsewhere(self, node: Node) -> set[int]:
        """Return the dimensions of a value that axes other than this one shard; empty if there are none."""
        others = [propagation.held.get(node) for propagation in self.axes if propagation is not self]
        return {held.dim for held in others if isinstance(held, Sharded)}

    def _is_vocabulary(self, node: Node) -> bool:
        """Return whether the embedding `node` looks up rows of a weight that this axis may shard evenly, by
        indices from the batch, without options other than a padding index.

        Indices that the step computes without the batch are positions. Tables of positions are too small to
        be worth a sum over the ranks.
        """
        table, index, *options = node.args
        if table not in self.sought or any(options[1:]) or shape_of(table)[0] % self.degree:  # type: ignore[arg-type]
            return False
        stack = [index]
        while stack:
            x: Any = stack.pop()
            if x in self.batch:
                return True
            stack += x.all_input_nodes
        return False

    def _settle_classes(self, node: Node) -> None:
        """Shard the weight of `chunked_scores` along the classes, if the axis may shard it evenly. The bias of a
        sharded weight follows. The operation has a decomposition for this."""
        weight, bias = node.args[1:3]
        if weight in self.sought and not shape_of(weight)[0] % self.degree:  # type: ignore[arg-type]
            self._settle(weight, Sharded(0))  # type: ignore[arg-type]
        if bias in self.free and self.held[weight] == Sharded(0):  # type: ignore[index]
            self._settle(bias, Sharded(0))  # type: ignore[arg-type]

    def _is_for_columns(self, view: Node) -> bool:
        """Return whether the source of this view should be replicated before the view.

        This is so if the source is sharded, but not along its last dimension, the view keeps the last
        dimension, and a product with a column-sharded weight reads the view. One change before the view then
        serves all such products.
        """
        (x,) = tensors_of(view)
        if not isinstance(self.held[x], Sharded) or x in self.fixed or shape_of(x)[-1] != shape_of(view)[-1]:
            return False
        if self.held[x] == Sharded(len(shape_of(x)) - 1):
            return False
        rights = [user.args[-1] for user in view.users if user.target in PRODUCTS and user.args[-2] is view]
        return any(self._has_columns(y) for y in rights if isinstance(y, Node))

    def _is_for_rows(self, view: Node) -> Sharded | None:
        """Return the shard to which the source of this view should change before the view. In all cases other than
        the following, return None.

        The source is sharded along its last dimension, the view keeps this dimension, and products read the
        view, all with replicated weights. These products need the whole last dimension. The result is a shard
        along another dimension that the user has declared for values with the same number of dimensions, and
        that is even. So the source stays sharded.
        """
        (x,) = tensors_of(view)
        last = len(shape_of(x)) - 1
        if self.held[x] != Sharded(last) or x in self.fixed or shape_of(x)[-1] != shape_of(view)[-1]:
            return None
        rights = [user.args[-1] for user in view.users if user.target in PRODUCTS and user.args[-2] is view]
        if not rights or not all(isinstance(y, Node) and self._is_whole(y) for y in rights):
            return None
        shape = shape_of(x)
        parts = sorted((part for rank, part in self.along if rank == last + 1 and part.dim != last), key=str)
        return next((part for part in parts if not shape[part.dim] % (self.degree * part.blocks)), None)

    def _is_whole(self, y: Node) -> bool:
        """Return whether the factor `y` of a product is a replicated parameter, or a view of one."""
        while y.target in PERMUTATIONS or y.target is CAST:
            y = y.all_input_nodes[0]
        return y in self.names and y not in self.sought and self.held[y] == R

    def _along(self, x: Any) -> int | None:
        """Return the dimension along which a value is sharded. Return None if the value is replicated or a
        partial sum."""
        placement = self.held[x]
        return placement.dim if isinstance(placement, Sharded) else None

    def _has_columns(self, y: Node) -> bool:
        """Return whether the factor `y` of a product is sharded along its columns, and is a parameter or a
        transposed or cast parameter. Also return True if `y` is in `sought`, whose placement is not chosen
        yet."""
        turned = False
        while y.target in PERMUTATIONS or y.target is CAST:
            y, turned = y.all_input_nodes[0], turned != (y.target in PERMUTATIONS)
        return y in self.sought or (y in self.names and self._along(y) == (0 if turned else 1))

    def _settle(self, x: Node, wanted: Placement) -> None:
        """Set the placement of a parameter in `free`, and of all of its views. `x` is the parameter or one of
        its views, and `wanted` is the placement of `x`."""
        if x in self.views:
            turned = next(
                rule for rule in rules_for(x, self.degree, _blocks(wanted)) if rule.outputs == (wanted,)
            )
            self._settle(self.views[x], turned.inputs[0])
            return
        self.held[x] = wanted
        self.free.discard(x)
        self.sought.pop(x, None)
        for view, source in list(self.views.items()):
            if source is x:
                del self.views[view]
                rule = next(
                    rule for rule in rules_for(view, self.degree, _blocks(wanted)) if rule.inputs == (wanted,)
                )
                self._settle(view, rule.outputs[0] or R)

    def _as_made(self, node: Node) -> Any:
        """Return the placement of a node without tensor inputs. For a `getitem`, it is the placement of one
        result of its operation. Any other node is replicated: R, or a tuple of R for several results."""
        if node.all_input_nodes and isinstance(held := self.held[node.all_input_nodes[0]], tuple):
            return held[int(node.args[1])]  # type: ignore[arg-type]
        count = len(made_by(node))
        return (R,) * count if isinstance(node.meta.get("val"), list | tuple) else R

    # Operations that several operations replace.

    def _without_bias(self, node: Node) -> bool:
        """If the ranks' products are partial sums, replace `addmm` by a product and an addition, so that the
        bias is added once, to the sum. Return whether the node was replaced.

        If a view is the only reader of the `addmm` and keeps the last dimension, the addition comes after the
        view.
        """
        if node.target is not aten.addmm.default or node.kwargs:
            return False
        bias, x, y = node.args
        # Whether `y` is sharded along its rows, or will be sharded so because `x` is sharded along its columns.
        rows = self._along(y) == 0 or (y in self.sought and self._along(x) == 1)
        if not rows:
            return False
        users = list(node.users)
        viewed = (
            users[0]
            if len(users) == 1
            and users[0].target in RESHAPES
            and shape_of(users[0])[-1] == shape_of(node)[-1]
            else None
        )
        last = node if viewed is None else viewed
        with self.graph.inserting_before(last):
            made = make_like(self.graph, node, aten.mm.default, (x, y))
            self.place(made)
            if viewed is not None:  # add in the view's shape, in which the user may shard the value
                made = make_like(self.graph, viewed, viewed.target, (made, viewed.args[1]))
                self.place(made)
            total = make_like(self.graph, last, aten.add.Tensor, (made, bias))
        last.replace_all_uses_with(total)
        self.graph.erase_node(last)
        self.gone |= {last: total, node: total}
        if viewed is not None:
            self.graph.erase_node(node)
        self.place(total)
        return True

    def _pin(self, node: Node) -> None:
        """If the user declares a shard for the node's value (`Division.values`), let all readers read the value
        with this placement. Parameters and their views are left unchanged.

        Raises:
            CaptureError: the ranks cannot have equal shards.
        """
        wanted = self._pinned(node)
        if wanted is None or node in self.fixed:
            return
        shape = shape_of(node)
        self.along.add((len(shape), wanted))
        if self.held[node] == wanted:
            return
        if shape[wanted.dim] % (self.degree * wanted.blocks):
            runs = f" in each of its {wanted.blocks} runs" if wanted.blocks > 1 else ""
            raise CaptureError(
                f"{source_line(node)}: {label_of(node)} outputs a value of shape {list(shape)}, whose "
                f"dimension {wanted.dim} cannot be sharded evenly{runs} over the {self.degree} devices along "
                f"{self.division.axis!r}. Pad it, or shard another dimension [PIPER-C019]"
            )
        self._hand_on(node, wanted)

    def _hand_out(self, node: Node) -> None:
        """Insert a change after a value if the user declares a placement for it, or if it is the gradient of
        gathered keys or values."""
        if tensors_of(node):
            self._pin(node)
        else:
            self._sum_of_keys(node)

    def _sum_of_keys(self, node: Node) -> None:
        """Reduce-scatter the gradients of gathered keys and values along the positions, if the positions can
        be sharded evenly. Do nothing for any other node.

        If the queries are sharded along the positions, the gradients get the same shard. Otherwise they get
        contiguous shards.
        """
        if (
            self.held[node] != P
            or node.target is not operator.getitem
            or node.all_input_nodes[0].target not in ATTENTION
        ):
            return
        queries = self.held[attended(node.all_input_nodes[0])[0]]
        part = queries if isinstance(queries, Sharded) and queries.dim == 2 else Sharded(2)
        if shape_of(node)[2] % (self.degree * part.blocks) == 0:
            self._hand_on(node, part)

    def _hand_on(self, node: Node, wanted: Placement) -> None:
        """Insert a change after a value, so that all its readers read it with the placement `wanted`."""
        users = list(node.users)
        with self.graph.inserting_after(node):
            change = self.changes.changed(node, wanted, node.next)
        for user in users:
            user.replace_input_with(node, change)
            if user.target is CHANGE:  # a change along another axis
                self.held[user] = wanted

    def _results(self, output: Node) -> None:
        """Change the placements of the graph's results, where needed.

        Loss, logged values, buffers and other results become replicated. A gradient gets the placement of its
        parameter. Exception: if all terms of the gradient of a replicated parameter are partial sums, they
        stay partial sums, because the sum over replicas can also add up the terms of the ranks.

        Raises:
            CaptureError: a result would have to become a partial sum.
        """
        described = list(zip(output.args[0], output.meta["desc"], strict=True))  # type: ignore[arg-type]
        params = {x.meta["desc"]: x for x in self.names}
        of = [
            params.get(desc.grad_of) if isinstance(desc, _torch.GradAOTOutput) else None
            for _, desc in described
        ]
        # Several regions may compute terms of one gradient. The terms stay partial sums only if all of them
        # are partial sums: the sum over replicas would count a replicated term once for each rank.
        terms = [
            (x, node)
            for x, (node, _) in zip(of, described, strict=True)
            if x is not None and isinstance(node, Node)
        ]
        whole = {self.names[x] for x, node in terms if self.held[node] != P}
        results = list(output.args[0])  # type: ignore[arg-type]
        for i, (param, (node, _)) in enumerate(zip(of, described, strict=True)):
            if not isinstance(node, Node):
                continue
            wanted = R if param is None else self.held[param]
            if param is not None and wanted == R and self.held[node] == P and self.names[param] not in whole:
                continue
            if self.held[node] != wanted:
                if isinstance(wanted, Partial):
                    raise self._refusal(node)
                with self.graph.inserting_before(output):
                    changed = self.changes.changed(node, wanted, output)
                    results[i] = make_like(self.graph, node, aten.alias.default, (changed,))
                    self.held[results[i]] = wanted
                    self._beside(results[i])
        output.args = (tuple(results) if isinstance(output.args[0], tuple) else results,)

    def _refusal(self, node: Node) -> CaptureError:
        """Return the error for an operation that cannot work on shards of its inputs. Set `refused` to the
        names of the sharded parameters among its inputs."""
        held = {self.param_of(x): self.held[x] for x in tensors_of(node) if x in self.fixed}
        self.refused = [name for name, placement in held.items() if placement != R]
        read = ", ".join(f"{name} as {held[name]}" for name in self.refused) or "its inputs"
        settled = [x for x in tensors_of(node) if x in self.fixed - self.free and self.held[x] == R]
        whole = ", ".join(dict.fromkeys(map(self.param_of, settled)))
        said = ", ".join(name for name in self.refused if name in self.division.params)
        unsaid = ", ".join(name for name in self.refused if name not in self.division.params)
        if said:
            fix = f"Leave {said} out of params"
        elif unsaid:
            fix = f"Leave out of params the parameters that are used with {unsaid}"
        else:
            fix = "Shard other tensors, or another dimension"
        return CaptureError(
            f"{own_line(node)}: {node.target} cannot work on shards of {read} along {self.division.axis!r}"
            f"{f', with {whole} whole' if whole else ''}. {fix} "
            "[PIPER-C019]"
        )

    def param_of(self, x: Node) -> str:
        """Return the canonical name of the parameter `x`, or of the parameter that `x` is a view of."""
        while x not in self.names:
            x = x.all_input_nodes[0]
        return self.names[x]


def _blocks(placement: Placement) -> set[int]:
    """Return the number of blocks of a shard, as a set for `rules_for`. Return an empty set for any other
    placement."""
    return {placement.blocks} if isinstance(placement, Sharded) else set()
