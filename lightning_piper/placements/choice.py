"""Choice of the rule that an operation follows: the rule with the least cost for changes of placement.

The cost is the number of elements moved, relative to a whole value: an all-reduce moves each element twice, a
reduce-scatter or all-gather once, an all-to-all or a shift only part of them. A cut makes a shard of a whole
value and moves no elements, but has a small cost, so that Piper does not cut values without need. If all
inputs are whole, Piper divides none of them except weights in `sought`, because sharding is the user's
decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from torch.fx import Node

from lightning_piper.ir.values import Partial, Placement, Replicated, Sharded, is_shift
from lightning_piper.placements.attention import ATTENTION, attended
from lightning_piper.placements.placement_changes import PlacementMap
from lightning_piper.placements.rule import Rule, shape_of, tensors_of
from lightning_piper.placements.rules import rules_for

CUT = 0.01  # cost of a cut for each element of the value
# The cost of a rule is lower by this number for each node of `sought` that the rule divides. The number is
# less than the cost of any change.
SOUGHT = 1e-3


def choose(
    node: Node,
    held: PlacementMap,
    elsewhere: Callable[[Node], Collection[int]],
    degree: int,
    fixed: Collection[Node],
    free: Collection[Node],
    along: Collection[tuple[int, Sharded]],
    sought: Mapping[Node, int] | None = None,
    attention: str | None = None,
) -> Rule | None:
    """Return the cheapest rule for an operation, or None if no rule is possible.

    A rule is not possible if it needs a change of placement that Piper cannot make, reads one value in two
    placements, or divides a dimension that another axis divides.

    Args:
        node: The operation.
        held: The placements of the operation's inputs.
        elsewhere: Returns the dimensions of a value that other axes divide, which this axis therefore must
            not divide.
        degree: The number of members of the axis.
        fixed: Nodes whose placement does not change (parameters).
        free: Parameters without a given placement that no node has read yet. They take any placement.
        along: Pairs: a number of dimensions, and the shard into which the user divides a value with that
            many dimensions. A sum with that many dimensions may be scattered into this shard.
        sought: Node -> number of runs (`Sharded.blocks`). These are weights without a placement, and views of
            such weights. Piper prefers to divide them into that many runs, if nothing else has to change.
        attention: See `by_keys`.
    """
    inputs = tensors_of(node)
    best: tuple[float, int] | None = None
    sought = sought or {}
    blocks = {placement.blocks for x in inputs if isinstance(placement := held[x], Sharded)} | {
        part.blocks for _, part in along
    }
    rules = rules_for(node, degree, blocks | {sought[x] for x in inputs if x in sought})
    for index, rule in enumerate(rules):
        # the nodes of `sought` that the rule divides, with the rule's number of runs
        parts = [
            (x, p.blocks)
            for x, p in zip(inputs, rule.inputs, strict=True)
            if x in sought and isinstance(p, Sharded)
        ]
        seeks = [x for x, count in parts if count == sought[x]]
        if len(seeks) < len(parts):
            continue
        moves = node.target in ATTENTION and any(isinstance(held[x], Sharded) for x in inputs)
        # Rule 0 reads whole values. If `by_keys` is true, consider only the rule that divides sequences
        # besides it, otherwise only the rules that divide heads or samples.
        if index and node.target in ATTENTION:
            queries = dict(zip(inputs, rule.inputs, strict=True))[attended(node)[0]]
            # `moves` allows a rule that no input asks for. It does not allow the rule that divides samples,
            # because a batch may have any number of samples.
            moves = moves and queries != Sharded(0)
            if _is_sequence(queries) is not by_keys(node, held, degree, attention):
                continue
        # Any rule except rule 0 needs a reason: it divides a node of `sought`, or `moves` or an input asks
        # for it.
        if index and not seeks and not moves and not _wanted(rule, inputs, held, along):
            continue
        cost = sum(
            _cost(held[x], wanted, math.prod(shape_of(x)), degree, x in fixed, x in free)
            for x, wanted in dict(zip(inputs, rule.inputs, strict=True)).items()
        )
        cost -= SOUGHT * len(seeks)
        if _meets(node, rule, inputs, elsewhere):
            continue
        if len({(x, wanted) for x, wanted in zip(inputs, rule.inputs, strict=True)}) > len(set(inputs)):
            continue  # the rule needs the same value in two placements
        if best is None or (cost, index) < best:
            best = (cost, index)
    return None if best is None or math.isinf(best[0]) else rules[best[1]]


def by_keys(node: Node, held: PlacementMap, degree: int, attention: str | None) -> bool:
    """Return whether each member keeps its shard of the queries' sequences, and gathers keys and values.

    False if the queries are not sharded along their sequences, or if each member gets whole sequences of some
    heads instead.

    Args:
        attention: The user's choice, "keys" or "heads". With None or "ring", the result is True if the heads
            cannot be divided. Otherwise Piper chooses the way that moves fewer elements. "ring" counts like
            None, because it reaches this function only if ring attention is not possible.
    """
    q, k, v = attended(node)
    if not _is_sequence(held[q]):
        return False
    if attention not in (None, "ring"):
        return attention == "keys"
    queries, keys = math.prod(shape_of(q)), math.prod(shape_of(k)) + math.prod(shape_of(v))
    heads = shape_of(q)[1] % degree == shape_of(k)[1] % degree == 0
    # Queries count twice, because the outputs of the heads are exchanged back.
    return not heads or keys < (2 * queries + keys) / degree


def _is_sequence(placement: Placement) -> bool:
    return isinstance(placement, Sharded) and placement.dim == 2


def _wanted(
    rule: Rule, inputs: Sequence[Node], held: PlacementMap, along: Collection[tuple[int, Sharded]]
) -> bool:
    """Return whether a rule reads a shard or a partial sum without a change, or scatters a sum into a shard
    of `along`."""
    for x, placement in zip(inputs, rule.inputs, strict=True):
        have = held[x]
        if not isinstance(placement, Replicated) and have == placement:
            return True
        if (
            isinstance(have, Partial)
            and isinstance(placement, Sharded)
            and (len(shape_of(x)), placement) in along
        ):
            return True
    return False


def _meets(
    node: Node, rule: Rule, inputs: Sequence[Node], elsewhere: Callable[[Node], Collection[int]]
) -> bool:
    """Return whether a rule divides a dimension that another axis divides."""
    pairs = [*zip(inputs, rule.inputs, strict=True), *((node, placement) for placement in rule.outputs)]
    return any(isinstance(placement, Sharded) and placement.dim in elsewhere(x) for x, placement in pairs)


def _cost(have: Placement, want: Placement, elements: int, degree: int, fixed: bool, free: bool) -> float:
    """Return the cost of a change of placement, in elements of the value; infinite if the change is not
    possible.

    The placement of a `fixed` value (a parameter) does not change. If it is also `free`, Piper has not chosen
    its placement yet, and the choice has no cost.
    """
    if have == want:
        return 0.0
    if isinstance(want, Partial) or (fixed and not free):
        return math.inf
    if free:
        return 0.0
    match have, want:
        case Partial(), Replicated():
            return 2.0 * elements
        case (Partial(), Sharded()) | (Sharded(), Replicated()):
            return 1.0 * elements
        case Sharded(), Sharded() if is_shift(have, want):
            return 1.0 * elements / degree
        case Sharded(), Sharded():
            both = have.blocks > 1 and want.blocks > 1
            apart = have.dim == want.dim and (have.blocks * want.blocks) % degree > 0
            return math.inf if both or apart else elements / degree
    return CUT * elements
