"""Give each term of a loss a separate tangent, by copying the backward pass from the loss to its terms.

A tangent is an input of the graph: the gradient of the loss, or of one term. The copied nodes of the backward
pass compute gradients from the tangent and from values that do not depend on the batch. They end in three
cases:
- at a summand of the loss, because it belongs to one term;
- at a parameter that is itself a summand, because it has the same value on every part of the batch;
- at the gradient of parameters that are multiplied by a vector of terms. This gradient becomes a sum with one
  gradient for each term.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.losses.combination import MIXED
from lightning_piper.capture.losses.loss_terms import LossTerms
from lightning_piper.capture.torch_private import _torch

aten = torch.ops.aten
# Operations whose backward pass may add no node to the graph.
_PASSING = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Scalar,
    aten.view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.alias.default,
}


@dataclass(frozen=True)
class LossSum:
    """The structure of a loss that is a sum of terms.

    Attributes:
        base: Returns the term of a value, or None if the value is itself a sum of several terms.
        summands: Returns the summands of a value that is a sum of several terms.
        part: Returns a copy of a sum of several terms that has the summands of one term only. Returns None if
            the sum does not have a summand of this term.
        found: The analysis of how values combine from parts of the batch.
        whole: Inputs of the step that are the same on every part of the batch, such as parameters.
    """

    base: Callable[[Any], int | None]
    summands: Callable[[Node], list[Any]]
    part: Callable[[Node, int], Node | None]
    found: LossTerms
    whole: Collection[Node]


@dataclass
class _GradientPath:
    """The gradients that lead from the loss to its summands.

    Attributes:
        entering: For each summand with a gradient: the gradient that enters the summand's backward pass, the
            nodes of that pass that read the gradient, and the term.
        added: The term of parameters that are summands themselves. None if no parameter is a summand.
    """

    entering: list[tuple[Node, list[Node], int]]
    added: int | None = None


def divide_tangent(
    graph: torch.fx.Graph, tangent: Node, loss: Node, terms: Sequence[int], sums: LossSum, results: list[Any]
) -> dict[Node, int]:
    """Give each term a tangent by changing the graph in place, and return placeholder -> index of the term. If
    this is not possible, return {} and leave the graph unchanged.

    Args:
        tangent: The placeholder of the gradient of the loss. It becomes the tangent of the first term.
        terms: The indices of the loss's terms.
        results: The results of the graph. The function may replace gradients in this list.
    """
    behind = _behind(graph, tangent, sums.found)
    way = _gradient_path(graph, loss, sums, behind)
    if way is None:
        return {}
    # pairs of a node in the backward pass of a summand, and the entering gradient that the node reads
    readers = {(reader, source) for source, there, _ in way.entering for reader in there}
    # gradients that do not belong to one summand, and so are copied for each term
    free = behind - _reached({reader for reader, _ in readers}, behind)
    escaped = [
        (node, user)
        for node in graph.nodes
        if node in free
        for user in node.users
        if user not in free and (user, node) not in readers and not is_dead(user)
    ]
    products = {user: None for _, user in escaped if _is_product(user, free, sums.found)}
    # Any other reader must add such a gradient to the gradient of a parameter that is itself a summand.
    added = [(node, user) for node, user in escaped if user not in products]
    handed_out = [i for i, node in enumerate(results) if node in free]
    if any(user.op != "output" and user.target is not aten.add.Tensor for _, user in added):
        return {}
    if (added or handed_out) and way.added is None:
        return {}
    led = _TermGradients(graph, tangent, terms)
    for source, there, term in way.entering:
        for reader in there:
            reader.replace_input_with(source, led.of(source, term))
    for node, user in added:
        if user.op != "output" and way.added is not None:
            user.replace_input_with(node, led.of(node, way.added))
    for i in handed_out:
        results[i] = led.of(results[i], way.added if way.added is not None else terms[0])
    for user in products:
        made = _put_together(graph, user, terms, led, free, sums)
        results[:] = [made if x is user else x for x in results]
    return {node: term for term, node in led.tangents.items()}


def _behind(graph: torch.fx.Graph, tangent: Node, found: LossTerms) -> set[Node]:
    """Return the nodes that are computed from the tangent and from values that do not depend on the batch:
    gradients of sums of terms. `found` shows which values depend on the batch."""
    behind = {tangent}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        follows = _torch.is_backward(node) and any(x in behind for x in inputs)
        if follows and all(x in behind or found.is_whole(x) for x in inputs):
            behind.add(node)
    return behind


def _gradient_path(
    graph: torch.fx.Graph, loss: Node, sums: LossSum, behind: Collection[Node]
) -> _GradientPath | None:
    """Return the gradients from the loss to its summands. Return None if several of these gradients enter the
    backward pass of one operation, or if one operation makes several of the summands."""
    by_number: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if _torch.is_backward(node) and node.op == "call_function":
            by_number.setdefault(_torch.sequence_number(node), []).append(node)
    way, numbers, read, mixed = _GradientPath([]), set[Any](), set[Node](), set[Node]()
    stack: list[tuple[Any, int | None]] = [(loss, None)]  # values, each with its term if that is known
    while stack:
        value, base = stack.pop()
        base = sums.base(value) if base is None else base
        if base is None:
            if value not in mixed:
                mixed.add(value)
                stack += [(x, None) for x in sums.summands(value)]
            continue
        if isinstance(value, Node) and value in sums.whole:
            way.added = base
        number = (
            _torch.sequence_number(value) if isinstance(value, Node) and value.op == "call_function" else None
        )
        if number is None or (number in numbers and value in read):
            continue
        backward = by_number.get(number, [])
        if not backward and value.target in _PASSING:  # the gradient passes to the operands unchanged
            stack += [(x, base) for x in value.all_input_nodes]
            continue
        # the gradients that enter the backward pass of the operation that made the value
        sources = {x for node in backward for x in node.all_input_nodes if x in behind and x not in backward}
        if len(sources) != 1 or number in numbers:
            if sources:
                return None
            continue
        numbers.add(number)
        read.add(value)
        # The gradient of a difference is also the gradient of the first operand.
        if value.target is aten.sub.Tensor:
            stack.append((value.args[0], base))
        (source,) = sources
        way.entering.append((source, [node for node in backward if source in node.all_input_nodes], base))
    return way


def _reached(nodes: Collection[Node], inside: Collection[Node]) -> set[Node]:
    """Return these nodes, and all nodes in `inside` that are computed from them."""
    found, stack = set[Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [user for user in node.users if user in inside]
    return found


def _is_product(node: Node, free: Collection[Node], found: LossTerms) -> bool:
    """Return whether the node is the product of a gradient in `free` and one sum of terms."""
    inputs = [x for x in node.all_input_nodes if x not in free]
    linear = node.target in (aten.mul.Tensor, aten.mm.default, aten.bmm.default)
    return linear and len(inputs) == 1 and found.of(inputs[0]).reduction == MIXED


def _put_together(
    graph: torch.fx.Graph,
    node: Node,
    terms: Sequence[int],
    led: _TermGradients,
    free: Collection[Node],
    sums: LossSum,
) -> Node:
    """Replace a product of a gradient and a sum of terms by a sum, and return the sum. Each of its summands
    is the product for one term. A term without summands in the sum of terms has no product."""
    made: list[Node] = []
    for term in terms:
        inputs = {x: led.of(x, term) if x in free else sums.part(x, term) for x in node.all_input_nodes}
        if None not in inputs.values():
            with graph.inserting_before(node):
                made.append(graph.node_copy(node, lambda x, inputs=inputs: inputs[x]))  # type: ignore[misc]
    total = made[0]
    for other in made[1:]:
        with graph.inserting_before(node):
            total = graph.call_function(aten.add.Tensor, (total, other))
        total.meta = dict(node.meta)
    node.replace_all_uses_with(total)
    return total


class _TermGradients:
    """Copies of the loss's gradients, one for each term. The first term keeps the original nodes.

    Attributes:
        tangents: index of a term -> the placeholder of its tangent.
    """

    def __init__(self, graph: torch.fx.Graph, tangent: Node, terms: Sequence[int]) -> None:
        self._graph = graph
        self.tangents = {term: self._tangent(tangent, k) for k, term in enumerate(terms)}
        self._copies = {(tangent, term): node for term, node in self.tangents.items()}
        self._first = terms[0]

    def of(self, node: Node, term: int) -> Node:
        """Return the gradient `node` for one term. The first term has the node itself, and every other term
        has a copy."""
        if term == self._first:
            return node
        stack = [node]
        while stack:
            top = stack[-1]
            gradients = [x for x in top.all_input_nodes if _torch.is_backward(x)]
            missing = [x for x in gradients if (x, term) not in self._copies]
            if not missing:
                stack.pop()
                if (top, term) not in self._copies:
                    self._copies[top, term] = self._copied(top, {x: self._copies[x, term] for x in gradients})
            stack += missing
        return self._copies[node, term]

    def _copied(self, node: Node, inputs: Mapping[Node, Node]) -> Node:
        with self._graph.inserting_after(node):
            copied = self._graph.node_copy(node, lambda x: inputs.get(x, x))
        copied.meta = dict(node.meta)
        return copied

    def _tangent(self, tangent: Node, k: int) -> Node:
        """Return the tangent of the k-th term: the original placeholder for k = 0, and a new one
        otherwise."""
        if k == 0:
            return tangent
        last = [node for node in self._graph.nodes if node.op == "placeholder"][-1]
        with self._graph.inserting_after(last):
            made = self._graph.placeholder(f"{tangent.name}_{k}")
        made.meta = dict(tangent.meta)
        return made


def is_dead(node: Node) -> bool:
    """Return whether no result of the graph depends on the node."""
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        if top.op == "output":
            return False
        for user in top.users:
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return True
