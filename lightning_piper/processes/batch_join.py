"""Joins the batches of several processes into one batch. A pipeline needs this if each of its ranks draws its
own data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_piper.capture import flatten
from lightning_piper.capture.proxies.batch import BatchSpec
from lightning_piper.errors import BatchError
from lightning_piper.processes.world import World


class BatchJoin:
    """An object that joins the batches of a replica's processes, in the order of their ranks. Making it, and
    calling `joined`, is collective over all processes.

    Args:
        world: The processes. `world.replicas` says which processes work on one batch.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._ranks = [rank for rank in range(world.size) if world.replicas[rank] == world.replica]
        self._group = world.group_of(self._ranks)

    def joined(self, batch: Any) -> Any:
        """Return the joined batch of the replica's processes.

        A tensor without dimensions is not joined: each process keeps its own. Of Python values, only lists
        with one element for each sample are joined. Other Python values come from the replica's first
        process.

        Raises:
            BatchError: The batches have different specs, or their tensors do not share a first dimension to
                join along.
        """
        leaves, spec = flatten(batch)
        self._check(spec)
        made = [self._gathered(x) if x.ndim else x for x in leaves]
        carried = self._world.gather(spec.contents(leaves), self._ranks) if spec.carried else []
        indices = {id(item): i for i, item in enumerate(spec.carried)}

        def content(item: Any) -> Any:
            found = [each[indices[id(item)]] for each in carried]
            return [x for each in found for x in each] if isinstance(found[0], list) else found[0]

        return spec.rebuild(made, content)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors `x` of all processes of the replica, joined along the first dimension, on the
        device of `x`. Collective over the replica."""
        own = x.cpu() if x.device.type != "cpu" else x
        parts = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts).to(x.device)

    def _check(self, spec: BatchSpec) -> None:
        """Check that all processes have the same batch spec, whose tensors share a first dimension. Otherwise
        all processes raise the same BatchError. Collective."""
        mark = int.from_bytes(hashlib.blake2b(repr(spec.key).encode(), digest_size=7).digest(), "big")
        own = torch.tensor([mark, spec.undivided is not None])
        found = [torch.empty_like(own) for _ in range(self._world.size)]
        dist.all_gather(found, own, group=self._world.host_group)
        if any(bool(each[1]) for each in found):
            whys = self._world.gather(None if spec.undivided is None else spec.undivided.why)
            raise BatchError(
                f"{_CHOSEN}, but Piper cannot join this batch, because {next(filter(None, whys))}. Give the batch tensors "
                f"with the samples in dimension 0. {_ADVICE} [PIPER-L004]"
            )
        if any(each[0] != found[0][0] for each in found):
            texts = self._world.gather(spec.described())
            rank = next(rank for rank, each in enumerate(found) if each[0] != found[0][0])
            raise BatchError(
                f"{_CHOSEN}, but the batches differ: {_difference(texts[0], texts[rank], rank)}. Give all "
                f"processes tensors of one shape and dtype, and equal numbers and strings. {_ADVICE} [PIPER-L004]"
            )


_CHOSEN = (
    "in a pipeline that PiperStrategy('auto') chooses, the batches of several processes are joined into one"
)
_ADVICE = "Or use PiperStrategy(), which uses data parallelism and does not join batches"


def _difference(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> str:
    """Return the first difference between the batches of rank 0 and of `rank`, from their paths and texts."""
    path = next(path for path in {**first, **other} if first.get(path) != other.get(path))
    found = [f"{texts.get(path, 'missing')} on rank {each}" for each, texts in ((0, first), (rank, other))]
    return f"batch{path} is {' and '.join(found)}"
