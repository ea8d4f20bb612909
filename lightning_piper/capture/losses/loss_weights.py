"""Give each term of the loss its own gradient, and each term of the loss and of logged values its weight.

    loss = tokens + 0.1 * squares                 tokens  <- its own tangent
                ^ tangent          --weigh-->     squares <- its own tangent

A microbatch's share of the tokens is not its share of the samples, so one factor on the loss cannot be right
for both terms. If the backward pass is linear in the tangent (the gradient of the loss), this module copies
the backward pass from the loss to its terms, once for each term. If not, gradients are weighted instead of
the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.joint.joined_part import OF_PARTS, after_gathers
from lightning_piper.capture.joint.operations import CONTRACTED, JOINED
from lightning_piper.capture.joint.region_assignment import own_line, refuse_parts
from lightning_piper.capture.joint.region_passes import PlaceholderNames
from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.losses.batch_dependence import Ask
from lightning_piper.capture.losses.changed_buffers import changed_buffers, is_local
from lightning_piper.capture.losses.combination import (
    LINEAR,
    MAX,
    MIN,
    MIXED,
    ROWS,
    WHOLE,
    Combination,
)
from lightning_piper.capture.losses.cross_sample import (
    Places,
    cross_sample_operations,
    first_cross_sample,
    first_in_backward,
    way_to,
)
from lightning_piper.capture.losses.denominators import (
    ONE,
    SAMPLES,
    Expression,
    denominator_of,
    described,
    guards_of,
    simplified,
    stats_of,
)
from lightning_piper.capture.losses.factor_guards import add_like, guard_factors
from lightning_piper.capture.losses.graph_results import GraphResults
from lightning_piper.capture.losses.linearity import Linearity, linearity
from lightning_piper.capture.losses.loss_terms import LossTerms
from lightning_piper.capture.losses.shared_masks import refuse_shared_masks
from lightning_piper.capture.losses.tangents import LossSum, divide_tangent
from lightning_piper.capture.losses.whole_values import computation, is_unweighted, sources_of
from lightning_piper.capture.metrics.metric_objects import object_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import ADDED, DIVIDED, MULTIPLIED
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import Logged, Output
from lightning_piper.ir.terms import Term, Weighing
from lightning_piper.ir.values import Kind

aten = torch.ops.aten
WHOLE_BATCH = "whole batch"  # key of the term of values that are computed from gathered samples
# the largest number of terms with separate weights; a part of the backward pass is copied for each of them
MANY = 32


@dataclass(frozen=True)
class WeightedStep:
    """A traced step whose loss and logged values have weights.

    Attributes:
        graph, plain: See `TracedGraph`. A loss or logged value of several terms is several outputs.
        terms: How each term is weighted. `Output.term` is an index into this tuple.
        tangents: Placeholder of a gradient of the loss -> the index of the gradient's term.
        logs: The logs of the trace. Some logged values are computed from several outputs.
        weight: The placeholder of the gradients' weight, if gradients are weighted instead of the loss
            (`StepCode.weighs_gradients`). The weight includes the gradient of the loss. The placeholder is
            also in `tangents`.
        assumed, unknown, meet, nonlinear, local: See `StepCode`.
    """

    graph: torch.fx.Graph
    plain: tuple[Output, ...]
    terms: tuple[Term, ...]
    tangents: Mapping[Node, int]
    logs: tuple[Logged, ...]
    assumed: bool = False
    unknown: tuple[str, ...] = ()
    meet: str | None = None
    weight: Node | None = None
    nonlinear: str | None = None
    local: frozenset[str] = frozenset()


def weigh(traced: TracedGraph, size: int, canonical: Mapping[str, str], beside: Ask | None) -> WeightedStep:
    """Return a traced step with the terms of its loss and of its logged values. Each term of the loss has its own
    tangent. The graph is changed in place.

    Weights combine means, sums, ratios whose denominators follow from the batch alone, and sums of such
    values. Maxima and minima combine without weights. Any other loss is weighted as a mean over samples, and
    any other logged value as its `reduce_fx` says.

    Args:
        size: Number of samples in the trace.
        canonical: Each name of a parameter or buffer -> its canonical name.
        beside: Returns a trace at another size, see `BatchDependence`. None if no program divides the batch.
            In that case, all values count as independent of the batch.

    Raises:
        CaptureError: The step gathers samples (`gather_samples`), and its backward pass is not linear or an
            output would count gathered samples several times.
    """
    return _LossWeighting(traced, size, canonical, beside).run()


class _LossWeighting:
    """The work of `weigh` on one graph.

    Attributes:
        found: the analysis of how values combine from parts of the batch.
        terms: the terms found so far.
        assumed, unknown, tangents, weight, logs: as in the `WeightedStep` that `run` returns.
    """

    def __init__(
        self, traced: TracedGraph, size: int, canonical: Mapping[str, str], beside: Ask | None
    ) -> None:
        self.graph, self.results = traced.graph, GraphResults(traced)
        self.logs = {log.name: log for log in traced.logs}
        # names of logged values that neither weights nor `reduce_fx` combine exactly
        self.unknown: list[str] = []
        # `_alike`: no program divides the batch, so all values count as independent of the batch
        self.found = LossTerms(traced.graph, size, beside or (lambda known: None))
        self._alike = beside is None
        self.names, self.canonical = PlaceholderNames.of(traced.graph, canonical), canonical
        self._after_gathers = after_gathers(traced.graph)
        # denominator, `WHOLE_BATCH`, "max" or "min" -> index of the term
        self.kinds: dict[Any, int] = {}
        self.assumed, self.size = False, size
        self.terms: list[Term] = []
        # term with the weighing `RATIO` -> its denominator
        self._denominators: dict[Term, Expression] = {}
        self.tangents = {} if self.names.tangent is None else {self.names.tangent: 0}
        self.weight: Node | None = None

    def run(self) -> WeightedStep:
        """Find the terms, give them weights and tangents, and return the step."""
        results = self.results
        changed = changed_buffers(results.described(), self.canonical)
        local = frozenset(name for name, node in changed.items() if is_local(node, self.found.changes))
        self.found.unweighted.update(node for node, name in self.names.buffers.items() if name in local)
        losses = [node for _, node, _ in results.of_kinds(Kind.LOSS)]
        way = linearity(self.graph, self.names.tangent)
        self._start_backward(way)
        curved = self._find_cross_sample(losses)
        for index, node, made in results.of_kinds(Kind.LOSS, Kind.LOG, Kind.ARGUMENT):
            if made.kind == Kind.ARGUMENT:
                results.weigh(index, self._argument(node))
            elif made.kind == Kind.LOG:
                results.split(index, self._log(node, made, losses))
            else:
                results.split(index, [(made, self._loss(node, made))])
        for node, term in self.tangents.items() if self.found.joined else ():
            if term != self.kinds.get(WHOLE_BATCH):
                node.meta[OF_PARTS] = True
        self._find_without_weights(losses, curved)
        guard_factors(self.graph, self._guarded(), self.found.uses)
        results.write()
        self._check_joined(refuse_parts(self.graph))
        return WeightedStep(
            self.graph,
            tuple(results.plain),
            tuple(self.terms),
            self.tangents,
            tuple(self.logs.values()),
            self.assumed,
            tuple(self.unknown),
            None if self._met is None else f"{self._met.target} ({own_line(self._met)})",
            self.weight,
            None if way.broken is None else str(way.broken),
            local,
        )

    def _start_backward(self, way: Linearity) -> None:
        """If the backward pass is not linear in the loss gradient, start it with 1 on each part of the batch.

        Do the same if the user's uncaptured code runs in the backward pass, because the analysis cannot tell
        whether that code is linear. But in a step that gathers samples, such code is assumed to be linear.

        Raises:
            CaptureError: The backward pass is not linear, and the step gathers samples.
        """
        if way.broken is not None and self.found.joined:
            raise CaptureError(
                f"{way.broken.line}: {way.broken.operation} is not linear in the gradient of the loss, so "
                "gradients of gathered samples (gather_samples) would depend on the program. Make the "
                "backward pass linear [PIPER-C016]"
            )
        if way.broken is not None or (way.opaque and not self.found.joined):
            self._enter_with_one()

    def _find_cross_sample(self, losses: list[Any]) -> Places:
        """Set `_meetings` to the operations that surely mix samples. Set `_met` to the first of them on which
        the loss depends, or else to the first in the backward pass, or else to None. Return the operations
        that mix samples only if weights cannot combine their values.

        Raises:
            CaptureError: See `refuse_shared_masks`.
        """
        if not self._alike:
            refuse_shared_masks(self.graph, self.size)
        self._meetings, curved = ({}, {}) if self._alike else cross_sample_operations(self.graph, self.size)
        self._met = (
            (first_cross_sample(losses, self._meetings) or first_in_backward(self._meetings))
            if losses
            else None
        )
        return curved

    def _find_without_weights(self, losses: list[Any], curved: Places) -> None:
        """If `_met` is None, set it to the first operation of `curved` that the loss depends on, and whose
        values on parts of the batch cannot be combined by weights.

        Weights can combine a ratio, or a value that depends only on the batch. They combine nothing if the weights
        of the loss are assumed.
        """
        if self._met is None:
            surely = {
                node: at
                for node, at in curved.items()
                if self.assumed or (self.found.is_trained(node) and self.found.of(node).reduction != LINEAR)
            }
            self._met = first_cross_sample(losses, surely)

    def _loss(self, node: Any, made: Output) -> dict[int, Node]:
        """Return the terms of the loss: index of the term -> node for the part of the loss that belongs to it.
        Give each term its tangent.

        If the tangent cannot be divided, the loss is one term. Its weights are then assumed, unless the loss
        reads samples only through gathered values.
        """
        parts, tangent = self._parts(node, made), self.names.tangent
        if tangent is None or self.weight is not None:
            return parts
        if len(parts) > 1:
            self.tangents = self._divide(node, parts)
            if self.tangents:
                return parts
            whole = node in self._after_gathers
            parts, self.assumed = {self._term(WHOLE_BATCH if whole else SAMPLES): node}, not whole
        self.tangents = {tangent: next(iter(parts))}
        return parts

    def _check_joined(self, joined: Collection[Node]) -> None:
        """Raise an error for an output of gathered samples that would count once for each replica.

        Every replica has the whole value of an output that is computed from gathered samples. So the weight
        of such an output must be the replica's share of the samples.

        Raises:
            CaptureError: the output is an argument of a metric object, or is weighted as a sum or ratio.
        """
        for node, desc in self.results.described():
            if node in joined and isinstance(desc, _torch.PlainAOTOutput):
                made = self.results.plain[desc.idx]
                summed = made.term is not None and self.terms[made.term].weighing in (
                    Weighing.SUM,
                    Weighing.RATIO,
                )
                if summed or made.kind == Kind.ARGUMENT:
                    fix = (
                        "Average it over all gathered samples, as mean() does"
                        if summed
                        else "Pass the metric object values of samples that are not gathered"
                    )
                    raise CaptureError(
                        f"{own_line(node)}: {_named(made)} is computed from gathered "
                        "samples. Every replica has all gathered samples, so each replica would count the value "
                        f"again. {fix} [PIPER-C016]"
                    )

    def _enter_with_one(self) -> None:
        """Let each part of the batch start its backward pass with a loss gradient of 1. Add a placeholder for
        the weight by which parameter gradients are multiplied afterwards."""
        tangent = self.names.tangent
        assert tangent is not None
        with self.graph.inserting_after(tangent):
            self.weight = weight = self.graph.placeholder("gradient_weight")
        weight.meta = dict(tangent.meta)
        self.terms.append(Term(Weighing.EACH, "each part"))
        self.tangents = {tangent: 0, weight: self._term(SAMPLES)}

    def _log(self, node: Any, made: Output, losses: list[Any]) -> list[tuple[Output, Mapping[int, Node]]]:
        """Return the outputs of a logged value, each with its terms as `_parts` returns them.

        The outputs are the value itself, or the values from which it is computed once per batch. Add the name
        of the logged value to `unknown` if neither weights nor its `reduce_fx` combine it exactly.
        """
        (name,), known = made.names, not isinstance(node, Node) or self._alike or self._is_known(node)
        # Computed from its sums, a function of sums over the batch needs no weights.
        of_sums = known and isinstance(node, Node) and not self._alike and not self._is_source(node)
        sources = sources_of(node, self.found, self._is_source) if of_sums or not known else None
        meeting = first_cross_sample([node], self._meetings)
        if not known and sources is None:
            # The report about a loss with assumed weights already covers a value that is computed from this
            # loss.
            of_loss = self.assumed and losses[0] in way_to(node)
            if self.logs[name].reduce == "mean" and not of_loss:
                self.unknown.append(name)
        elif meeting is not None and meeting is not self._met:
            self.unknown.append(name)
        if not sources:
            return [(made, self._parts(node, made))]
        names = tuple(f"{name}, computed from {i}" for i in range(len(sources)))
        computed = computation(
            node, sources, names, self.graph.owning_module, self.found.dependence.is_made_of_size
        )
        self.logs[name] = replace(self.logs[name], computed=computed)
        outputs = zip(names, self._outputs(sources, node), strict=True)
        return [(replace(made, names=(own,)), self._parts(x, made)) for own, x in outputs]

    def _outputs(self, sources: list[Node], reader: Node) -> list[Node]:
        """Return the nodes that the graph returns for the sources. For a placeholder, which cannot be a
        result, the node is a clone."""
        made = []
        for node in sources:
            made.append(node)
            if node.op == "placeholder":
                with self.graph.inserting_before(reader):
                    made[-1] = self._add(aten.clone.default, (node,), reader)
                made[-1].meta["val"] = node.meta["val"]
        return made

    def _is_source(self, node: Node) -> bool:
        """Return whether weights suffice to combine the node's values, even if some of the values are 0. They
        do not if the value is a function of sums over the batch. They do not if the value is a quotient by a number
        that may be 0 on the whole batch, because the parts may then be infinite with both signs."""
        divided = guards_of(self.found.of(node).denominator or ONE)
        return self._is_known(node) and not divided and not self.found.follows_from_batch(node)

    def _is_known(self, node: Node) -> bool:
        """Return whether weights suffice to combine the node's values on parts of the batch."""
        found = self.found.of(node)
        if is_unweighted(node, self.found):
            return False
        if found.reduction == MIXED:
            return self._keys_in(node) is not None
        return found.reduction in (MAX, MIN, WHOLE) or (
            found.reduction == LINEAR and found.denominator is not None
        )

    def _parts(self, node: Any, made: Output) -> dict[int, Node]:
        """Return the terms of a result: index of the term -> node for the part of the result that belongs to
        this term.

        A result without known weights is one term: a logged value as its `reduce_fx` says, and a loss as a mean
        over samples. For such a loss, `assumed` becomes True, unless the loss reads samples only through gathered
        values. A loss that is a maximum has no weights, because the gradients of only one part would count.
        """
        found = self.found.of(node) if isinstance(node, Node) and not self._alike else Combination(WHOLE)
        if found.reduction == LINEAR:
            return {self._term(found.denominator): node}
        is_loss = made.kind == Kind.LOSS
        if found.reduction in (MAX, MIN) and not is_loss:
            return {self._extreme(found.reduction.value): node}
        if found.reduction == MIXED and (kinds := self._kinds_in(node)) is not None:
            parts = ((term, self._part(node, term)) for term in kinds)
            return {term: part for term, part in parts if part is not None}
        if is_loss and node in self._after_gathers:
            # The loss reads samples only through gathered values.
            return {self._term(WHOLE_BATCH): node}
        if is_loss and found.reduction != WHOLE:
            self.assumed = True
        reduce = "mean" if is_loss or found.reduction == WHOLE else self.logs[made.names[0]].reduce
        return {
            self._extreme(reduce)
            if reduce in ("max", "min")
            else self._term(SAMPLES if reduce == "mean" else ONE): node
        }

    def _argument(self, node: Any) -> int | None:
        """Return the term of a metric object's argument. Return None if the argument has one row for each
        sample, or does not depend on the batch.

        A sum of several terms, or a value that combines in an unknown way, counts as a mean over samples.
        """
        found = self.found.of(node) if isinstance(node, Node) else Combination(WHOLE)
        if found.reduction in (WHOLE, ROWS):
            return None
        if found.reduction in (MAX, MIN):
            return self._extreme(found.reduction.value)
        return self._term(found.denominator if found.reduction == LINEAR else SAMPLES)

    def _term(self, denominator: Any) -> int:
        """Return the index of the term with this denominator (an expression, or `WHOLE_BATCH`). If there is
        no such term, add it."""
        denominator = denominator if denominator is WHOLE_BATCH else simplified(denominator)
        if denominator not in self.kinds:
            self.kinds[denominator] = len(self.terms)
            # Each replica has the whole value, whose weight is the replica's share of the samples.
            if denominator is WHOLE_BATCH:
                self.terms.append(Term(Weighing.SAMPLES, "the whole batch"))
            elif denominator == SAMPLES:
                self.terms.append(Term(Weighing.SAMPLES, "samples"))
            elif denominator == ONE:
                self.terms.append(Term(Weighing.SUM, "sum"))
            else:
                again = [
                    stat.node
                    for stat in stats_of(denominator)
                    if stat.how == "labels" and _is_read_again(stat.node)
                ]
                known = (self.names.batch, self.names.buffers, self.graph.owning_module)
                code = denominator_of(denominator, *known, again)
                self.terms.append(Term(Weighing.RATIO, described(denominator, self.size), code))
                self._denominators[self.terms[-1]] = denominator
        return self.kinds[denominator]

    def _extreme(self, which: str) -> int:
        """Return the index of the term "max" or "min". If there is no such term, add it."""
        if which not in self.kinds:
            self.kinds[which] = len(self.terms)
            self.terms.append(Term(Weighing(which), which))
        return self.kinds[which]

    # Sums of several terms.

    def _base(self, value: Any) -> int | None:
        """Return the index of the term that a summand belongs to. If there is no such term, add it. Return None
        if the summand is itself a sum of several terms, or does not combine as a weighted sum."""
        key = self._key(value)
        return None if key is None else self._term(key)

    def _key(self, value: Any) -> Any:
        """Return the denominator of the term that a summand belongs to (an expression, or `WHOLE_BATCH`). Return
        None where `_base` does. No term is added."""
        found = self.found.of(value) if isinstance(value, Node) else Combination(WHOLE)
        if found.reduction == WHOLE:
            # The value is the same on every part.
            return WHOLE_BATCH if value in self.found.joined else SAMPLES
        return found.denominator if found.reduction == LINEAR else None

    def _summands(self, node: Node) -> list[Any]:
        """Return the arguments of `node` that carry the terms of a sum: its summands, or the only sum that it
        scales or reshapes. They are nodes and numbers."""
        first: Any = node.args[0]
        if node.target in JOINED:
            return list(first)
        if node.target in _SCALED:
            factor = self.found.factor(node)
            return [] if factor is None else [factor[0]]
        if len(node.args) > 1 and node.target in ADDED:
            return [first, node.args[1]]
        return [first]

    def _kinds_in(self, node: Node) -> list[int] | None:
        """Return the indices of the terms in a sum, in the order of its summands. Return None if the sum cannot
        be split into terms, or has more than `MANY` terms. Then no term is added."""
        keys = self._keys_in(node)
        return None if keys is None else [self._term(key) for key in keys]

    def _keys_in(self, node: Node) -> list[Any] | None:
        """Return the denominators of the terms in a sum, in the order of its summands. Return None where
        `_kinds_in` does."""
        keys: dict[Any, None] = {}
        stack: list[Any] = [node]
        seen: set[Node] = set()
        while stack:
            value = stack.pop()
            if isinstance(value, Node) and value in seen:
                continue
            key = self._key(value)
            if key is not None:
                keys[key if key is WHOLE_BATCH else simplified(key)] = None
                continue
            if self.found.of(value).reduction != MIXED:
                return None
            seen.add(value)
            stack += reversed(self._summands(value))
        return list(keys) if len(keys) <= MANY else None

    def _part(self, node: Node, term: int) -> Node | None:
        """Return a copy of the sum `node` with the summands of `term` only. If `node` itself belongs to the term,
        return `node`. If the sum does not have a summand of this term, return None."""
        made: dict[Any, Any] = {}  # value -> its part; None if no summand of the value belongs to the term
        stack: list[Any] = [node]
        while stack:
            value = stack[-1]
            base = self._base(value)
            summands = self._summands(value) if base is None else []
            missing = [x for x in summands if x not in made]
            if not missing:
                stack.pop()
                if base is not None:
                    made[value] = value if base == term else None
                elif value not in made:
                    kept = [(x, made[x]) for x in summands]
                    made[value] = (
                        None if all(found is None for _, found in kept) else self._without(value, kept)
                    )
            stack += missing
        result: Node | None = made[node]
        return result

    def _without(self, node: Node, kept: list[tuple[Any, Any]]) -> Node:
        """Return a copy of the operation of `node` that reads the summands of one term only. A summand
        without a part in this term becomes zero."""
        known = {id(x): found for x, found in kept}

        def other(value: Any) -> Any:
            """Return the part of a summand, or zero. Return an argument that is not a summand unchanged."""
            if id(value) not in known:
                return value
            found = known[id(value)]
            if found is not None or not isinstance(value, Node):
                return 0 if found is None else found
            return self._zeros(value, node)

        def of_argument(value: Any) -> Any:
            return (
                [other(x) for x in value]
                if isinstance(value, list | tuple) and node.target in JOINED
                else other(value)
            )

        with self.graph.inserting_before(node.next):
            return self._add(node.target, tuple(map(of_argument, node.args)), node, node.kwargs)

    def _zeros(self, value: Node, reader: Node) -> Node:
        """Return a new node for zeros like `value`. The node has the tags of `reader` and so is in its region,
        because `value` may be a parameter, which does not belong to a region."""
        given = value.meta["val"]
        if given.ndim or not self.found.joined:
            zeros = self._add(aten.zeros_like.default, (value,), reader)
        # The operations on gathered samples may read only values of such operations, and rows of samples. So
        # they cannot read `value`.
        else:
            zeros = self._add(
                aten.full.default, ([], 0.0), reader, {"dtype": given.dtype, "device": given.device}
            )
        zeros.meta["val"] = given
        return zeros

    def _add(
        self, target: Any, args: tuple[Any, ...], like: Node, kwargs: Mapping[str, Any] | None = None
    ) -> Node:
        return add_like(self.graph, target, args, like, kwargs)

    def _guarded(self) -> list[Expression]:
        """Return the denominators with a factor or a condition that the step must replace on a part."""
        return [
            self._denominators[term] for term in self.terms if term.denominator and term.denominator.guarded
        ]

    def _divide(self, loss: Node, parts: Mapping[int, Node]) -> dict[Node, int]:
        """Give each term of the loss a tangent, by changing the backward pass of the graph in place. Return
        placeholder of the tangent -> index of the term. If this is not possible, return {}."""
        assert self.names.tangent is not None
        whole = {
            value for value in self.graph.nodes if value.op == "placeholder" and self.found.is_whole(value)
        }
        sums = LossSum(self._base, self._summands, self._part, self.found, whole)
        return divide_tangent(self.graph, self.names.tangent, loss, list(parts), sums, self.results.nodes)


def _is_read_again(loss: Node) -> bool:
    """Return whether the backward pass reads the loss, or a value computed from the loss. `loss` is the
    operation: its first result is the loss."""
    stack, seen = [x for x in loss.users if x.args[1] == 0], set[Node]()
    while stack:
        node = stack.pop()
        if _torch.is_backward(node):
            return True
        new = [user for user in node.users if user not in seen and user.op != "output"]
        seen.update(new)
        stack += new
    return False


# Operations that may multiply or divide a sum by a factor
_SCALED = MULTIPLIED | DIVIDED | CONTRACTED


def _named(output: Output) -> str:
    """Return an output of the step as a message names it."""
    if output.kind == Kind.ARGUMENT:
        return f"an argument of self.{object_of(output.names[0])}"
    return "the loss" if output.kind == Kind.LOSS else f"the logged value {output.names[0]!r}"
