"""Which rule an operation follows: the one whose changes of placement cost least.

Costs are elements moved, relative to those of the whole value: an all-reduce moves each twice, a reduce-scatter or an all-gather
once, an all-to-all or a shift a part of them, a cut nothing (it is counted a little, so that nothing is cut without need). Members
do the same work on whole values, or each a part of it; where values are whole, no rule divides them by itself: that is for the
user to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from torch.fx import Node

from lightning_piper.ir.values import Partial, Placement, Replicate, Shard, is_shift
from lightning_piper.placements.attention import ATTENTION, attended
from lightning_piper.placements.changing import Held
from lightning_piper.placements.rule import Rule, shape_of, tensors_of
from lightning_piper.placements.rules import rules_for

CUT = 0.01
SOUGHT = 1e-3  # elements: less than any change costs


def choose(
    node: Node,
    held: Held,
    elsewhere: Callable[[Node], Collection[int]],
    degree: int,
    fixed: Collection[Node],
    free: Collection[Node],
    along: Collection[tuple[int, Shard]],
    sought: Mapping[Node, int] | None = None,
    attention: str | None = None,
) -> Rule | None:
    """The rule for an operation; None if it needs another placement of what is fixed.

    Args:
        held: the placements of its inputs.
        elsewhere: the dimensions of a value that are divided along other axes, and so not along this one.
        fixed: nodes whose placement does not change (parameters).
        free: parameters of which nothing was said and that nobody has read yet: they take any.
        along: ranks of values, and how the user divides them; sums are divided so rather than made whole.
        sought: those of `free` that are divided rather than left whole, where nothing else has to change; by how many runs.
        attention: see `by_keys`.
    """
    inputs = tensors_of(node)
    best: tuple[float, int] | None = None
    sought = sought or {}
    blocks = {placement.blocks for x in inputs if isinstance(placement := held[x], Shard)} | {part.blocks for _, part in along}
    rules = rules_for(node, degree, blocks | {sought[x] for x in inputs if x in sought})
    for index, rule in enumerate(rules):
        parts = [(x, p.blocks) for x, p in zip(inputs, rule.inputs, strict=True) if x in sought and isinstance(p, Shard)]
        seeks = [x for x, count in parts if count == sought[x]]
        if len(seeks) < len(parts):
            continue
        moves = node.target in ATTENTION and any(isinstance(held[x], Shard) for x in inputs)
        if index and node.target in ATTENTION:
            queries = dict(zip(inputs, rule.inputs, strict=True))[attended(node)[0]]
            moves = moves and queries != Shard(0)  # not for samples, of which there may be any number
            if _is_sequence(queries) is not by_keys(node, held, degree, attention):
                continue
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
            continue  # one value in two placements at once
        if best is None or (cost, index) < best:
            best = (cost, index)
    return None if best is None or math.isinf(best[0]) else rules[best[1]]


def by_keys(node: Node, held: Held, degree: int, attention: str | None) -> bool:
    """Has each member of an attention queries of its part of the sequence, for which keys and values are gathered? Else it gets
    whole sequences of some heads.

    Args:
        attention: which of these ("keys", "heads") the user wants; None, and "ring" where keys cannot go round: what moves less.
    """
    q, k, v = attended(node)
    if not _is_sequence(held[q]):
        return False
    if attention not in (None, "ring"):
        return attention == "keys"
    queries, keys = math.prod(shape_of(q)), math.prod(shape_of(k)) + math.prod(shape_of(v))
    heads = shape_of(q)[1] % degree == shape_of(k)[1] % degree == 0
    return not heads or keys < (2 * queries + keys) / degree  # what is made of heads goes back


def _is_sequence(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.dim == 2


def _wanted(rule: Rule, inputs: Sequence[Node], held: Held, along: Collection[tuple[int, Shard]]) -> bool:
    """Does it take a part that is there? Or divide a sum where the user divides values?"""
    for x, placement in zip(inputs, rule.inputs, strict=True):
        have = held[x]
        if not isinstance(placement, Replicate) and have == placement:
            return True
        if isinstance(have, Partial) and isinstance(placement, Shard) and (len(shape_of(x)), placement) in along:
            return True
    return False


def _meets(node: Node, rule: Rule, inputs: Sequence[Node], elsewhere: Callable[[Node], Collection[int]]) -> bool:
    """Would it divide a dimension that is divided along another axis?"""
    pairs = [*zip(inputs, rule.inputs, strict=True), *((node, placement) for placement in rule.outputs)]
    return any(isinstance(placement, Shard) and placement.dim in elsewhere(x) for x, placement in pairs)


def _cost(have: Placement, want: Placement, elements: int, degree: int, fixed: bool, free: bool) -> float:
    if have == want:
        return 0.0
    if isinstance(want, Partial) or (fixed and not free):
        return math.inf
    if free:
        return 0.0
    match have, want:
        case Partial(), Replicate():
            return 2.0 * elements
        case (Partial(), Shard()) | (Shard(), Replicate()):
            return 1.0 * elements
        case Shard(), Shard() if is_shift(have, want):
            return 1.0 * elements / degree
        case Shard(), Shard():
            both = have.blocks > 1 and want.blocks > 1
            apart = have.dim == want.dim and (have.blocks * want.blocks) % degree > 0
            return math.inf if both or apart else elements / degree
    return CUT * elements
