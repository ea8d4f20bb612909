"""The members of a group that each hold some whole parameters, balanced over all buckets of the group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_piper.ir.values import TensorSpec


def update_cost(spec: TensorSpec) -> int:
    """Return a number that is proportional to the time of an update of a parameter as a whole matrix.

    A Newton-Schulz iteration multiplies an m x n matrix by square matrices of min(m, n) rows. The dimensions of a tensor
    after the first count as columns. A parameter with fewer than two dimensions costs its number of elements.
    """
    if len(spec.shape) < 2 or not spec.numel:
        return spec.numel
    rows = spec.shape[0]
    return spec.numel * min(rows, spec.numel // rows)


class Owners:
    """The parameters that each member of a group has so far, and the choice of the members for more of them.

    A DAG does not know which optimizer updates a parameter: an embedding has a large matrix, but often a cheap
    update. So members are balanced among parameters of one shape first, because one optimizer usually updates all of
    them, and only then over all parameters.

    Args:
        members: Number of members.
    """

    def __init__(self, members: int) -> None:
        # for each member: shape (its dimensions sorted) -> cost of its parameters of this shape
        self._costs: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(members)]
        self._totals = [0] * members  # for each member: cost of all its parameters

    def add(self, tensors: Sequence[TensorSpec], owners: Sequence[int]) -> None:
        """Note that member `owners[i]` has the i-th tensor."""
        for spec, owner in zip(tensors, owners, strict=True):
            self._costs[owner][_shape(spec)] += update_cost(spec)
            self._totals[owner] += update_cost(spec)

    def assign(self, tensors: Sequence[TensorSpec], sizes: Sequence[int]) -> tuple[int, ...]:
        """Choose a member for each tensor of a bucket, and note the choice.

        All shards of a bucket are as long as the longest shard. So the tensors are first divided into as many parts as
        there are members: from the largest to the smallest tensor, each into the part with the fewest elements.

        Then each part goes to a member, from the most to the least expensive part. The member is the one with the least
        cost so far among parameters of the part's shapes. If members are equal, it is the member with the least cost
        over all parameters.

        Args:
            sizes: Number of elements of each tensor, with padding.
        """
        members = range(len(self._costs))
        filled, parts = [0 for _ in members], [0 for _ in tensors]
        for i in sorted(range(len(tensors)), key=lambda i: (-sizes[i], i)):
            parts[i] = min(members, key=filled.__getitem__)
            filled[parts[i]] += sizes[i]
        costs: dict[int, Counter[tuple[int, ...]]] = {}  # of the parts that are not empty
        for spec, part in zip(tensors, parts, strict=True):
            costs.setdefault(part, Counter())[_shape(spec)] += update_cost(spec)
        free, member_of = list(members), dict[int, int]()
        for part in sorted(costs, key=lambda part: (-costs[part].total(), part)):
            chosen = min(
                free, key=lambda m: (sum(self._costs[m][s] for s in costs[part]), self._totals[m], m)
            )
            member_of[part] = chosen
            free.remove(chosen)
        owners = tuple(member_of[part] for part in parts)
        self.add(tensors, owners)
        return owners


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(sorted(spec.shape))
