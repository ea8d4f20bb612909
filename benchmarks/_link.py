"""A slow link between the processes of one machine: messages arrive as late as over a network of this bandwidth, and use no
CPU time meanwhile."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_piper.plan.instructions import Group
from lightning_piper.runtime import ProcessTransport
from lightning_piper.runtime.collectives import Members
from lightning_piper.runtime.messages import PendingWork


class Link:
    """The outgoing link of a process. It carries one message after another.

    Args:
        bandwidth: Bytes a second.
    """

    def __init__(self, bandwidth: float) -> None:
        self._bandwidth, self._free = bandwidth, 0.0

    def arrival(self, nbytes: float) -> float:
        """Send a message now. Return the time at which it arrives."""
        self._free = max(time.monotonic(), self._free) + nbytes / self._bandwidth
        return self._free


def wait_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))


class _Arriving:
    """The works of an exchange that ends at a moment."""

    def __init__(self, works: Sequence[PendingWork], moment: float) -> None:
        self._works, self._moment = works, moment

    def wait(self) -> None:
        wait_until(self._moment)
        for work in self._works:
            work.wait()


class _Members(Members):
    def __init__(self, members: Members, link: Link) -> None:
        super().__init__(members.messages, members.ranks, members.ranks[members.own], members.native)
        self._link = link

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> list[PendingWork]:
        works = super().exchange(sent, received)
        return [_Arriving(works, self._link.arrival(sum(sent[i].nbytes for i in self.others)))]


class LinkTransport(ProcessTransport):
    """A transport whose collectives go over a slow link."""

    def __init__(self, *args: Any, link: Link, **options: Any) -> None:
        super().__init__(*args, **options)
        self._link = link

    def members(self, key: Group) -> Members:
        return _Members(super().members(key), self._link)


def ddp_hook(link: Link) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """Return a communication hook of DDP whose all-reduces go over a slow link, as rings."""

    def reduce(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        world, flat = dist.get_world_size(), bucket.buffer()
        work = dist.all_reduce(flat, async_op=True)
        moment = link.arrival(2 * (world - 1) / world * flat.nbytes)
        mean: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def arrive() -> None:
            wait_until(moment)
            work.wait()
            mean.set_result(flat.div_(world))

        threading.Thread(target=arrive, daemon=True).start()
        return mean

    return reduce
