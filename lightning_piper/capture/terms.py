"""What the loss and logged values are on parts of a batch: means over samples, sums, ratios, or sums of several of these.

Read from the traced graph, back from each result. What is reduced over the samples is known by its operation; what is computed
from that follows by a few rules. Whether a tensor has samples in it, and whether a number counts samples, can often be seen.
Where it cannot, a second trace at another size shows it: the two are walked side by side, and what differs follows the size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.averages import COUNT
from lightning_piper.capture import _torch
from lightning_piper.capture.denominators import ONE, SAMPLES, Expression, Number, Operation, Stat, over, times
from lightning_piper.capture.keys import Keys
from lightning_piper.capture.rowwise import known_rows

aten = torch.ops.aten

# Reductions of losses: operation -> place of its argument `reduction` (0 none, 1 mean, 2 sum).
_LOSSES = {
    aten.mse_loss.default: 2, aten.smooth_l1_loss.default: 2, aten.huber_loss.default: 2, aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3, aten.binary_cross_entropy_with_logits.default: 4,
    aten.multilabel_margin_loss_forward.default: 2, aten.multi_margin_loss.default: 5,
}  # fmt: skip
_NLL = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
# What hands on a reduced value, or a part of it.
_SAME = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default, aten.detach.default,
    aten.alias.default, aten._to_copy.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default,
    aten.neg.default, aten.expand.default, aten.select.int, aten.slice.Tensor, aten.permute.default, aten.t.default,
    aten.transpose.int, operator.getitem,
}  # fmt: skip
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_MEANS = {aten.mean.default, aten.mean.dim}
_EXTREMES = {aten.max.default: "max", aten.amax.default: "max", aten.min.default: "min", aten.amin.default: "min"}
# Of another tensor they take what it is made of, and no value.
_CONSTANTS = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.zeros_like.default, aten.ones_like.default,
              aten.full_like.default}  # fmt: skip
_JOINED = {aten.stack.default, aten.cat.default}
_ADDED = {aten.add.Tensor: 1.0, aten.add.Scalar: 1.0, aten.sub.Tensor: -1.0, aten.sub.Scalar: -1.0, aten.rsub.Scalar: -1.0,
          aten.rsub.Tensor: -1.0}  # fmt: skip
_MULTIPLIED = {aten.mul.Tensor, aten.mul.Scalar}
_DIVIDED = {aten.div.Tensor, aten.div.Scalar}

WHOLE, ROWS, LINEAR, MIXED, OTHER = "whole", "rows", "linear", "mixed", "other"


@dataclass(frozen=True)
class Found:
    """What a value is, on parts of the batch.

    Attributes:
        what: `whole`: it does not follow from the batch; `rows`: it has samples in it, divided by `denominator` if there is one;
            `linear`: the whole batch's is the sum of the parts', weighed by `denominator`; `mixed`: a sum of such; `max` or `min`
            of the parts'; or `other`.
    """

    what: str
    denominator: Expression | None = None


class Terms:
    """Finds what the values of a traced graph are.

    Args:
        graph: of a step.
        size: samples with which it was traced.
        beside: gives the same step at another size, and this size; None where there is none.
    """

    def __init__(self, graph: torch.fx.Graph, size: int, beside: Callable[[], tuple[torch.fx.Graph, int] | None]) -> None:
        self.graph, self.size, self._ask = graph, size, beside
        self.uses: dict[int, dict[tuple[Node, Node], float]] = {}  # `Stat.key` -> (who reads it, it there) -> what it is of the sum
        self._found: dict[Node, Found] = {}
        self._keys = Keys()
        self._from_batch: set[Node] = set()
        self._from_params: set[Node] = set()
        changed = _changed_buffers(graph)
        for node in graph.nodes:
            self._enter(node, changed)

    def _enter(self, node: Node, changed: set[str]) -> None:
        """Does the node follow from the batch's samples, from parameters? Buffers that change and random numbers count as such."""
        if node.op == "placeholder":
            desc = node.meta.get("desc")
            if isinstance(desc, _torch.PlainAOTInput):
                if node.meta["val"].ndim:
                    self._from_batch.add(node)
            elif not isinstance(desc, _torch.BufferAOTInput) or desc.target in changed:
                self._from_params.add(node)
            return
        if node.target in _CONSTANTS and node.meta["val"].ndim == 0:
            return
        inputs = node.all_input_nodes
        if any(x in self._from_batch for x in inputs):
            self._from_batch.add(node)
        if any(x in self._from_params for x in inputs) or _torch.is_random(node):
            self._from_params.add(node)

    def of(self, node: Node) -> Found:
        """What a value is."""
        if node not in self._found:
            self._found[node] = Found(WHOLE) if node not in self._from_batch else self._by_operation(node)
        return self._found[node]

    def is_whole(self, value: Any) -> bool:
        return not isinstance(value, Node) or value not in self._from_batch

    def _by_operation(self, node: Node) -> Found:
        target: Any = node.target
        if node.op != "call_function":
            return Found(ROWS if self._has_rows(node) else OTHER)
        if target is operator.getitem and isinstance(node.args[0], Node) and node.args[0].target in _NLL:
            return self._nll(node)
        if target in _LOSSES:
            return self._reduced(node, node.args[_LOSSES[target]] if len(node.args) > _LOSSES[target] else 1)
        if target in _SUMS | _MEANS:
            return self._summed(node)
        if target in _EXTREMES and node.meta["val"].ndim == 0:
            inner = self.of(node.args[0])  # type: ignore[arg-type]
            return Found(_EXTREMES[target]) if inner.what == ROWS else Found(OTHER)
        if node.meta.get("val") is None or (getattr(node.meta["val"], "ndim", False) and self._has_rows(node)):
            return self._rows_of(node)
        if target in _SAME:
            return self.of(node.args[0])  # type: ignore[arg-type]
        if target in _JOINED:
            return self._together(node.args[0])  # type: ignore[arg-type]
        if target in _ADDED:
            return self._added(node)
        if target in _MULTIPLIED | _DIVIDED and (found := self._scaled(node)).what != OTHER:
            return found
        # What follows from the batch alone is known for the whole of it: d(s) = (n/N) d(s) / d(s_i) d(s_i), summed over the parts.
        value = self.expression(node)
        return Found(OTHER) if value is None else Found(LINEAR, over(SAMPLES, value))

    def _rows_of(self, node: Node) -> Found:
        """Rows may be divided by a sum over the batch before they are summed up: `weights / weights.sum()`."""
        target: Any = node.target
        if target in _SAME:
            return Found(ROWS, self._divided(node.args[0]))
        if target not in _MULTIPLIED | _DIVIDED:
            return Found(ROWS)
        first, second = node.args[:2]
        by = [self._divided(x) for x in (first, second)[: 2 - (target in _DIVIDED)]]
        for x, is_divisor in ((first, False), (second, target in _DIVIDED)):
            if (
                isinstance(x, Node)
                and x in self._from_batch
                and self.of(x).what == LINEAR
                and (found := self.expression(x)) is not None
            ):
                by.append(found if is_divisor else over(ONE, found))
        known = [x for x in by if x is not None]
        return Found(ROWS, functools.reduce(times, known) if known else None)

    def _divided(self, value: Any) -> Expression | None:
        found = self.of(value) if isinstance(value, Node) else Found(WHOLE)
        return found.denominator if found.what == ROWS else None

    # Reductions

    def _nll(self, node: Node) -> Found:
        made: Any = node.args[0]
        reduction = made.args[3]
        if node.args[1] != 0 or reduction == 0:
            return Found(ROWS if reduction == 0 and node.args[1] == 0 else OTHER)
        if reduction == 2:
            return Found(LINEAR, ONE)
        _, target, weight, _, ignored = made.args
        if target in self._from_params or (weight is not None and weight in self._from_params):
            return Found(OTHER)
        if target not in self._from_batch:  # as many labels as there are rows
            return Found(LINEAR, SAMPLES) if weight is None else Found(OTHER)
        return Found(LINEAR, Stat(self._keys.form(("labels", self._keys.of(target), weight and self._keys.of(weight), ignored)),
                                  made, "labels"))  # fmt: skip

    def _reduced(self, node: Node, reduction: Any) -> Found:
        if reduction == 0:
            return Found(ROWS)
        rows = any(self.of(x).what == ROWS for x in node.all_input_nodes)
        return Found(LINEAR, SAMPLES if reduction == 1 else ONE) if rows else Found(OTHER)

    def _summed(self, node: Node) -> Found:
        source: Any = node.args[0]
        inner = self.of(source)
        if inner.what in (LINEAR, MIXED):
            return inner
        if inner.what != ROWS or (node.meta["val"].ndim and self._has_rows(node)):
            return inner
        return Found(LINEAR, times(ONE if node.target in _SUMS else SAMPLES, inner.denominator or ONE))

    # What is computed from reduced values

    def _together(self, nodes: Iterable[Any]) -> Found:
        """Of a sum of values, some of which may not follow from the batch."""
        found = [self.of(x) for x in nodes if not self.is_whole(x)]
        some_whole = len(found) < len(list(nodes))
        if any(f.what not in (LINEAR, MIXED) for f in found):
            return Found(OTHER)
        kinds = {f.denominator for f in found}
        if MIXED in {f.what for f in found} or len(kinds) > 1:
            return Found(MIXED)
        # The weights of a sum do not add up to 1, so what is the same on every part cannot go with it.
        return Found(MIXED) if some_whole and not _adds_up_to_one(found[0].denominator) else found[0]

    def _added(self, node: Node) -> Found:
        first, second = node.args[:2]
        return self._together([first, second])

    def _scaled(self, node: Node) -> Found:
        """A product or a quotient with what does not follow from the batch, or follows from the batch alone."""
        factor = self.factor(node)
        if factor is None:
            return Found(OTHER)
        value, expression = factor
        inner = self.of(value)
        if inner.what == MIXED:
            return Found(MIXED) if expression == ONE else Found(OTHER)
        if inner.what != LINEAR or inner.denominator is None:
            return Found(OTHER)
        return Found(LINEAR, times(inner.denominator, expression))

    def factor(self, node: Node) -> tuple[Node, Expression] | None:
        """Of a product or a quotient: the operand that is weighed, and what its denominator is multiplied with."""
        first, second = node.args[:2]
        if node.target in _DIVIDED:
            if not isinstance(first, Node) or first not in self._from_batch:
                return None
            by = self._constant(second, node, 1)
            return None if by is None else (first, by)
        for value, other, place in ((first, second, 1), (second, first, 0)):
            if isinstance(value, Node) and value in self._from_batch and (by := self._constant(other, node, place)) is not None:
                return value, over(ONE, by)
        return None

    def _constant(self, value: Any, user: Node, place: int) -> Expression | None:
        """What a value that is no term changes in a denominator: nothing, if it is the same on every part."""
        if isinstance(value, Node):
            if value not in self._from_batch:
                number = self._number_of(value)
                return ONE if number is None else self._constant_number(number, value)
            known = self.expression(value)
            self._note(known, value, user)
            return known
        return self._constant_number(value, user, place)

    def _note(self, known: Any, value: Any, reader: Node) -> None:
        """A sum over the batch, or a mean, is read here on the way to a term."""
        stat, factor = known, 1.0
        if isinstance(known, Operation) and isinstance(known.arguments[0], Stat) and known.arguments[0].how == "rows":
            stat = known.arguments[0]
            factor = 1.0 / stat.node.meta["val"].numel()
        if isinstance(stat, Stat):
            self.uses.setdefault(stat.key, {})[reader, value] = factor

    def _constant_number(self, value: Any, node: Node, place: int | None = None) -> Expression | None:
        found = self._number(value, node, place)
        return ONE if isinstance(found, Number) else found

    def expression(self, node: Node) -> Expression | None:
        """A value that follows from the batch alone, as an expression of sums over it; None if it is none."""
        if node.target is COUNT:
            if node in self._from_params:
                return None
            return Stat(self._keys.of(node), node, "count")
        value = node.meta.get("val")
        if node in self._from_params or not isinstance(value, torch.Tensor) or value.ndim:
            return None
        target: Any = node.target
        if target in (aten.view.default, aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default,
                      aten.squeeze.default):  # fmt: skip
            return self.expression(node.args[0])  # type: ignore[arg-type]
        if target in _SUMS and self.of(node) == Found(LINEAR, ONE):
            return Stat(self._keys.of(node), node, "sum")
        if target is aten.mean.default and self.of(node) == Found(LINEAR, SAMPLES):
            source: Any = node.args[0]
            per_sample = Number(source.meta["val"].numel() / self.size)
            return over(Stat(self._keys.form(("sum", self._keys.of(source))), source, "rows"), times(per_sample, SAMPLES))
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or torch.Tag.pointwise not in target.tags:
            return None
        given: list[Any] = []
        for place, argument in enumerate(node.args):
            if isinstance(argument, Node):
                known = self.expression(argument) if argument in self._from_batch else self._literal(argument)
            elif isinstance(argument, int | float) and not isinstance(argument, bool):
                known = self._number(argument, node, place)
            else:
                known = Operation.given(argument)
            if known is None:
                return None
            self._note(known, argument, node)
            given.append(known)
        return Operation(target, tuple(given), tuple(sorted(node.kwargs.items()))) if _hashable(node.kwargs) else None

    def _literal(self, node: Node) -> Expression | None:
        number = self._number_of(node)
        return None if number is None else self._number(number, node, None)

    def _number_of(self, node: Node) -> float | None:
        """The number that a tensor without dimensions was made from."""
        if node.target is aten.full.default and node.args[0] == []:
            return node.args[1]  # type: ignore[return-value]
        return node.args[0] if node.target is aten.scalar_tensor.default else None  # type: ignore[return-value]

    # What follows the size

    def _number(self, value: Any, node: Node, place: int | None) -> Expression | None:
        """A number that the step calculates with: itself, or a multiple or a fraction of the number of samples."""
        if not isinstance(value, int | float) or not value or value != value:
            return Number(value)
        if value % self.size and round(1 / value, 6) % self.size:
            return Number(value)
        other = self._beside.get(node) if self._beside is not None else None
        if other is None:
            return None if self._beside is not None else Number(value)
        there: Any = self._number_of(other) if place is None else other.args[place]
        if there == value:
            return Number(value)
        size = self._other_size
        if abs(value * size - there * self.size) <= 1e-9 * abs(value) * size:
            return times(Number(value / self.size), SAMPLES)
        if abs(value * self.size - there * size) <= 1e-9 * abs(value) * size:
            return over(Number(value * self.size), SAMPLES)
        return None

    def _has_rows(self, node: Node) -> bool:
        if node in self._rows:
            return True
        if self._beside is None or (other := self._beside.get(node)) is None:
            return True  # what follows from samples and is not known to be reduced
        a, b = node.meta.get("val"), other.meta.get("val")
        return not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape

    @cached_property
    def _rows(self) -> set[Node]:
        return known_rows(self.graph, self.size)

    @cached_property
    def _beside(self) -> dict[Node, Node] | None:
        """Each node -> the same one at another size, as far as both traces are alike."""
        found = self._ask()
        if found is None:
            return None
        other, self._other_size = found
        paired: dict[Node, Node] = {}
        stack = list(zip(_results(self.graph), _results(other), strict=False))
        while stack:
            a, b = stack.pop()
            if a in paired or a.op != b.op or (a.op == "call_function" and a.target is not b.target):
                continue
            paired[a] = b
            stack += zip(a.all_input_nodes, b.all_input_nodes, strict=False)
        return paired


def _adds_up_to_one(denominator: Expression | None) -> bool:
    # Where something else than labels is counted, a part in which nothing counts has a weight, see `Denominator.of`.
    return denominator == SAMPLES or (isinstance(denominator, Stat) and denominator.how == "labels")


def _hashable(kwargs: Any) -> bool:
    try:
        hash(tuple(sorted(kwargs.items())))
    except TypeError:
        return False
    return True


def _changed_buffers(graph: torch.fx.Graph) -> set[str]:
    found = [d.mutated_input for d in graph.output_node().meta["desc"] if isinstance(d, _torch.InputMutationAOTOutput)]
    return {buffer.target for buffer in found if isinstance(buffer, _torch.BufferAOTInput)}


def _results(graph: torch.fx.Graph) -> list[Node]:
    """What the step itself hands out, in order: not gradients."""
    output = graph.output_node()
    described = zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
    return [node for node, desc in described if isinstance(desc, _torch.PlainAOTOutput) and isinstance(node, Node)]
