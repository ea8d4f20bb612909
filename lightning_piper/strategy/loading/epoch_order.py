"""The order in which an epoch takes the samples of a data set, and the part of it that is left after a resume.

Samplers of replicas take turns: with R replicas, replica r takes the samples r, r + R, r + 2R, ... of one common
order. All replicas have drawn equally many batches, so together they have taken the first samples of the order.
One number, the count of these samples, says where any number of replicas continues.

This file has no state and does not depend on Lightning or on processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The samples of one epoch in their order, before they are divided over replicas.

    The order begins as `indices`, or as the permutation that `state` draws, or as 0, 1, ..., `length - 1`. With
    a `seed`, it is then permuted.

    Attributes:
        length: The number of samples.
        indices: `[length]` integers.
        state: State of the generator of a first permutation, of type uint8.
        seed: Seed of the generator of a last permutation.
    """

    length: int
    indices: torch.Tensor | None = None
    state: torch.Tensor | None = None
    seed: int | None = None

    def tensor(self) -> torch.Tensor:
        """Return the order as a tensor `[length]` of integers."""
        order = torch.arange(self.length) if self.indices is None else self.indices
        generator = torch.Generator()
        if self.state is not None:
            order = torch.randperm(self.length, generator=generator.set_state(self.state))
        if self.seed is not None:
            order = order[torch.randperm(self.length, generator=generator.manual_seed(self.seed))]
        return order

    def content(self) -> dict[str, Any]:
        """Return the fields that are set, as a checkpoint has them."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, eq=False)
class Position:
    """A position in an epoch.

    Attributes:
        order: The order of the epoch.
        taken: How many samples of the order the replicas have taken.
    """

    order: EpochOrder
    taken: int = 0

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Return the position that `content()` describes."""
        fields = dict(content)
        taken = fields.pop("taken")
        return cls(EpochOrder(**fields), taken)

    def content(self) -> dict[str, Any]:
        """Return the position for a checkpoint: integers and tensors."""
        return {**self.order.content(), "taken": self.taken}

    @property
    def left(self) -> int:
        """The number of samples that no replica has taken."""
        return self.order.length - self.taken

    def after(self, batches: int, batch_size: int, replicas: int) -> Position:
        """Return the position after each replica has drawn this many more batches."""
        return replace(self, taken=min(self.taken + batches * batch_size * replicas, self.order.length))

    def share_size(self, replicas: int, drop: bool) -> int:
        """Return how many samples each replica takes from here to the end of the epoch."""
        return self.left // replicas if drop else math.ceil(self.left / replicas)

    def share(self, replicas: int, replica: int, drop: bool) -> list[int]:
        """Return the samples that one replica takes from here to the end of the epoch, in their order.

        Args:
            replicas: The number of replicas.
            replica: The index of the replica.
            drop: Whether the last samples are left out if they do not divide evenly. Otherwise, the first
                samples of the epoch are repeated at the end, as in torch's `DistributedSampler`.
        """
        order = self.order.tensor()
        size = self.share_size(replicas, drop) * replicas
        rest = order[self.taken : self.taken + size]
        while 0 < len(rest) < size:
            rest = torch.cat([rest, order[: size - len(rest)]])
        samples: list[int] = rest[replica::replicas].tolist()
        return samples

    def batches_left(self, batch_size: int, replicas: int, drop: bool, drop_batch: bool) -> int:
        """Return how many batches each replica draws from here to the end of the epoch.

        Args:
            batch_size: The number of samples in a batch of one replica.
            replicas: The number of replicas.
            drop: As in `share`.
            drop_batch: Whether a smaller last batch is left out (`DataLoader(drop_last=True)`).
        """
        size = self.share_size(replicas, drop)
        return size // batch_size if drop_batch else math.ceil(size / batch_size)
