"""A joint graph of which an axis of devices divides parameters and values: what they hold of every value, with the changes between.

    h[R] -> mm with W[S(1)] -> [S(1)] -> gelu -> [S(1)] -> mm with V[S(0)] -> [P] --change--> [R] -> + x[R]

Operations keep their order and their values; only where one takes sums or parts of what it reads is it written as several (a
product and a bias; a mask and a product). The graph of one member has the same nodes (`placements.local`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.capture import _torch
from lightning_piper.capture.changes import Changes, like
from lightning_piper.capture.passes import Names
from lightning_piper.capture.pinning import label_of, pinning
from lightning_piper.capture.regions import VIEWS, own_line, settle_glue, source_line
from lightning_piper.capture.several import Several
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Division
from lightning_piper.ir.values import Partial, Placement, Replicate, Shard
from lightning_piper.placements.attention import ATTENTION, attended
from lightning_piper.placements.changing import CHANGE, PLACEMENTS, Held, change_of
from lightning_piper.placements.choice import choose
from lightning_piper.placements.proof import prove
from lightning_piper.placements.rule import made_by, shape_of, tensors_of
from lightning_piper.placements.rules import rules_for

aten = torch.ops.aten
R, P = Replicate(), Partial()
_VIEWED = {aten.view.default, aten._unsafe_view.default}
TURNED = {aten.t.default, aten.transpose.int, aten.permute.default}
CAST = aten._to_copy.default  # as autocast does with parameters
PRODUCTS = {aten.mm.default, aten.addmm.default}


def place_values(graph: Graph, divisions: Sequence[Division], names: Names) -> list[Placing]:
    """Give every value of a joint graph a placement along each axis (`changing.PLACEMENTS`), in place.

    Raises:
        CaptureError: an operation needs a parameter whole that is divided.
    """
    placings: list[Placing] = []
    for division in divisions:
        Placing(graph, division, names, axes=placings)
    place_all(graph, placings)
    _check_apart(graph, placings)
    return placings


def place_all(graph: Graph, placings: Sequence[Placing]) -> None:
    """The same, along the axes of these placings."""
    settle_glue(graph)
    for node in list(graph.nodes):
        placings[0].place(node)
    for node in graph.nodes:
        held = {placing.division.axis: placing.held[node] for placing in placings}
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta[PLACEMENTS] = tuple(sorted((axis, each) for axis, each in held.items() if each != R))


def _check_apart(graph: Graph, placings: Sequence[Placing]) -> None:
    """No dimension of a value is divided along two axes: whose part would come first?"""
    for node in graph.nodes if len(placings) > 1 else ():
        for placing in placings:
            mine, change = {placing.held[node]}, change_of(node)
            if change is not None and change.axis == placing.division.axis:
                mine.add(change.before)
            both = {held.dim for held in mine if isinstance(held, Shard)} & placing.elsewhere(node)
            if both:
                axes = " and ".join(repr(each.division.axis) for each in placings)
                raise CaptureError(
                    f"{own_line(node)}: dimension {min(both)} of {node.target} would be divided along {axes} at once; divide "
                    "another dimension along one of them"
                )


class Placing:
    """The placements along one axis.

    Args:
        seek: weights that may be divided, each by how many runs of it.
        axes: the placings along all axes of this graph, of which this one becomes the last.

    Attributes:
        held: what members hold of each value.
    """

    def __init__(
        self, graph: Graph, division: Division, names: Names, seek: Mapping[str, int] | None = None,
        axes: list[Placing] | None = None,
    ) -> None:  # fmt: skip
        seek = seek or {}
        self.axes = [] if axes is None else axes
        self.axes.append(self)
        self.held = Held()
        self.graph, self.division, self.degree = graph, division, division.degree
        self.names, self.batch = dict(names.params), names.batch
        self.fixed: set[Node] = set(self.names)  # parameters, and views of them
        # What is said of a weight says of its bias: a vector of which nothing was said takes what its first reader wants.
        unsaid = {x: name for x, name in self.names.items() if name not in division.params}
        self.free = {x for x, name in unsaid.items() if len(shape_of(x)) == 1 or name in seek}
        self.sought = {x: seek[name] for x, name in unsaid.items() if name in seek}
        self.views: dict[Node, Node] = {}  # of what is still free, and what they are views of
        self.gathered: list[tuple[Node, Node]] = []  # on the way forth, parts that somebody needs whole, and who
        self.refused: list[str] = []  # parameters that an operation needs whole
        # Operations that were written otherwise, with what stands for them.
        self.gone: dict[Node, Any] = {} if len(self.axes) == 1 else self.axes[0].gone
        said = set(division.values.values())
        self.changes = Changes(graph, division.axis, division.degree, self.held, said, self._beside)
        self._pinned = pinning(graph, division.values)
        self.along: set[tuple[int, Shard]] = set()  # ranks of what the user divides, and how
        self.several = Several(graph, division, self.held, self.gone, self.place, self.changes.changed)

    @property
    def params(self) -> dict[str, Shard]:
        """The parameters that are divided: those of the division, and biases that follow from them."""
        placed = ((name, self.held[x]) for x, name in self.names.items() if x.users)
        return {name: placement for name, placement in placed if isinstance(placement, Shard)}

    def place(self, node: Node) -> None:
        """Place what a node makes along all axes; first as its rules say, then as the user does."""
        for placing in self.axes:
            if node.op == "output":
                placing._results(node)
            elif node.op != "call_function":
                placing.held[node] = placing.division.params.get(placing.names.get(node, ""), R)
            elif node not in self.gone:
                placing._operation(node)
        made = self.gone.get(node, node)  # what stands for it
        for placing in self.axes:
            if isinstance(made, Node) and made.op == "call_function" and made.target is not CHANGE:
                placing._hand_out(made)

    def _beside(self, node: Node) -> None:
        """Place what is put into the graph for this axis along the others: a change, or a view before or behind one."""
        for placing in self.axes:
            if placing is not self:
                placing._operation(node)

    def _operation(self, node: Node) -> None:
        if node.target is CHANGE:  # along another axis
            self.held[node] = self.held[node.all_input_nodes[0]]
            return
        if not tensors_of(node):
            self.held[node] = self._as_made(node)
            return
        inputs = tensors_of(node)
        if inputs[0] in self.free and (node.target is CAST or (node.target in TURNED and inputs[0] in self.sought)):
            self.views[node] = inputs[0]  # what it is turned, or cast, for says how it is divided
            self.fixed.add(node)
            self.free.add(node)
            if inputs[0] in self.sought:
                self.sought[node] = self.sought[inputs[0]]
            return
        if node.target in _VIEWED and self._is_for_columns(node):
            node.replace_input_with(inputs[0], self.changes.changed(inputs[0], R, node))
        elif node.target in _VIEWED and (part := self._is_for_rows(node)) is not None:
            node.replace_input_with(inputs[0], self.changes.changed(inputs[0], part, node))
        inputs = tensors_of(node)
        for x in inputs:  # what was summed for another reader is
            if self.held[x] == P and (total := self.changes.made(x, R, node)) is not None:
                node.replace_input_with(x, total)
        inputs = tensors_of(node)
        if node.target is aten.embedding.default and self._is_vocabulary(node):
            self._settle(inputs[0], Shard(0))
        if self.several.write(node):
            return
        if self._without_bias(node):
            return
        sought = self.sought if node.target in PRODUCTS else {}
        about = (self.degree, self.fixed, self.free, self.along, sought)
        rule = choose(node, self.held, self.elsewhere, *about, self.division.attention)
        if rule is None:
            raise self._refusal(node)
        inputs = tensors_of(node)
        for x, wanted in dict(zip(inputs, rule.inputs, strict=True)).items():
            if x in self.free:
                self._settle(x, wanted)
            elif self.held[x] != wanted:
                if isinstance(self.held[x], Shard) and wanted == R and not (_torch.is_backward(node) or self.several.writes):
                    self.gathered.append((x, node))
                node.replace_input_with(x, self.changes.changed(x, wanted, node))
        if self.several.write(node):  # of the parts that it reads now
            return
        prove(node, rule, self.degree)
        self.held[node] = rule.outputs if isinstance(node.meta.get("val"), list | tuple) else rule.outputs[0]
        if node.target in VIEWS and all(x in self.fixed for x in inputs):
            self.fixed.add(node)

    def elsewhere(self, node: Node) -> set[int]:
        """The dimensions of a value that are divided along other axes."""
        others = [placing.held.get(node) for placing in self.axes if placing is not self]
        return {held.dim for held in others if isinstance(held, Shard)}

    def _is_vocabulary(self, node: Node) -> bool:
        """Are rows of a weight that may be divided looked up by what is in the batch? Few positions are not worth a sum."""
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

    def _is_for_columns(self, view: Node) -> bool:
        """Does a product with columns of a weight read this view of parts? All such products take one change, before the view."""
        (x,) = tensors_of(view)
        if not isinstance(self.held[x], Shard) or x in self.fixed or shape_of(x)[-1] != shape_of(view)[-1]:
            return False
        if self.held[x] == Shard(len(shape_of(x)) - 1):
            return False
        rights = [user.args[-1] for user in view.users if user.target in PRODUCTS and user.args[-2] is view]
        return any(self._has_columns(y) for y in rights if isinstance(y, Node))

    def _is_for_rows(self, view: Node) -> Shard | None:
        """Do only products with whole weights read this view of parts, which could be parts as the user divides them? How that
        is."""
        (x,) = tensors_of(view)
        last = len(shape_of(x)) - 1
        if self.held[x] != Shard(last) or x in self.fixed or shape_of(x)[-1] != shape_of(view)[-1]:
            return None
        rights = [user.args[-1] for user in view.users if user.target in PRODUCTS and user.args[-2] is view]
        if not rights or not all(isinstance(y, Node) and self._is_whole(y) for y in rights):
            return None
        shape = shape_of(x)
        parts = sorted((part for rank, part in self.along if rank == last + 1 and part.dim != last), key=str)
        return next((part for part in parts if not shape[part.dim] % (self.degree * part.blocks)), None)

    def _is_whole(self, y: Node) -> bool:
        while y.target in TURNED or y.target is CAST:
            y = y.all_input_nodes[0]
        return y in self.names and y not in self.sought and self.held[y] == R

    def _along(self, x: Any) -> int | None:
        """The dimension that members have parts of."""
        placement = self.held[x]
        return placement.dim if isinstance(placement, Shard) else None

    def _has_columns(self, y: Node) -> bool:
        turned = False
        while y.target in TURNED or y.target is CAST:
            y, turned = y.all_input_nodes[0], turned != (y.target in TURNED)
        return y in self.sought or (y in self.names and self._along(y) == (0 if turned else 1))

    def _settle(self, x: Node, wanted: Placement) -> None:
        """A parameter of which nothing was said is divided so, and with it its other views."""
        if x in self.views:
            turned = next(rule for rule in rules_for(x, self.degree, _blocks(wanted)) if rule.outputs == (wanted,))
            self._settle(self.views[x], turned.inputs[0])
            return
        self.held[x] = wanted
        self.free.discard(x)
        self.sought.pop(x, None)
        for view, source in list(self.views.items()):
            if source is x:
                del self.views[view]
                rule = next(rule for rule in rules_for(view, self.degree, _blocks(wanted)) if rule.inputs == (wanted,))
                self._settle(view, rule.outputs[0] or R)

    def _as_made(self, node: Node) -> Any:
        """Of what an operation makes of no tensor, or a part of what one makes."""
        if node.all_input_nodes and isinstance(held := self.held[node.all_input_nodes[0]], tuple):
            return held[int(node.args[1])]  # type: ignore[arg-type]
        count = len(made_by(node))
        return (R,) * count if isinstance(node.meta.get("val"), list | tuple) else R

    # Operations in several

    def _without_bias(self, node: Node) -> bool:
        """`addmm` whose product is a sum over the members: the bias is added to the sum."""
        if node.target is not aten.addmm.default or node.kwargs:
            return False
        bias, x, y = node.args
        rows = self._along(y) == 0 or (y in self.sought and self._along(x) == 1)
        if not rows:
            return False
        users = list(node.users)
        viewed = (
            users[0] if len(users) == 1 and users[0].target in _VIEWED and shape_of(users[0])[-1] == shape_of(node)[-1] else None
        )
        last = node if viewed is None else viewed
        with self.graph.inserting_before(last):
            made = like(self.graph, node, aten.mm.default, (x, y))
            self.place(made)
            if viewed is not None:  # in its own shape, in which the user may divide it
                made = like(self.graph, viewed, viewed.target, (made, viewed.args[1]))
                self.place(made)
            total = like(self.graph, last, aten.add.Tensor, (made, bias))
        last.replace_all_uses_with(total)
        self.graph.erase_node(last)
        self.gone |= {last: total, node: total}
        if viewed is not None:
            self.graph.erase_node(node)
        self.place(total)
        return True

    def _pin(self, node: Node) -> None:
        """What a region hands on is divided where the user says so."""
        wanted = self._pinned(node)
        if wanted is None or node in self.fixed:
            return
        shape = shape_of(node)
        self.along.add((len(shape), wanted))
        if self.held[node] == wanted:
            return
        if shape[wanted.dim] % (self.degree * wanted.blocks):
            runs = f" of {wanted.blocks} runs" if wanted.blocks > 1 else ""
            raise CaptureError(
                f"{source_line(node)}: {label_of(node)} hands on a value of shape {list(shape)}, of which {self.degree} devices "
                f"along {self.division.axis!r} cannot have equal parts{runs} along dimension {wanted.dim}; pad it, or divide "
                "another dimension"
            )
        self._hand_on(node, wanted)

    def _hand_out(self, node: Node) -> None:
        """Give a value that has its placement another one for all who read it, where the user says so, or what it is."""
        if tensors_of(node):
            self._pin(node)
        else:
            self._sum_of_keys(node)

    def _sum_of_keys(self, node: Node) -> None:
        """Gradients of keys and values that were gathered are summed into the parts that they were gathered of."""
        if self.held[node] != P or node.target is not operator.getitem or node.all_input_nodes[0].target not in ATTENTION:
            return
        queries = self.held[attended(node.all_input_nodes[0])[0]]
        part = queries if isinstance(queries, Shard) and queries.dim == 2 else Shard(2)
        if shape_of(node)[2] % (self.degree * part.blocks) == 0:
            self._hand_on(node, part)

    def _hand_on(self, node: Node, wanted: Placement) -> None:
        """Let all who read a value have it so."""
        users = list(node.users)
        with self.graph.inserting_after(node):
            change = self.changes.changed(node, wanted, node.next)
        for user in users:
            user.replace_input_with(node, change)
            if user.target is CHANGE:  # along another axis
                self.held[user] = wanted

    def _results(self, output: Node) -> None:
        """What the step hands out is whole, but for gradients of what is divided, and of what is summed with the batch."""
        described = list(zip(output.args[0], output.meta["desc"], strict=True))  # type: ignore[arg-type]
        params = {x.meta["desc"]: x for x in self.names}
        of = [params.get(desc.grad_of) if isinstance(desc, _torch.GradAOTOutput) else None for _, desc in described]
        # Terms of one gradient, made in different regions, are summed with the batch if members have terms of them all.
        terms = [(x, node) for x, (node, _) in zip(of, described, strict=True) if x is not None and isinstance(node, Node)]
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
                    results[i] = like(self.graph, node, aten.alias.default, (changed,))
                    self.held[results[i]] = wanted
                    self._beside(results[i])
        output.args = (tuple(results) if isinstance(output.args[0], tuple) else results,)

    def _refusal(self, node: Node) -> CaptureError:
        held = {self.param_of(x): self.held[x] for x in tensors_of(node) if x in self.fixed}
        self.refused = [name for name, placement in held.items() if placement != R]
        read = ", ".join(f"{name} as {held[name]}" for name in self.refused) or "what is divided"
        unsaid = ", ".join(name for name in self.refused if name not in self.division.params)
        return CaptureError(
            f"{own_line(node)}: {node.target} cannot work on parts of {read} along {self.division.axis!r}; leave it out of "
            f"params{f' ({unsaid} follows from what it is used with)' if unsaid else ''}, or divide it along another dimension"
        )

    def param_of(self, x: Node) -> str:
        while x not in self.names:
            x = x.all_input_nodes[0]
        return self.names[x]


def _blocks(placement: Placement) -> set[int]:
    return {placement.blocks} if isinstance(placement, Shard) else set()
