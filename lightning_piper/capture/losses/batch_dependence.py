"""Find which values and numbers of a traced graph depend on the number of samples.

One trace often shows this. Otherwise, the graph is compared node by node with a second trace at another
number of samples: each difference depends on the size. A second trace takes time, so the analysis requests it
only for a number or a shape that may have been computed from the size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.joint.operations import CONSTANTS, is_coarser
from lightning_piper.capture.joint.sample_dimension import known_rows
from lightning_piper.capture.losses.denominators import (
    ONE,
    SAMPLES,
    ConstantExpression,
    ElementwiseExpression,
    Expression,
    over,
    simplified,
    times,
)
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.graph_nodes import copy_into
from lightning_piper.common.operation_families import COPIES, DIVIDED, MULTIPLIED, RESHAPES, SQUEEZES
from lightning_piper.sample_gathering import GATHER
from lightning_piper.totals import TOTAL

aten = torch.ops.aten
Ask = Callable[[bool], tuple[torch.fx.Graph, int] | None]  # see the argument `ask` of `BatchDependence`
_POWERS = (0.5, -0.5, 2, -2)  # powers of the number of samples that `number` finds, besides 1 and -1
FEW = 8  # the most elements of a constant whose numbers are compared
# Operations that only reshape, copy or convert their input, so that the result has the same elements.
_HANDED_ON = RESHAPES | COPIES | SQUEEZES | {aten.lift_fresh_copy.default}


class BatchDependence:
    """An analysis of which values of a graph depend on the number of samples.

    Args:
        graph: the traced step.
        size: the number of samples in the trace.
        ask: returns a trace of the same step with another number of samples, and that number. `ask(False)`
            makes this trace if necessary, and returns None if the trace fails. `ask(True)` makes no trace: it
            returns None if no such trace exists yet.
    """

    def __init__(self, graph: torch.fx.Graph, size: int, ask: Ask) -> None:
        self.graph, self.size, self._ask = graph, size, ask
        self._changes: dict[Node, bool] = {}
        self._has_rows: dict[Node, bool] = {}
        # nodes for which `is_scaled_by_size` has returned False; the same holds for all inputs of these nodes
        self._unscaled: set[Node] = set()

    def has_rows(self, node: Node) -> bool:
        """Return whether one of the node's dimensions depends on the number of samples. If the traces do not
        show it, return True."""
        if node not in self._has_rows:
            self._has_rows[node] = node in self._rows or self._shows_rows(node)
        return self._has_rows[node]

    def _shows_rows(self, node: Node) -> bool:
        """Return whether a dimension depends on the number of samples. The trace at another size shows this,
        or the node's inputs do. If neither shows it, return True."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.ndim:
            return False
        if node.op == "placeholder" and not isinstance(node.meta.get("desc"), _torch.PlainAOTInput):
            return False
        other = self._beside.get(node) if self._beside is not None else None
        if other is not None:
            there = other.meta.get("val")
            return (
                not isinstance(value, torch.Tensor)
                or not isinstance(there, torch.Tensor)
                or value.shape != there.shape
            )
        # The node has no counterpart: the trace at another size has no backward pass, and may have a constant
        # where this trace has an input.
        if node.target in _HANDED_ON or _is_element_by_element(node):
            return any(map(self.has_rows, node.all_input_nodes))
        return True  # without evidence, assume that the samples are not reduced

    def number(self, value: Any, node: Node, position: int | str | None) -> Expression | None:
        """Return a number in the step as an expression of the number of samples.

        Args:
            value: the number.
            node: the node that has the number as an argument, or that made a tensor of it.
            position: the position of the argument, or the name of a keyword argument; None for a tensor.

        Returns:
            With n samples: a constant, a multiple of n, of its root or of its square, the inverse of such a
                multiple, n plus an integer, or the inverse of n plus an integer. None if the number depends on n
                in another way, or if the node has no counterpart in the trace at another size. Without such a
                trace, every number is a constant. 0, NaN and values that are not numbers count as
                constants.
        """
        if not isinstance(value, int | float) or not value or value != value:
            return ConstantExpression(value)
        if not (self._is_of_size(value) or self._is_known):
            return ConstantExpression(value)
        other = self._beside.get(node) if self._beside is not None else None
        if other is None:
            return None if self._beside is not None else ConstantExpression(value)
        # `there`: the number in the trace at another size.
        if position is None:
            there: Any = self.number_in(other, self._there)
        else:
            there = other.kwargs.get(position) if isinstance(position, str) else other.args[position]
        if there == value:
            return ConstantExpression(value)
        if not isinstance(there, int | float):
            return None
        size = self._other_size
        if abs(value * size - there * self.size) <= 1e-9 * abs(value) * size:
            return times(ConstantExpression(value / self.size), SAMPLES)
        if abs(value * self.size - there * size) <= 1e-9 * abs(value) * size:
            return over(ConstantExpression(value * self.size), SAMPLES)
        for power in _POWERS:
            if abs(value * size**power - there * self.size**power) <= 1e-9 * abs(value) * size**power:
                factor = ConstantExpression(value / self.size**power)
                return times(factor, ElementwiseExpression(torch.pow, (SAMPLES, ConstantExpression(power))))
        if (less := self._shifted(value, there)) is not None:
            return less
        upside_down = self._shifted(1 / value, 1 / there) if there else None
        return None if upside_down is None else over(ONE, upside_down)

    def _shifted(self, value: float, there: float) -> Expression | None:
        """Return `value` as the number of samples plus an integer, such as n - 1 in an unbiased variance.

        Return None if `value` is not of this form.

        Args:
            there: the same number in the trace at another size.
        """
        more = value - self.size
        same = abs(there - self._other_size - more) <= 1e-9 * abs(there)
        return (
            ElementwiseExpression(torch.add, (SAMPLES, ConstantExpression(round(more))))
            if same and abs(more - round(more)) <= 1e-9 * abs(value)
            else None
        )

    def literal(self, node: Node) -> Expression | None:
        """Return the number from which a tensor was made, as an expression.

        Return None if the tensor was not made from a number, or if the number has no expression (see
        `number`).
        """
        number = self.number_in(node, self.graph)
        return None if number is None else self.number(number, node, None)

    def is_multiple(self, value: Any, user: Node) -> bool:
        """Return whether an operand of `user`, a number or a tensor made from one, is a multiple of the number
        of samples."""
        if isinstance(value, Node):
            known = self.literal(value)
        else:
            known = self.number(value, user, user.args.index(value))
        return known is not None and simplified(known) == SAMPLES

    def number_in(self, node: Any, graph: torch.fx.Graph) -> float | None:
        """Return the number that a tensor of one element was made from. Return None if it was not made from a
        number, or if a cast to integers or booleans may have changed the number."""
        while node.op == "call_function" and node.target in _HANDED_ON and node.meta["val"].numel() == 1:
            if is_coarser(node):
                return None
            node = node.args[0]
        if node.op == "get_attr":
            constant = getattr(graph.owning_module, str(node.target), None)
            return constant.item() if isinstance(constant, torch.Tensor) and constant.numel() == 1 else None
        if node.target is aten.full.default and node.args[0] == []:
            return node.args[1]  # type: ignore[no-any-return]
        if node.target is aten.scalar_tensor.default:
            return node.args[0]  # type: ignore[no-any-return]
        if node.target in (aten.zeros.default, aten.ones.default) and node.args[0] == []:
            return float(node.target is aten.ones.default)
        if node.target in CONSTANTS and not node.meta["val"].ndim:
            made = CONSTANTS[node.target]
            return node.args[-1] if made is None else made
        return None

    def changes(self, node: Node) -> bool:
        """Return whether the value is computed from the number of samples of a part, like
        `torch.ones(len(x))`.

        Sums over the whole batch and gathered samples do not count, because they are equal for all parts. It
        does not matter whether the value reads the samples themselves.
        """
        stack = [node]
        while stack:
            top = stack[-1]
            inputs = [] if top.target in (TOTAL, GATHER) else top.all_input_nodes
            missing = [x for x in inputs if x not in self._changes]
            if not missing:
                stack.pop()
                self._changes.setdefault(
                    top, any(self._changes[x] for x in inputs) or self.is_made_of_size(top)
                )
            stack += missing
        return self._changes[node]

    def is_made_of_size(self, node: Node) -> bool:
        """Return whether the node's arguments that are numbers, or its constant, depend on the number of
        samples.

        The trace at another size decides. Without such a trace, the result is False. For a forward node without
        a counterpart in it, the result is whether one of the numbers may come from the number of samples.
        """
        if node.op == "placeholder":
            return False
        if node.op == "get_attr":
            numbers = _content(self.graph, node)
        else:
            numbers = [x for x in _arguments(node) if isinstance(x, int | float)]
            numbers += node.meta["val"].shape if node.target in CONSTANTS else ()
        suspicious = any(map(self._is_of_size, numbers))
        if not (self._is_known or suspicious) or self._beside is None:
            return False
        other = self._beside.get(node)
        if other is None:
            # The trace at another size may have another operation here, such as a constant instead of an
            # input.
            return suspicious and not _torch.is_backward(node)
        if node.op == "get_attr":
            there = _content(self._there, other)
            return len(numbers) != len(there) or any(map(_differ, numbers, there))
        if node.target in CONSTANTS and node.meta["val"].shape != other.meta["val"].shape:
            return True
        pairs = zip(_arguments(node), _arguments(other), strict=False)
        return any(isinstance(a, int | float) and _differ(a, b) for a, b in pairs)

    def is_scaled_by_size(self, rows: Node) -> bool:
        """Return whether `rows` are computed from a product or quotient with a number that may depend on the
        number of samples.

        Examples are `torch.relu(x / len(x))` and the gradient of a mean. The sum over the batch is then not
        the sum over its parts.
        """
        stack = [rows]
        while stack:
            node = stack.pop()
            if node in self._unscaled:
                continue
            self._unscaled.add(node)
            stack += node.all_input_nodes
            for position, value in enumerate(node.args[:2] if node.target in MULTIPLIED | DIVIDED else ()):
                if self._may_follow(value, node, position):
                    self._unscaled.clear()
                    return True
        return False

    def _may_follow(self, value: Any, node: Node, position: int) -> bool:
        """Return whether the traces allow that `value` depends on the number of samples. It is a factor or
        divisor of `node`, at the position `position` of the arguments."""
        made = self.number_in(value, self.graph) if isinstance(value, Node) else value
        if not isinstance(made, int | float):
            return False
        if not isinstance(
            self.number(made, node, None if isinstance(value, Node) else position), ConstantExpression
        ):
            return True
        return self._is_of_size(made) and self._beside is None

    def _is_of_size(self, value: float) -> bool:
        """Return whether a number may come from the number of samples n. Such numbers are multiples of n,
        n/2, n/3 and n/4, roots of multiples of n, multiples of n plus or minus 1, and the inverses of all
        these numbers.
        """
        value = abs(value)
        if not value or value == 1 < self.size or value != value or value == float("inf"):
            return False
        x = max(value, 1 / value)
        return any(
            abs(y / self.size - round(y / self.size)) < 1e-6
            for y in (x, 2 * x, 3 * x, 4 * x, x * x, x - 1, x + 1)
            if y
        )

    # The trace at another size.

    @cached_property
    def _rows(self) -> set[Node]:
        return known_rows(self.graph, self.size)

    @cached_property
    def _is_known(self) -> bool:
        """Whether a trace at another size already exists."""
        return self._ask(True) is not None

    @cached_property
    def _beside(self) -> dict[Node, Node] | None:
        """Node -> its counterpart in the trace at another size, for all nodes on which the two graphs agree.

        None if a trace at another size cannot be made. Otherwise, this also sets `_there` to the graph of that
        trace, and `_other_size` to its number of samples.
        """
        found = self._ask(False)
        if found is None:
            return None
        self._there, self._other_size = found
        paired: dict[Node, Node] = {}
        stack = list(zip(results_of(self.graph), results_of(self._there), strict=False))
        while stack:
            a, b = stack.pop()
            if a in paired or a.op != b.op or (a.op == "call_function" and a.target is not b.target):
                continue
            paired[a] = b
            stack += zip(a.all_input_nodes, b.all_input_nodes, strict=False)
        return paired


def _is_element_by_element(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def results_of(graph: torch.fx.Graph) -> list[Node]:
    """Return the nodes among the graph's outputs that the step's code returns, or that are new values of its
    inputs (buffers), in the order of the outputs. Gradients and constants are left out."""
    output = graph.output_node()
    described = zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
    kinds = (_torch.PlainAOTOutput, _torch.InputMutationAOTOutput)
    return [node for node, desc in described if isinstance(desc, kinds) and isinstance(node, Node)]


def copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy of the graph, with the descriptors of its results."""
    copy = torch.fx.Graph(graph.owning_module)
    copy_into(copy, graph, {})
    copy.output_node().meta = dict(graph.output_node().meta)
    return copy


def _content(graph: torch.fx.Graph, node: Node) -> list[Any]:
    """Return the content of a constant for the comparison of two traces: the numbers if the constant has few
    elements, such as a shape as a tensor, otherwise the shape."""
    constant: torch.Tensor = getattr(graph.owning_module, str(node.target))
    return constant.flatten().tolist() if constant.numel() <= FEW else list(constant.shape)


def _differ(one: Any, other: Any) -> bool:
    """Return whether two numbers differ. Two NaNs do not."""
    return bool(one != other) and not (one != one and other != other)


def _arguments(node: Node) -> list[Any]:
    """Return the arguments of a node and its keyword arguments, with nested lists flattened."""
    return _flat([*node.args, *node.kwargs.values()])


def _flat(arguments: Any) -> list[Any]:
    """Return the arguments, with nested lists flattened."""
    return [y for x in arguments for y in (_flat(x) if isinstance(x, list | tuple) else [x])]
