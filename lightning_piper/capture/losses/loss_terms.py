"""Find how the loss and logged values on parts of the batch combine: as means over samples, sums, ratios, or
sums of these.

The analysis follows the traced graph backwards from each result. An operation that reduces the samples shows
how its result combines. A few rules derive how values that are computed from this result combine. The graph
often shows whether a tensor has a sample dimension, and whether a number counts samples. Otherwise, a second
trace at another size is compared node by node: whatever differs depends on the size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.averages import COUNT
from lightning_piper.capture.joint.computation_keys import ComputationKeys
from lightning_piper.capture.joint.joined_part import after_gathers
from lightning_piper.capture.joint.operations import (
    CHAINED,
    CHOSEN,
    CONSTANTS,
    CONTRACTED,
    JOINED,
    LOSSES,
    OTHER_END,
    SAME,
    SCATTERED,
    extreme_of,
    is_coarser,
    is_product_with_zero,
    is_zero,
)
from lightning_piper.capture.losses.batch_dependence import Ask, BatchDependence
from lightning_piper.capture.losses.changed_buffers import names_of_changed_buffers
from lightning_piper.capture.losses.combination import (
    LINEAR,
    MIXED,
    OTHER,
    ROWS,
    WHOLE,
    Combination,
    Reduction,
)
from lightning_piper.capture.losses.cross_sample import differs_by_position
from lightning_piper.capture.losses.denominators import (
    ONE,
    SAMPLES,
    BatchSum,
    Conditional,
    ConstantExpression,
    ElementwiseExpression,
    Expression,
    Factor,
    adds_up_to_one,
    over,
    simplified,
    stats_of,
    times,
)
from lightning_piper.capture.losses.sample_trial import Constants
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import (
    ADDED,
    COPIES,
    DIVIDED,
    MEANS,
    MULTIPLIED,
    NLL,
    RESHAPES,
    SQUEEZES,
    SUMS,
)
from lightning_piper.ir.values import Sharded
from lightning_piper.totals import TOTAL

aten = torch.ops.aten


class LossTerms:
    """An analysis of how each value of a traced graph follows from its values on parts of the batch.

    Args:
        graph: The graph of a step.
        size: Number of samples in the trace.
        beside: Returns a trace at another size, like `ask` of `BatchDependence`.

    Attributes:
        dependence: An analysis of which values depend on the number of samples.
        joined: Nodes that are computed from gathered samples, and so have the same value on every part.
        uses: A factor, or a denominator with a condition -> (the node that reads the factor or the condition,
            the node of the factor or condition).
    """

    def __init__(self, graph: torch.fx.Graph, size: int, beside: Ask) -> None:
        self.size, self.dependence = size, BatchDependence(graph, size, beside)
        self.uses: dict[Factor | Conditional, set[tuple[Node, Node]]] = {}
        self.unweighted: set[Node] = set()  # sums with the number of samples, changed buffers
        self._of_batch: set[Node] = set()  # nodes that `of` finds to follow from the batch alone
        self._found: dict[Node, Combination] = {}
        self._keys = ComputationKeys()
        self._constants: Constants = {}
        self._from_batch: set[Node] = set()  # nodes that depend on the batch's samples
        self._from_params: set[Node] = set()  # nodes for which `is_trained` is true
        self.joined = after_gathers(graph, apart=True)
        changed = names_of_changed_buffers(graph)
        for node in graph.nodes:
            self._enter(node, changed)

    def _enter(self, node: Node, changed: set[str]) -> None:
        """Record whether the node depends on the batch's samples, and whether it depends on parameters.
        Random numbers and buffers that the step changes count as parameters."""
        if node.op == "placeholder":
            desc = node.meta.get("desc")
            if isinstance(desc, _torch.PlainAOTInput):
                if node.meta["val"].ndim:
                    self._from_batch.add(node)
            elif not isinstance(desc, _torch.BufferAOTInput) or desc.target in changed:
                self._from_params.add(node)
            return
        # A sum over the whole batch is the same on every part.
        if node.target in CONSTANTS or node.target is TOTAL:
            return
        inputs = node.all_input_nodes
        if any(x in self._from_batch for x in inputs) and node not in self.joined:
            self._from_batch.add(node)
        if any(x in self._from_params for x in inputs) or _torch.is_random(node):
            self._from_params.add(node)

    def of(self, node: Node) -> Combination:
        """Return how the whole batch's value of this node follows from its values on parts of the batch."""
        stack = [node]
        while stack:
            top = stack[-1]
            chained = top.op == "call_function" and top.target in CHAINED and top in self._from_batch
            missing = [x for x in top.all_input_nodes if x not in self._found] if chained else []
            if not missing:
                stack.pop()
                if top not in self._found:
                    self._found[top] = self._by_operation(top) if self._varies(top) else Combination(WHOLE)
            stack += missing
        return self._found[node]

    def is_trained(self, node: Node) -> bool:
        """Return whether the value depends on parameters, on buffers that the step changes, or on random
        numbers."""
        return node in self._from_params

    def is_whole(self, value: Any) -> bool:
        """Return whether the value is independent of the samples' data. The value may depend on the number of
        samples."""
        return not isinstance(value, Node) or value not in self._from_batch

    def _varies(self, value: Any) -> bool:
        """Return whether the value is a tensor that differs between parts of the batch, because of their
        samples or of their number."""
        return isinstance(value, Node) and (value in self._from_batch or self.changes(value))

    def changes(self, node: Node) -> bool:
        """Return whether the value is computed from the number of samples, so that it differs between parts
        of the batch of different sizes. Values in `joined` do not differ."""
        return node not in self.joined and self.dependence.changes(node)

    def _by_operation(self, node: Node) -> Combination:
        """Return how the value of `node` combines, according to its operation. The caller has checked that
        the value differs between parts of the batch."""
        target: Any = node.target
        if node.op != "call_function":
            return Combination(ROWS if self.dependence.has_rows(node) else OTHER)
        if target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].target in NLL:
            return self._nll(node)
        if target in LOSSES:
            return self._reduced(node, node.args[LOSSES[target]] if len(node.args) > LOSSES[target] else 1)
        if target in SUMS | MEANS:
            return self._summed(node)
        if (extreme := extreme_of(node)) is not None and not self.dependence.has_rows(node):
            return (
                Combination(Reduction(extreme[0]))
                if self.of(extreme[1]).reduction == ROWS
                else Combination(OTHER)
            )
        if target is aten.histc.default and node.args[2:] and node.args[2] < node.args[3]:  # type: ignore[operator]
            rows = self.of(node.args[0]) == Combination(ROWS)  # type: ignore[arg-type]
            return Combination(LINEAR, ONE) if rows else Combination(OTHER)
        if target in SCATTERED and not self.dependence.has_rows(node):
            return self._scattered(node)
        if node.meta.get("val") is None or (
            getattr(node.meta["val"], "ndim", False) and self.dependence.has_rows(node)
        ):
            return self._rows_of(node)
        if target in SAME:
            inner = self.of(node.args[0])  # type: ignore[arg-type]
            # The value is one of the rows, or it is rounded separately on each part.
            if inner.reduction == ROWS or (inner.reduction in (LINEAR, MIXED) and is_coarser(node)):
                return Combination(OTHER)
            return (
                Combination(Reduction(OTHER_END[inner.reduction]))
                if target is aten.neg.default and inner.reduction in OTHER_END
                else inner
            )
        if target in CONTRACTED and (summed := self._contracted(node)) is not None:
            return summed
        if target in JOINED:
            return self._together(node.args[0])  # type: ignore[arg-type]
        if target is aten.where.self and (chosen := self._chosen(node)) is not None:
            return chosen
        if target is aten.nan_to_num.default:
            return self._without_nan(node)
        if target in ADDED:
            return self._added(node)
        if target in MULTIPLIED | DIVIDED | CONTRACTED and (found := self._scaled(node)).reduction != OTHER:
            return found
        # A value d that follows from the batch alone is known for the whole batch and for each part i (d_i).
        # With n_i of the N samples in part i, d is the sum over the parts of (n_i/N) (d/d_i) d_i.
        value = self.expression(node)
        if value is None:
            return Combination(OTHER)
        if stats_of(value):
            self._of_batch.add(node)
        return Combination(LINEAR, over(SAMPLES, value))

    def follows_from_batch(self, node: Node) -> bool:
        """Return whether the node's value is a function of sums over the batch, such as the root of a count.
        Then weights combine its values on parts of the batch only if none of them is 0."""
        self.of(node)
        while node.target in SAME and isinstance(node.args[0], Node):
            node = node.args[0]
        return node in self._of_batch

    # Values with a sample dimension. A sum over the batch may divide the rows before they are summed:
    # `weights / weights.sum()`.

    def _rows_of(self, node: Node) -> Combination:
        """Return how a value with a sample dimension combines: as rows, with their common divisor. Return
        `OTHER` if the rows do not have a common divisor."""
        target: Any = node.target
        if target in JOINED or target in SAME:
            parts: Any = node.args[0] if target in JOINED else [node.args[0]]
            if all(isinstance(x, Node) and self._is_list(x, target in JOINED) for x in parts):
                found_linear = self._together(parts)
                return found_linear if found_linear.reduction == LINEAR else Combination(OTHER)
        # `found`: the divisors of the rows of the operands. None stands for an unknown divisor.
        if target in SAME and target is not operator.getitem:
            found = [self._divided(node.args[0])]
        elif target in MULTIPLIED | DIVIDED:
            found = [self._multiplied(node)]
        elif target in ADDED or target in JOINED or target in CHOSEN:
            positions = CHOSEN.get(target, (0, 1))
            arguments: Any = node.args[0] if target in JOINED else [node.args[i] for i in positions]
            found = list({self._divided(x) for x in arguments if not is_zero(x)})
            if target in JOINED and not all(self._varies(x) for x in arguments):
                found = [None]  # some rows are not rows of samples
            # a number that is added to each row, or that scales the rows, follows the number of samples
            if target not in JOINED and not all(self._is_constant(node, i) for i in (*positions, "alpha")):
                found = [None]
        elif target is aten.full.default or CONSTANTS.get(target, 0.0) is None:
            position = 1 if target is aten.full.default else len(node.args) - 1
            known = self._constant(node.args[position], node, position)
            found = [None if known is None else over(ONE, known)]
        else:
            found = [ONE]
        if len(found) > 1 or None in found:
            return Combination(OTHER)
        return Combination(ROWS, None if not found or found[0] == ONE else found[0])

    def _is_list(self, value: Node, joined: bool) -> bool:
        """Return whether each element of a value, or of a list of such values that are `joined`, is reduced over
        samples, although a dimension depends on their number: it counts chunks of rows."""
        return self.of(value).reduction == LINEAR and self.dependence.has_rows(value) is not joined

    def _divided(self, value: Any) -> Expression | None:
        """Return the expression that divides each row of a value. Return None if the rows do not have a
        common divisor.

        A linear value, such as a mean, may be added to each row. Then it counts once for each sample, so the
        result is its denominator divided by the number of samples.
        """
        found = self.of(value) if isinstance(value, Node) else Combination(WHOLE)
        if found.reduction == LINEAR and found.denominator is not None:
            return simplified(over(found.denominator, SAMPLES))
        return found.denominator or ONE if found.reduction in (WHOLE, ROWS) else None

    def _multiplied(self, node: Node) -> Expression | None:
        """Return the expression that divides each row of a product or quotient. Return None if the rows do
        not have a common divisor, or if a factor is unknown."""
        made: Expression = ONE
        for position, value in enumerate(node.args[:2]):
            divides = position == 1 and node.target in DIVIDED
            if isinstance(value, Node) and self.of(value).reduction == ROWS:
                by = self._divided(value)
                divides = not divides
            else:
                by = self._constant(value, node, position)
            if by is None:
                return None
            made = made if by == ONE else times(made, by if divides else over(ONE, by))
        return made

    def _is_constant(self, node: Node, position: int | str) -> bool:
        """Return whether an argument of the node is not a number that depends on the number of samples.

        Args:
            position: the position of the argument, or its name.
        """
        value = node.kwargs.get(position) if isinstance(position, str) else node.args[position]
        numbers = isinstance(value, int | float)
        return not numbers or isinstance(self.dependence.number(value, node, position), ConstantExpression)

    # Reductions over the samples.

    def _nll(self, node: Node) -> Combination:
        """Return how a result of a negative log likelihood combines.

        `OTHER` for the second result, the total weight of the labels, and for a mean whose labels or class
        weights depend on parameters.
        """
        made: Any = node.args[0]
        reduction = made.args[3]
        if node.args[1] != 0 or reduction == 0:
            return Combination(ROWS if reduction == 0 and node.args[1] == 0 else OTHER)
        if reduction == 2:
            return Combination(LINEAR, ONE)
        _, target, weight, _, ignored = made.args
        if target in self._from_params or (weight is not None and weight in self._from_params):
            return Combination(OTHER)
        if target not in self._from_batch:  # the labels do not depend on the samples: one for each row
            return Combination(LINEAR, SAMPLES) if weight is None else Combination(OTHER)
        key = self._keys.number_of(
            ("labels", self._keys.of(target), weight and self._keys.of(weight), ignored)
        )
        return Combination(LINEAR, BatchSum(key, made, "labels"))

    def _reduced(self, node: Node, reduction: Any) -> Combination:
        """Return how a torch loss combines whose argument `reduction` is 0 (none), 1 (mean) or 2 (sum).

        `OTHER` for a mean or sum of inputs without rows of samples.
        """
        if reduction == 0:
            return Combination(ROWS)
        rows = any(self.of(x).reduction == ROWS for x in node.all_input_nodes)
        return Combination(LINEAR, SAMPLES if reduction == 1 else ONE) if rows else Combination(OTHER)

    def _summed(self, node: Node) -> Combination:
        """Return how a sum or a mean over dimensions of a value combines."""
        source: Any = node.args[0]
        if is_zero(source):
            return Combination(WHOLE)  # a sum of zeros is 0 on every part
        inner = self.of(source)
        if inner.reduction in OTHER_END:
            # A sum of maxima does not combine: the maxima of two columns may come from different
            # microbatches.
            return Combination(OTHER)
        if node.target in MEANS and inner.reduction == LINEAR and self.dependence.has_rows(source):
            return Combination(OTHER)  # a mean over a number of chunks that depends on the number of samples
        if inner.reduction != ROWS or (node.meta["val"].ndim and self.dependence.has_rows(node)):
            return inner
        # The rows contain a factor that differs between parts of other sizes.
        if node.target in SUMS and inner.denominator is None and self.dependence.is_scaled_by_size(source):
            return Combination(OTHER)
        return Combination(LINEAR, times(ONE if node.target in SUMS else SAMPLES, inner.denominator or ONE))

    def _scattered(self, node: Node) -> Combination:
        """Return how a scatter combines, which adds rows of samples, at indices, to a tensor without samples.

        `LINEAR` if each sample has an index, and if the tensor is zero or has the denominator of the rows.
        `OTHER` in all other cases, such as a scatter that overwrites elements.
        """
        target: Any = node.target
        into, source = node.args[0], node.args[SCATTERED[target]]
        indices = [x for x in node.all_input_nodes if x not in (into, source)]
        overwrites = target is aten.index_put.default and not (len(node.args) > 3 and node.args[3])
        if overwrites or node.kwargs or not any(map(self.dependence.has_rows, indices)):
            return Combination(OTHER)
        by, inner = self._divided(source), Combination(LINEAR, ONE) if is_zero(into) else self.of(into)  # type: ignore[arg-type]
        return Combination(OTHER) if by is None or inner != Combination(LINEAR, by) else inner

    def _contracted(self, node: Node) -> Combination | None:
        """Return how the contraction of `node` over the samples combines. Return None if an operand does not
        consist of rows.

        The caller has checked that the result does not have a sample dimension. In `x @ x`, x is the only
        input, so its denominator counts twice.
        """
        found = [self.of(x) for x in node.all_input_nodes]
        if any(f.reduction != ROWS for f in found):
            return None
        return Combination(
            LINEAR, functools.reduce(times, (f.denominator or ONE for f in found * (2 // len(found))))
        )

    # Values computed from reduced values.

    def _together(self, nodes: Iterable[Any]) -> Combination:
        """Return how a sum, stack or concatenation of `nodes` combines. An entry may be a number, or a node
        that does not depend on the batch."""
        nodes = list(nodes)
        found = [known for x in nodes if self._varies(x) and (known := self.of(x)).reduction != WHOLE]
        if not found:
            return Combination(WHOLE)
        some_whole = len(found) < len(nodes)
        if any(f.reduction not in (LINEAR, MIXED) for f in found):
            return Combination(OTHER)
        kinds = {f.denominator for f in found}
        if MIXED in {f.reduction for f in found} or len(kinds) > 1 or any(x in self.joined for x in nodes):
            return Combination(MIXED)
        # The weights of a sum do not add up to 1, so a value that is the same on every part needs a separate
        # term.
        return Combination(MIXED) if some_whole and not adds_up_to_one(found[0].denominator) else found[0]

    def _chosen(self, node: Node) -> Combination | None:
        """Return how `torch.where(n > 0, total / n, 0)` combines: a ratio, replaced by 0 unless a condition on
        the whole batch holds. Return None for other conditions and values."""
        condition, value, other = node.args
        if not isinstance(condition, Node) or not isinstance(value, Node) or not isinstance(other, Node):
            return None
        inner, number, asked = self.of(value), self.dependence.literal(other), self.expression(condition)
        zero = number == ConstantExpression(0) or is_product_with_zero(other)
        if (
            inner.reduction != LINEAR
            or inner.denominator is None
            or not zero
            or asked is None
            or not stats_of(asked)
        ):
            return None
        made = Conditional(asked, inner.denominator)
        self.uses.setdefault(made, set()).add((node, condition))
        return Combination(LINEAR, made)

    def _without_nan(self, node: Node) -> Combination:
        """Return how `torch.nan_to_num(total / n)` combines: a ratio, replaced by 0 if the denominator of the
        whole batch is 0."""
        inner = self.of(node.args[0])  # type: ignore[arg-type]
        if inner.reduction != LINEAR or inner.denominator is None or (node.args[1:] and node.args[1]):
            return Combination(OTHER)
        if not stats_of(inner.denominator):
            return inner
        size = ElementwiseExpression(aten.abs.default, (inner.denominator,))
        known = ElementwiseExpression(aten.gt.Scalar, (size, ConstantExpression(0)))
        return Combination(LINEAR, Conditional(known, inner.denominator))

    def _added(self, node: Node) -> Combination:
        """Return how a sum or a difference combines.

        The first operand may be a maximum or minimum, if the second is the same on every part. The result is
        then a maximum or minimum. `rsub` negates the first operand, so it exchanges maximum and minimum.
        """
        first, second = node.args[:2]
        if not self._is_constant(node, "alpha"):
            return Combination(OTHER)
        sized = [x for i, x in enumerate((first, second)) if self._follows_size(x, node, i)]
        if len(sized) == 1 and self.dependence.is_multiple(sized[0], node):
            # `len(x) - total`: the totals of the parts add up to the batch's total, and so do the numbers of samples
            total = second if sized[0] is first else first
            if isinstance(total, Node) and self.of(total) == Combination(LINEAR, ONE):
                return Combination(LINEAR, ONE)
        if sized:
            self.unweighted.add(node)
        if (
            not self._varies(second)
            and "alpha" not in node.kwargs
            and isinstance(first, Node)
            and (inner := self.of(first)).reduction in OTHER_END
        ):
            negated = node.target in (aten.rsub.Scalar, aten.rsub.Tensor)
            return Combination(Reduction(OTHER_END[inner.reduction])) if negated else inner
        # A loop over parts of a loss begins with 0, as `sum` does. Only a sum stays a sum if it is negated.
        summands: list[Any] = [x for x in (first, second) if not is_zero(x)]
        if len(summands) == 1 and (only := self.of(summands[0])).reduction == LINEAR:
            return only
        return self._together([first, second])

    def _follows_size(self, value: Any, user: Node, position: int) -> bool:
        """Return whether an operand is computed from the number of samples alone."""
        alone = isinstance(value, Node) and value not in self._from_batch and self.changes(value)
        return alone or not self._is_constant(user, position)

    def _scaled(self, node: Node) -> Combination:
        """Return how a product or quotient combines. Unless one of its operands is the same on every part or
        follows from the batch alone, the result is `OTHER`."""
        factor = self.factor(node)
        if factor is None:
            return Combination(OTHER)
        value, expression = factor
        inner, by = self.of(value), node.args[1]
        if inner.reduction in OTHER_END and isinstance(by, int | float) and expression == ONE:
            return inner if by > 0 else Combination(Reduction(OTHER_END[inner.reduction]))
        if inner.reduction == MIXED:
            return Combination(MIXED) if expression == ONE else Combination(OTHER)
        if inner.reduction == WHOLE:  # the value is the same on every part, apart from its divisor
            return Combination(LINEAR, times(SAMPLES, expression))
        if inner.reduction != LINEAR or inner.denominator is None:
            return Combination(OTHER)
        return Combination(LINEAR, times(inner.denominator, expression))

    def factor(self, node: Node) -> tuple[Node, Expression] | None:
        """Return the operand of a product or quotient that combines from parts, and the factor by which the
        other operand changes its denominator. Return None if no such factor exists."""
        first, second = node.args[:2]
        if node.target in DIVIDED:
            by = self._constant(second, node, 1) if isinstance(first, Node) else None
            return None if by is None else (first, by)  # type: ignore[return-value]
        ways = [(first, second, 1), (second, first, 0)]
        for value, other, position in sorted(ways, key=lambda way: not self._varies(way[0])):
            if isinstance(value, Node) and (by := self._constant(other, node, position)) is not None:
                return value, over(ONE, by)
        return None

    def _constant(self, value: Any, user: Node, position: int) -> Expression | None:
        """Return a factor as an expression, or None if it is unknown. For a factor that is the same on every
        part, return 1, because it leaves the denominator unchanged. If the factor follows from sums over the
        batch, it is a `Factor`, and `uses` records that `user` reads it."""
        if isinstance(value, Node):
            known = self.expression(value) if self._varies(value) else ONE
            if known is not None and stats_of(known):
                factor = Factor(known)
                self.uses.setdefault(factor, set()).add((user, value))
                return factor
        else:
            known = self.dependence.number(value, user, position)
        return ONE if isinstance(known, ConstantExpression) else known

    def _differs_by_position(self, rows: Node) -> bool:
        """Return whether the rows are made of the number of samples alone and differ from each other, such as
        `torch.arange(n)`. Their sum over the batch is not the sum over its parts."""
        return rows not in self._from_batch and differs_by_position(rows, Sharded(0), self._constants)

    def expression(self, node: Node) -> Expression | None:
        """Return a scalar that follows from the batch alone, as an expression of sums over the batch. Return
        None for all other values."""
        if node.target is COUNT:
            if node in self._from_params:
                return None
            return BatchSum(self._keys.of(node), node, "count")
        value = node.meta.get("val")
        if node in self._from_params or not isinstance(value, torch.Tensor) or value.ndim:
            return None
        if node not in self._from_batch and (number := self.dependence.literal(node)) is not None:
            return number
        target: Any = node.target
        if target in RESHAPES | COPIES | SQUEEZES:
            inner = self.expression(node.args[0])  # type: ignore[arg-type]
            if inner is None or not is_coarser(node):
                return inner
            # a cast to integers rounds, and a cast to booleans has no counterpart among expressions
            return None if value.dtype == torch.bool else ElementwiseExpression(torch.trunc, (inner,))
        if target in SUMS | MEANS and self._differs_by_position(node.args[0]):  # type: ignore[arg-type]
            return None
        if target in SUMS and self.of(node) == Combination(LINEAR, ONE):
            return BatchSum(self._keys.of(node), node, "sum")
        if target is aten.any.default and self._is_mask(node.args[0]):
            return ElementwiseExpression(aten.gt.Scalar, (self._sum_of(node.args[0]), ConstantExpression(0)))
        if target is aten.mean.default and self.of(node) == Combination(LINEAR, SAMPLES):
            source: Any = node.args[0]
            per_sample = ConstantExpression(source.meta["val"].numel() / self.size)
            return over(
                self._sum_of(source),
                times(per_sample, SAMPLES),
            )
        if (
            node.op != "call_function"
            or not isinstance(target, torch._ops.OpOverload)
            or (torch.Tag.pointwise not in target.tags and target is not aten.floor_divide.default)
            or not all(self._is_constant(node, name) for name in node.kwargs)
        ):
            return None
        given: list[Any] = []
        for position, argument in enumerate(node.args):
            if isinstance(argument, Node):
                known = (
                    self.expression(argument) if self._varies(argument) else self.dependence.literal(argument)
                )
            elif isinstance(argument, int | float) and not isinstance(argument, bool):
                known = self.dependence.number(argument, node, position)
            else:
                known = ElementwiseExpression.given(argument)
            if known is None:
                return None
            given.append(known)
        known_by_value = all(isinstance(x, Hashable) for x in node.kwargs.values())
        return (
            ElementwiseExpression(target, tuple(given), tuple(sorted(node.kwargs.items())))
            if known_by_value
            else None
        )

    def _is_mask(self, rows: Any) -> bool:
        """Return whether the value has truth values for each sample that follow from the batch alone."""
        known = rows.meta["val"].dtype == torch.bool and self.of(rows) == Combination(ROWS)
        return known and not self._differs_by_position(rows)

    def _sum_of(self, rows: Any) -> BatchSum:
        """Return the sum of the elements of a value with rows of samples."""
        return BatchSum(self._keys.number_of(("sum", self._keys.of(rows))), rows, "rows")
