"""Find operations that mix the samples of a batch, because such a loss or gradient cannot be computed on
parts of the batch.

Samples mix where a row is made of several samples, or where the code indexes into the batch by position. The
analysis follows the sample dimension through every operation, forward and backward, as `placements` follows a
dimension sharded over an axis: each sample counts as one rank's shard. The rules of `placements` say which
operations keep samples apart. An operation without a rule is run on random inputs (`sample_trial.py`). A sum
over samples is a number of the whole batch. `loss_terms.py` handles such a number, unless a nonlinear
operation combines it with rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.joint.operations import CONSTANTS, JOINED, SAME
from lightning_piper.capture.joint.sample_dimension import is_kept, known_rows, shape_of
from lightning_piper.capture.losses.sample_trial import (
    Constants,
    constant,
    is_pointwise,
    is_random,
    is_uniform,
    try_samples,
)
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import ADDED, COPIES, DIVIDED, MULTIPLIED, NLL
from lightning_piper.ir.values import Placement, Sharded
from lightning_piper.placements.rule import P, R, Rule, made_by, tensors_of
from lightning_piper.placements.rules import rules_for
from lightning_piper.routing import ROUTE
from lightning_piper.sample_gathering import GATHER
from lightning_piper.totals import TOTAL

aten = torch.ops.aten
# For each result of a node: rows of samples (`S`), a number of the whole batch (`P`), the same for all
# samples (`R`), or unknown (None).
Held = tuple[Placement | None, ...]
# Operations that add their inputs, or copy or choose elements of the inputs.
_SUMS = {
    *ADDED, *COPIES, aten.neg.default, aten.where.self, aten.masked_fill.Scalar,
}  # fmt: skip
# Operations that are linear in all their inputs.
_LINEAR = SAME | {
    aten.sum.default,
    aten.mean.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.cumsum.default,
    *JOINED,
}
# Reductions other than sums. `loss_terms.py` decides whether weights can combine their values on parts of the
# batch.
_REDUCTIONS = {
    "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "var", "std", "var_mean", "std_mean",
    "logsumexp", "norm", "prod",
    "linalg_vector_norm", "any", "all", "median", "nanmedian", "bincount", "histc", "kthvalue", "mode",
}  # fmt: skip


Places = dict[Node, int]  # operation -> its position in the graph


def cross_sample_operations(graph: torch.fx.Graph, size: int) -> tuple[Places, Places]:
    """Find the operations in which samples mix.

    Args:
        size: the number of samples in the graph.

    Returns:
        First, the operations that mix rows of samples. Second, the operations that reduce the batch to a
        number other than a sum, or that use a sum nonlinearly. An operation of the second kind mixes samples
        only if `loss_terms.py` does not find weights that combine its value from parts of the batch.
    """
    if size == 1:
        return {}, {}
    followed = _SampleDependence(graph, size)
    for position, node in enumerate(graph.nodes):
        if node.op != "output":
            followed.enter(position, node)
    # Experts return rows in the order from before the sort, so a sort for a dispatch mixes no samples. The
    # analysis does not follow the order of rows, so leave such sorts out.
    return {node: at for node, at in followed.found.items() if not _sorts_for_experts(node)}, followed.curved


def _sorts_for_experts(node: Node) -> bool:
    """Return whether the operation sorts rows for a dispatch to experts."""
    waiting, seen = [node] if _name(node) in ("sort", "argsort") else [], set[Node]()
    while waiting:
        for user in waiting.pop().users:
            if user.target is ROUTE:
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


class _SampleDependence:
    """An analysis of how each value of a graph depends on the samples.

    Attributes:
        held: node -> the state of each of its results.
        beside: nodes with rows of samples, where each row was combined with a number of the whole batch. A
            later operation that reads the node mixes samples if it is not linear in this number.
        found, curved: the two results of `cross_sample_operations`.
    """

    def __init__(self, graph: torch.fx.Graph, size: int) -> None:
        # `_shown`: the nodes whose shapes show that they have rows of samples
        self._size, self._shown = size, known_rows(graph, size)
        self.held: dict[Node, Held] = {}
        self.beside: set[Node] = set()
        self.found: Places = {}
        self.curved: Places = {}
        self._constants: Constants = {}
        # A cache, because equal layers contain the same operations: operation with arguments and specs ->
        # rules
        self._rules: dict[object, list[Rule]] = {}

    def enter(self, position: int, node: Node) -> None:
        """Set the state of a node, whose position in the graph is `position`. Its inputs must already have
        states."""
        if node.op == "placeholder":
            self.held[node] = (Sharded(0) if node in self._shown else R,)
        elif node.op == "get_attr" or node.target in (TOTAL, GATHER) or node.target in CONSTANTS:
            self.held[node] = (R,)
        elif node.target is ROUTE:  # `row_independence.py` tests that experts keep rows apart
            self.held[node] = (None,) * len(made_by(node))
        elif node.target is operator.getitem:
            source, index = node.args
            results = self.held[source]  # type: ignore[index]
            self.held[node] = (results[index] if index < len(results) else None,)  # type: ignore[operator, index]
            if source in self.beside:
                self.beside.add(node)
        else:
            self.held[node] = self._made(position, node)

    def _made(self, position: int, node: Node) -> Held:
        """Return the states of an operation's results. Record the operation in `found` if it mixes samples, in
        `curved` if it may mix samples, and in `beside` if it combines rows with a number of the whole batch."""
        inputs, backward = tensors_of(node), _torch.is_backward(node)
        given = [self.held[x][0] for x in inputs]
        if backward:  # the forward pass has already shown how a number of the whole batch enters the loss
            given = [R if p == P else p for p in given]
        results = len(made_by(node))
        # No input has rows of samples, so only numbers of the whole batch can enter.
        if not any(isinstance(p, Sharded) for p in given):
            known = R if all(p == R for p in given) else None if None in given else P
            if known == P and not self._is_linear(node, inputs):
                self.curved[node] = position
            return (known,) * results
        # A number of the whole batch is combined with rows.
        if not backward and (P in given or any(x in self.beside for x in inputs)):
            if not self._is_linear(node, inputs):
                self.found[node] = position
                return (None,) * results
            self.beside.add(node)
            given = [R if p == P else p for p in given]
        if None in given:
            return self._seen(node) if not backward else (None,) * results
        held = self._kept(node, inputs, given, backward)  # type: ignore[arg-type]
        if held is None and (
            _name(node) in _REDUCTIONS or all(not x.ndim for x in made_by(node) if x is not None)
        ):
            (self.found if backward else self.curved)[node] = position
            return (P,) * results
        if held is None:
            self.found[node] = position
            return (None,) * results
        if node.target in NLL:
            # the second result, the total weight of the labels, is left to `loss_terms.py`
            return (held[0], R)
        return held

    def _kept(
        self, node: Node, inputs: Sequence[Node], given: Sequence[Placement], backward: bool
    ) -> Held | None:
        """Return the states of an operation's results, according to a rule or to a trial on random inputs.
        Return None if the operation mixes samples. `given` has the states of `inputs`. An entry of the result
        is None if neither a rule, a trial nor the shapes show it."""
        if "batch_norm" in str(node.target) and not _is_instance_norm(node):
            # statistics over the batch are reported separately, see `Interface.takes_statistics`
            return (Sharded(0), *(P for _ in made_by(node)[1:]))
        runs = {p.blocks for p in given if isinstance(p, Sharded)}
        for rule in self._rules_for(node, inputs, frozenset(runs)):
            pairs = list(zip(inputs, given, rule.inputs, strict=True))
            if all(
                have == wanted or (have == R and isinstance(wanted, Sharded)) for _, have, wanted in pairs
            ):
                # inputs that the rule wants sharded, but that hold different values for each position in the
                # batch
                by_position = [
                    x
                    for x, have, wanted in pairs
                    if have != wanted and not backward and differs_by_position(x, wanted, self._constants)
                ]
                return None if by_position else tuple(p or R for p in rule.outputs)
        if is_kept(node, self._shown) and all(p in (R, Sharded(0)) for p in given):
            return self._seen(node)
        made = try_samples(node, given, self._size, self._constants)
        if made is None:
            return self._seen(node)
        # The trial draws only some samples again. It misses that a maximum mixes samples if another sample
        # has the maximum.
        reduced = _name(node) in _REDUCTIONS and not all(isinstance(p, Sharded) for p in made)
        return None if None in made or reduced else made

    def _rules_for(self, node: Node, inputs: Sequence[Node], runs: frozenset[int]) -> list[Rule]:
        """Return the sharding rules of an operation. Operations with equal arguments and specs share one
        result."""
        index_of = {x: i for i, x in reversed([*enumerate(inputs)])}
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: f"%{index_of.get(x)}")
        specs = tuple(
            None if x is None else (x.shape, x.dtype)
            for x in (*(x.meta["val"] for x in inputs), *made_by(node))
        )
        form = node.target, repr(arguments), specs, runs
        if form not in self._rules:
            self._rules[form] = rules_for(node, self._size, runs)
        return self._rules[form]

    def _seen(self, node: Node) -> Held:
        """Return the states of an operation's results, as far as `known_rows` shows them."""
        known = node in self._shown
        return tuple(
            (
                Sharded(0)
                if known and x.ndim and x.shape[0] % self._size == 0
                else P
                if known and not x.ndim
                else None
            )
            if isinstance(x, torch.Tensor)
            else R
            for x in made_by(node)
        )

    def _is_linear(self, node: Node, inputs: Sequence[Node]) -> bool:
        """Return whether the operation is linear in all inputs that are, or contain, numbers of the whole
        batch. A quotient by such a number counts as linear, because `loss_terms.py` treats the number as a
        denominator."""
        numbers = {x for x in inputs if x in self.beside or self.held[x][0] == P}
        first, second = (*node.args, None, None)[:2]
        if node.target in _SUMS:
            return True
        if node.target in MULTIPLIED:
            return not (first in numbers and second in numbers)
        if node.target in DIVIDED:
            return second not in self.beside
        return node.target in _LINEAR


def _name(node: Node) -> str:
    return str(node.target).split(".")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def differs_by_position(node: Node, wanted: Placement, constants: Constants) -> bool:
    """Return whether a value that does not depend on samples may vary along the dimension of `wanted`, like
    `torch.arange(n)` or a parameter. Return False if the graph does not show it."""
    assert isinstance(wanted, Sharded)
    dim = wanted.dim
    while not is_uniform(node):
        if node.op == "placeholder":
            return True
        if (known := constant(node, constants)) is not None:
            rows = known.movedim(dim, 0) if known.ndim > dim else known[None]
            return not bool((rows == rows[:1]).all())
        if not (is_pointwise(node) or node.target in COPIES):
            return False
        sources = [x for x in node.all_input_nodes if shape_of(x) == shape_of(node)]
        if len(sources) != 1 or is_random(node):
            return False
        node = sources[0]
    return False


def first_cross_sample(results: Sequence[Any], found: Places) -> Node | None:
    """Return the first operation in `found` on which one of these results depends. Dependence only through a
    sum over the whole batch (`TOTAL`) does not count. Return None if there is no such operation."""
    needed = set().union(*(way_to(result, summed=False) for result in results)) if found else set()
    return min((node for node in found if node in needed), key=found.__getitem__, default=None)


def first_in_backward(found: Places) -> Node | None:
    """Return the first operation in `found` that belongs to a backward pass. Return None if no such operation
    exists."""
    return min(filter(_torch.is_backward, found), key=found.__getitem__, default=None)


def way_to(result: Any, summed: bool = True) -> set[Node]:
    """Return the node `result` and all nodes from which it is computed.

    If `summed` is False, leave out the inputs of sums over the whole batch (`TOTAL`). If `result` is not a
    node, the set is empty.
    """
    found: set[Node] = set()
    waiting = [result] if isinstance(result, Node) else []
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes if summed or node.target is not TOTAL else []
    return found


def is_training_batch_norm(node: Node) -> bool:
    """Return whether a node is a batch norm that uses the statistics of the batch."""
    if not isinstance(node.target, torch._ops.OpOverload) or "batch_norm" not in (name := str(node.target)):
        return False
    if _is_instance_norm(node):
        return False
    arguments = [argument.name for argument in node.target._schema.arguments]
    if "training" not in arguments:
        return "no_training" not in name and "no_update" not in name
    at = arguments.index("training")
    return bool(node.args[at] if at < len(node.args) else node.kwargs.get("training"))


def _is_instance_norm(node: Node) -> bool:
    """Return whether this batch norm is an instance norm: each of its channels is a channel of one sample,
    and it has no running statistics.

    `F.instance_norm` computes such a batch norm, on a view of shape [1, samples * channels, ...].
    """
    x = node.args[0]
    if node.target is not aten._native_batch_norm_legit.no_stats or not isinstance(x, Node):
        return False
    if _name(x) not in ("view", "_unsafe_view", "reshape"):
        return False
    before, after = x.all_input_nodes[0].meta["val"].shape, x.meta["val"].shape
    return len(before) > 2 and tuple(after) == (1, before[0] * before[1], *before[2:]) and before[0] != 1
