"""Where the samples of a batch meet on their way to the loss or to a gradient: a row that is made of several samples, or of one
that is taken by its place.

The loss of a part of the batch is then made of other samples than that of the whole. The sample dimension is followed through
every operation, forward and backward, as parts of tensors are that members of an axis have: a sample is a member. The rules of
`placements` say what keeps samples apart; an operation without a rule is tried (`trying.py`). Numbers of the whole batch (a sum
over samples) are a matter of `terms.py`, until they enter the rows of samples otherwise than linearly.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture import _torch
from lightning_piper.capture.operations import CONSTANTS, JOINED, NLL, SAME
from lightning_piper.capture.rowwise import is_kept, known_rows, shape_of
from lightning_piper.capture.trying import Constants, constant, is_pointwise, is_random, is_uniform, tried
from lightning_piper.gathered import GATHER
from lightning_piper.ir.regions import PassKey, StepCode
from lightning_piper.ir.values import Placement, Shard
from lightning_piper.placements.rule import P, R, Rule, made_by, tensors_of
from lightning_piper.placements.rules import rules_for
from lightning_piper.routing import ROUTE
from lightning_piper.totals import TOTAL

aten = torch.ops.aten
# Of each result: rows of samples (`S`), a number of the whole batch (`P`), neither (`R`), not known (None).
Held = tuple[Placement | None, ...]
_SUMS = {
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor, aten.neg.default,
    aten._to_copy.default, aten.clone.default, aten.detach.default, aten.where.self, aten.masked_fill.Scalar,
}  # fmt: skip
_PRODUCTS, _QUOTIENTS = {aten.mul.Tensor, aten.mul.Scalar}, {aten.div.Tensor, aten.div.Scalar}
# On numbers of each sample: what is linear in them.
_LINEAR = SAME | {aten.sum.default, aten.mean.default, aten.sum.dim_IntList, aten.mean.dim, aten.cumsum.default, *JOINED}
# They make one value of many, and no sum: whether weights put it together is for `terms.py` to say.
_REDUCTIONS = {
    "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "var", "std", "var_mean", "std_mean", "logsumexp", "norm", "prod",
    "linalg_vector_norm", "any", "all", "median", "nanmedian", "bincount", "histc", "kthvalue", "mode",
}  # fmt: skip


Places = dict[Node, int]  # operations -> where they stand in a graph


def meetings(graph: torch.fx.Graph, size: int) -> tuple[Places, Places]:
    """The operations of a graph of `size` samples in which they meet; and those that make a number of the whole batch which is no
    sum over samples, or calculate with one otherwise than linearly: so samples meet, unless weights are known for it."""
    if size == 1:
        return {}, {}
    followed = _Followed(graph, size)
    for place, node in enumerate(graph.nodes):
        if node.op != "output":
            followed.enter(place, node)
    # Rows that are sorted by expert are put back in order after the experts, which nothing here follows.
    return {node: at for node, at in followed.found.items() if not _sorts_for_experts(node)}, followed.curved


def _sorts_for_experts(node: Node) -> bool:
    """Does it bring rows into an order in which they are dispatched?"""
    waiting, seen = [node] if _name(node) in ("sort", "argsort") else [], set[Node]()
    while waiting:
        for user in waiting.pop().users:
            if user.target is ROUTE:
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


class _Followed:
    """What each value of a graph has of the samples.

    Attributes:
        held: of each result of each node.
        beside: rows with a number of the whole batch in each: what is not linear in it lets samples meet.
        found, curved: as of `meetings`.
    """

    def __init__(self, graph: torch.fx.Graph, size: int) -> None:
        self._size, self._shown = size, known_rows(graph, size)
        self.held: dict[Node, Held] = {}
        self.beside: set[Node] = set()
        self.found: Places = {}
        self.curved: Places = {}
        self._constants: Constants = {}
        self._rules: dict[object, list[Rule]] = {}  # layers are alike, and so are their operations

    def enter(self, place: int, node: Node) -> None:
        if node.op == "placeholder":
            self.held[node] = (Shard(0) if node in self._shown else R,)
        elif node.op == "get_attr" or node.target in (TOTAL, GATHER) or node.target in CONSTANTS:
            self.held[node] = (R,)
        elif node.target is ROUTE:  # that rows stay apart among experts is tried elsewhere, see `row_independence.py`
            self.held[node] = (None,) * len(made_by(node))
        elif node.target is operator.getitem:
            source, index = node.args
            results = self.held[source]  # type: ignore[index]
            self.held[node] = (results[index] if index < len(results) else None,)  # type: ignore[operator, index]
            if source in self.beside:
                self.beside.add(node)
        else:
            self.held[node] = self._made(place, node)

    def _made(self, place: int, node: Node) -> Held:
        inputs, backward = tensors_of(node), _torch.is_backward(node)
        given = [self.held[x][0] for x in inputs]
        if backward:  # what a number of the whole batch does to the loss was seen in the forward pass
            given = [R if p == P else p for p in given]
        results = len(made_by(node))
        if not any(isinstance(p, Shard) for p in given):
            known = R if all(p == R for p in given) else None if None in given else P
            if known == P and not self._is_linear(node, inputs):
                self.curved[node] = place
            return (known,) * results
        if not backward and (P in given or any(x in self.beside for x in inputs)):
            if not self._is_linear(node, inputs):
                self.found[node] = place
                return (None,) * results
            self.beside.add(node)
            given = [R if p == P else p for p in given]
        if None in given:
            return self._seen(node) if not backward else (None,) * results
        held = self._kept(node, inputs, given, backward)  # type: ignore[arg-type]
        if held is None and (_name(node) in _REDUCTIONS or all(not x.ndim for x in made_by(node) if x is not None)):
            (self.found if backward else self.curved)[node] = place
            return (P,) * results
        if held is None:
            self.found[node] = place
            return (None,) * results
        if node.target in NLL:  # how many labels count is a matter of `terms.py`
            return (held[0], R)
        return held

    def _kept(self, node: Node, inputs: Sequence[Node], given: Sequence[Placement], backward: bool) -> Held | None:
        """What an operation leaves of samples; None if they meet in it."""
        if "batch_norm" in str(node.target):  # which is said of itself, see `takes_statistics`
            return (Shard(0), *(P for _ in made_by(node)[1:]))
        runs = {p.blocks for p in given if isinstance(p, Shard)}
        for rule in self._rules_for(node, inputs, frozenset(runs)):
            pairs = list(zip(inputs, given, rule.inputs, strict=True))
            if all(have == wanted or (have == R and isinstance(wanted, Shard)) for _, have, wanted in pairs):
                by_place = [
                    x
                    for x, have, wanted in pairs
                    if have != wanted and not backward and _differs_by_place(x, wanted, self._constants)
                ]
                return None if by_place else tuple(p or R for p in rule.outputs)
        if is_kept(node, self._shown) and all(p in (R, Shard(0)) for p in given):
            return self._seen(node)
        made = tried(node, given, self._size, self._constants)
        if made is None:
            return self._seen(node)
        # What was drawn may show less than there is: the largest of all was that of a third sample.
        reduced = _name(node) in _REDUCTIONS and not all(isinstance(p, Shard) for p in made)
        return None if None in made or reduced else made

    def _rules_for(self, node: Node, inputs: Sequence[Node], runs: frozenset[int]) -> list[Rule]:
        places = {x: i for i, x in reversed([*enumerate(inputs)])}
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: f"%{places.get(x)}")
        specs = tuple(None if x is None else (x.shape, x.dtype) for x in (*(x.meta["val"] for x in inputs), *made_by(node)))
        form = node.target, repr(arguments), specs, runs
        if form not in self._rules:
            self._rules[form] = rules_for(node, self._size, runs)
        return self._rules[form]

    def _seen(self, node: Node) -> Held:
        """As far as the operation is known to keep its first dimension."""
        known = node in self._shown
        return tuple(
            (Shard(0) if known and x.ndim and x.shape[0] % self._size == 0 else P if known and not x.ndim else None)
            if isinstance(x, torch.Tensor)
            else R
            for x in made_by(node)
        )

    def _is_linear(self, node: Node, inputs: Sequence[Node]) -> bool:
        """Is it, in the numbers of the whole batch that are in its inputs?"""
        numbers = {x for x in inputs if x in self.beside or self.held[x][0] == P}
        first, second = (*node.args, None, None)[:2]
        if node.target in _SUMS:
            return True
        if node.target in _PRODUCTS:
            return not (first in numbers and second in numbers)
        if node.target in _QUOTIENTS:
            return second not in self.beside
        return node.target in _LINEAR


def _name(node: Node) -> str:
    return str(node.target).split(".")[1] if isinstance(node.target, torch._ops.OpOverload) else ""


def _differs_by_place(node: Node, wanted: Placement, constants: Constants) -> bool:
    """Does what is no sample's certainly say something else for each sample, as `torch.arange(n)` and a parameter do?"""
    assert isinstance(wanted, Shard)
    dim = wanted.dim
    while not is_uniform(node):
        if node.op == "placeholder":
            return True
        if (known := constant(node, constants)) is not None:
            rows = known.movedim(dim, 0) if known.ndim > dim else known[None]
            return not bool((rows == rows[:1]).all())
        if not (is_pointwise(node) or node.target in (aten._to_copy.default, aten.clone.default, aten.detach.default)):
            return False
        sources = [x for x in node.all_input_nodes if shape_of(x) == shape_of(node)]
        if len(sources) != 1 or is_random(node):
            return False
        node = sources[0]
    return False


def met(results: Sequence[Any], found: Places) -> Node | None:
    """The first operation on the way to these results in which samples meet; None if there is none."""
    needed = set().union(*(way_to(result, summed=False) for result in results)) if found else set()
    return min((node for node in found if node in needed), key=found.__getitem__, default=None)


def met_backward(found: Places) -> Node | None:
    """The first operation of a backward pass in which samples meet; None if there is none."""
    return min(filter(_torch.is_backward, found), key=found.__getitem__, default=None)


def way_to(result: Any, summed: bool = True) -> set[Node]:
    """What a result is made of, and it. `summed`: also what goes into sums over the whole batch, where each part has its terms."""
    found: set[Node] = set()
    waiting = [result] if isinstance(result, Node) else []
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes if summed or node.target is not TOTAL else []
    return found


def takes_statistics(code: StepCode, key: PassKey) -> bool:
    """Is it a forward pass with a batch norm that takes its statistics from the samples that it gets?"""
    names = [str(node.target) for node in code.code[key].graph.nodes] if key[1] == "F" else []
    return any("batch_norm" in name and (code.interfaces[key].state or "no_stats" in name) for name in names)
