"""Represent the denominators of losses as expressions of sums over the batch, and make the code that computes
these sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.joint.operations import CONSTANTS
from lightning_piper.capture.joint.sizes import NotSymbolic
from lightning_piper.common.operation_families import DIVIDED, MULTIPLIED
from lightning_piper.ir.boxed_code import compile_boxed
from lightning_piper.ir.terms import Denominator

aten = torch.ops.aten
# operation that fills a tensor with a number -> the number. None: the number is the last argument.
_VALUES: dict[Any, float | None] = dict(CONSTANTS)
# In float64, sums of counts are exact, and sums of weights have small rounding errors.
_DOUBLE: dict[str, Any] = {"dtype": torch.float64}


class Expression:
    """A denominator, as a function of sums over the batch.

    Each of these sums adds up over the parts of the batch. The denominator itself need not, because the
    function may be nonlinear.
    """


@dataclass(frozen=True)
class ConstantExpression(Expression):
    """A number as an expression."""

    value: Any


@dataclass(frozen=True)
class SampleCount(Expression):
    """The number of samples as an expression."""


@dataclass(frozen=True)
class BatchSum(Expression):
    """A sum over the batch.

    Attributes:
        key: equal for equal sums.
        node: the node from which the sum is computed.
        how: how to compute the sum from `node`. `sum`: the node is an operation that sums its input over the
            batch. `rows`: add up the node's elements. `labels`: the node is a negative log likelihood. Add up
            the class weights of all labels that the node does not ignore. `count`: the node is a count that
            the user has declared (`piper.mean`). Add up the counts of the parts of the batch.
    """

    key: int
    node: Node = field(compare=False)
    how: str = field(compare=False)


@dataclass(frozen=True)
class ElementwiseExpression(Expression):
    """An elementwise operation on expressions.

    Attributes:
        target: the operation.
        arguments: its arguments: expressions, and other values as `given` wraps them.
        keywords: its keyword arguments, as pairs of name and value.
    """

    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()

    @property
    def operation(self) -> Callable[..., Any]:
        """The operation without its overload, so that any of its arguments may be a tensor."""
        return self.target.overloadpacket if isinstance(self.target, torch._ops.OpOverload) else self.target

    @staticmethod
    def given(argument: Any) -> Any:
        """Wrap an argument that is neither a number nor a tensor."""
        return _OtherArgument(argument)


@dataclass(frozen=True)
class Factor(Expression):
    """A number by which the step multiplies or divides a term. It follows from sums over the batch.

    On a part of the batch, the step uses 1 instead of a factor that is 0 or not finite, such as a count of 0 or
    the `count - 1` of a single token. Otherwise the part's term would be lost, although the factor of the
    whole batch may be any number.
    """

    value: Expression


@dataclass(frozen=True)
class Conditional(Expression):
    """The denominator of a term that is 0 unless a condition on the whole batch holds.

    `torch.where(count > 0, total / count, 0)` has `count` as its denominator if the condition holds, and
    infinity otherwise. Each part of the batch computes `total / count`.

    Attributes:
        condition: The condition, as an expression of sums over the batch.
        denominator: The denominator if the condition holds.
    """

    condition: Expression
    denominator: Expression


@dataclass(frozen=True)
class _OtherArgument:
    value: Any


ONE, SAMPLES = ConstantExpression(1), SampleCount()


def times(a: Expression, b: Expression) -> Expression:
    """Return the product. A factor of 1 is left out."""
    return b if a == ONE else a if b == ONE else ElementwiseExpression(torch.mul, (a, b))


def over(a: Expression, b: Expression) -> Expression:
    """Return the quotient. A divisor of 1 is left out."""
    return a if b == ONE else ElementwiseExpression(torch.div, (a, b))


def adds_up_to_one(denominator: Expression | None) -> bool:
    """Return whether the weights of the parts, as the captured code has them, add up to 1."""
    # With any other denominator, even a part in which nothing counts has a weight; see `Denominator.of`.
    return denominator == SAMPLES or (isinstance(denominator, BatchSum) and denominator.how == "labels")


def simplified(expression: Expression) -> Expression:
    """Return `SAMPLES` for a denominator that is proportional to the number of samples, and `ONE` for a
    constant denominator other than 0. Return any other denominator unchanged.

    Only products and quotients of the number of samples and constants are judged. A few values would not show
    whether another function, such as `n.clamp(min=2)`, is proportional to the number.
    """
    power = _power(expression)
    return SAMPLES if power == 1 else ONE if power == 0 else expression


# Operations that make products and quotients. The sign does not change a power.
_TIMES, _OVER = {torch.mul, *MULTIPLIED}, {torch.div, *DIVIDED}
_KEEPS, _INVERTS = {aten.neg.default}, {aten.reciprocal.default}


def _power(expression: Any) -> int | None:
    """Return p if the expression is c * n ** p: a constant c other than 0, times a power of the number of
    samples n. Return None for any other expression."""
    match expression:
        case ConstantExpression(value):
            known = isinstance(value, int | float) and value and math.isfinite(value)
            return 0 if known else None
        case SampleCount():
            return 1
        case ElementwiseExpression(target, arguments, keywords) if not keywords:
            powers = [p for x in arguments if (p := _power(x)) is not None]
            if len(powers) < len(arguments):
                return None
            if target in _TIMES | _OVER:
                return powers[0] + powers[1] * (1 if target in _TIMES else -1)
            if target in _KEEPS | _INVERTS:
                return powers[0] * (1 if target in _KEEPS else -1)
    return None


def described(expression: Expression, size: int) -> str:
    """Return a denominator as text, such as `div(sum over the batch, samples)`. `CapturedStep` compares these
    texts between traces with different numbers of samples. So the text says if the denominator follows from the
    number of samples alone and is 0 or not finite for `size` samples."""
    if stats_of(expression):
        return _text(expression)
    value = float(_evaluate(expression, {}, [torch.full((), size, **_DOUBLE)]))
    return _text(expression) + ("" if value and math.isfinite(value) else f" = {value:g}")


def _text(expression: Expression) -> str:
    match expression:
        case ConstantExpression():
            return (
                f"{expression.value:g}"
                if isinstance(expression.value, int | float)
                else str(expression.value)
            )
        case SampleCount():
            return "samples"
        case BatchSum():
            return {"labels": "labels that count", "count": "count"}.get(expression.how, "sum over the batch")
        case Factor():
            return _text(expression.value)
        case Conditional():
            return f"if({_text(expression.condition)}, {_text(expression.denominator)})"
        case ElementwiseExpression():
            name = getattr(expression.target, "__name__", str(expression.target)).removesuffix(".default")
            inside = ", ".join(
                _text(x) if isinstance(x, Expression) else str(x.value) for x in expression.arguments
            )
            return f"{name}({inside})"
    raise AssertionError(expression)


def denominator_of(
    expression: Expression,
    batch: Mapping[Node, int],
    buffers: Mapping[Node, str],
    constants: torch.nn.Module | None,
    again: Collection[Node] = (),
) -> Denominator:
    """Return the denominator as code.

    Args:
        expression: the denominator.
        batch: placeholder of the joint graph -> index of a tensor of the batch.
        buffers: placeholder -> name of a buffer.
        constants: the module that holds the graph's constant tensors.
        again: The losses over labels whose value, or a value computed from it, the backward pass reads. They
            need a guard (`Denominator.guarded`), because the value is 0 / 0 on a part of the batch in which
            no label counts.

    Raises:
        NotSymbolic: the sums need a tensor whose shape depends on the number of samples.
    """
    stats = {stat.key: stat for stat in stats_of(expression)}
    emit = _SumCodeBuilder()
    made = [emit.stat(stat) for stat in stats.values()]
    emit.graph.output(tuple(made))
    leaves = [node for node in emit.placeholders if node in batch]
    own = [node for node in emit.placeholders if node in buffers]
    order = [*leaves, *own]
    if order and (first := next(iter(emit.graph.nodes))) is not emit.env[order[0]]:
        first.prepend(emit.env[order[0]])
    for before, node in itertools.pairwise(order):
        emit.env[before].append(emit.env[node])
    emit.graph.lint()
    columns = {key: i for i, key in enumerate(stats)}
    zero, one = torch.zeros((), **_DOUBLE), torch.ones((), **_DOUBLE)
    nothing = _evaluate(expression, columns, [*[zero] * len(stats), one])
    ends = bool(again) and not (float(nothing) and math.isfinite(nothing))

    def of(values: Sequence[torch.Tensor], part: bool = False) -> torch.Tensor:
        found = _evaluate(expression, columns, values, part)
        return found if isinstance(found, torch.Tensor) else torch.full_like(values[-1], found)

    return Denominator(
        tuple(batch[n] for n in leaves),
        tuple(buffers[n] for n in own),
        compile_boxed(emit.graph, constants),
        len(stats) + 1,
        of,
        bool(guards_of(expression)) or ends,
    )


def stats_of(expression: Expression) -> list[BatchSum]:
    """Return the sums over the batch in a denominator, in the order of its arguments. A sum that occurs twice is
    returned twice."""
    if isinstance(expression, BatchSum):
        return [expression]
    return [stat for x in _inside(expression) for stat in stats_of(x)]


def guards_of(expression: Expression) -> list[Factor | Conditional]:
    """Return the factors of a denominator that may be 0 or not finite, and its conditions. On a part of the
    batch, the step must use 1 for such a factor, and treat each condition as true."""
    if isinstance(expression, Factor):
        return [] if _is_positive(expression.value) else [expression]
    if isinstance(expression, Conditional):
        return [expression, *guards_of(expression.denominator)]
    return [guard for x in _inside(expression) for guard in guards_of(x)]


def _inside(expression: Expression) -> list[Expression]:
    """Return the expressions inside of an expression."""
    match expression:
        case Factor(value):
            return [value]
        case Conditional(condition, denominator):
            return [condition, denominator]
        case ElementwiseExpression():
            return [x for x in expression.arguments if isinstance(x, Expression)]
    return []


_AT_LEAST = {aten.clamp.default, aten.clamp_min.default, aten.maximum.default}


def _is_positive(expression: Expression) -> bool:
    """Return whether the value is certainly a positive number: at least a positive constant."""
    match expression:
        case ElementwiseExpression(target, arguments) if target in _AT_LEAST and len(arguments) == 2:
            return any(
                isinstance(x, ConstantExpression) and isinstance(x.value, int | float) and x.value > 0
                for x in arguments[target is not aten.maximum.default :]
            )
    return False


def _evaluate(
    expression: Expression, columns: Mapping[int, int], values: Sequence[torch.Tensor], part: bool = False
) -> Any:
    """Return the value of an expression: a number, or a tensor like `values`.

    Args:
        columns: key of a sum -> its index in `values`.
        values: the sums, followed by the number of samples.
        part: Whether the sums are sums over a part of the batch. There, a factor that is 0 or
            not finite counts as 1, and each condition counts as true (`guards_of`).
    """
    match expression:
        case ConstantExpression():
            return expression.value
        case SampleCount():
            return values[-1]
        case BatchSum():
            return values[columns[expression.key]]
        case Factor():
            factor = _evaluate(expression.value, columns, values)
            return torch.where((factor != 0) & factor.isfinite(), factor, 1) if part else factor
        case Conditional():
            denominator = _evaluate(expression.denominator, columns, values, part)
            if part:
                return denominator
            holds = _evaluate(expression.condition, columns, values)
            return torch.where(holds, denominator, torch.full_like(values[-1], math.inf))
        case ElementwiseExpression():
            found = [
                _evaluate(x, columns, values, part) if isinstance(x, Expression) else x.value
                for x in expression.arguments
            ]
            # Some operations take only tensors, so a number becomes a tensor.
            given = [
                torch.full_like(values[-1], x) if isinstance(y, ConstantExpression) else x
                for x, y in zip(found, expression.arguments, strict=True)
            ]
            return expression.operation(*given, **dict(expression.keywords))
    raise AssertionError(expression)


def _reads_shape(node: Node) -> bool:
    """Return whether the node fills a tensor with a number, and reads only the shape of its input."""
    return node.target in _VALUES and not (_VALUES[node.target] is None and isinstance(node.args[-1], Node))


class _SumCodeBuilder:
    """A builder of a graph that computes the sums over the batch.

    Attributes:
        graph: the new graph.
        env: node of the joint graph -> its copy in `graph`.
        placeholders: the copied placeholders of the joint graph, in the order of the copies.
    """

    def __init__(self) -> None:
        self.graph, self.env = torch.fx.Graph(), dict[Node, Node]()
        self.placeholders: list[Node] = []

    def stat(self, stat: BatchSum) -> Node:
        """Add the nodes that compute a sum over the batch, and return the last one."""
        match stat.how:
            case "labels":
                return self._labels(stat.node)
            case "rows":
                return self.graph.call_function(aten.sum.default, (self.copy(stat.node),), _DOUBLE)
            case "sum" if stat.node.target is aten.sum.default:
                return self.graph.call_function(aten.sum.default, (self.copy(stat.node.args[0]),), _DOUBLE)
        return self.copy(stat.node)

    def copy(self, node: Any) -> Node:
        """Copy a node with all nodes that it depends on, and return the copy. A node that was copied before
        is not copied again."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [] if _reads_shape(top) else [x for x in top.all_input_nodes if x not in self.env]
            if not missing and top not in self.env:
                self.env[top] = self._one(top)
            if not missing:
                stack.pop()
            stack += missing
        return self.env[node]

    def _one(self, node: Node) -> Node:
        """Copy one node whose inputs are copied already, and return the copy. For a detach, return the copy
        of its input."""
        if node.op == "placeholder":
            self.placeholders.append(node)
            return self.graph.placeholder(node.name)
        if node.target is aten.detach.default:
            return self.env[node.all_input_nodes[0]]
        if _reads_shape(node):
            return self._full(node)
        copied = self.graph.node_copy(node, self.env.__getitem__)
        if node.target is aten.view.default:
            copied.target = aten.reshape.default
        return copied

    def _full(self, node: Node) -> Node:
        """Return a node that fills a tensor as `node` does, without the input that has the shape.

        Raises:
            NotSymbolic: the shape depends on the number of samples.
        """
        made, value = node.meta["val"], _VALUES[node.target]
        if not all(type(size) is int for size in made.shape):
            raise NotSymbolic("a denominator counts in the shape of another value")
        arguments = (list(made.shape), node.args[-1] if value is None else value)
        return self.graph.call_function(
            aten.full.default, arguments, {"dtype": made.dtype, "device": made.device}
        )

    def _labels(self, loss: Node) -> Node:
        """Return a node for the sum of class weights over the labels that a negative log likelihood does not
        ignore."""
        _, target, weight, _, ignored = loss.args
        call = self.graph.call_function
        labels = self.copy(target)
        counts = call(aten.ne.Scalar, (labels, ignored))
        if weight is None:
            return call(aten.sum.default, (counts,), _DOUBLE)
        # an ignored label may not be a valid class index, so replace it by 0
        known = call(aten.mul.Tensor, (labels, counts))
        weights = call(aten.index.Tensor, (self.copy(weight), [known]))
        return call(aten.sum.default, (call(aten.mul.Tensor, (weights, counts)),), _DOUBLE)
