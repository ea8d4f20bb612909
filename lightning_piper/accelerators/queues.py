"""Streams of a simulated accelerator: queues of work that has been issued and not been done, and who comes next.

What is issued waits until the host wants to know something. Then queues are taken up in a drawn order, which keeps to nothing but
the order within a queue, the events between queues, and that those who meet wait for each other. So a queue can fall behind all
others as far as nothing holds them back: what is missing between two of them shows.

An order is a number. In the first `LAST` of them each queue in turn comes last: it is only taken up when no other can go on. An
operation of another queue that does not wait for one of this queue then comes before it, so these orders together show every
missing wait. The others draw which queue comes before which, and some of them draw it again on the way.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LAST = 33  # queues of a device: 32, and the caller's


@dataclass(slots=True)
class Work:
    """Something that was issued.

    Attributes:
        what: for messages.
        run: does it; None: it only waits.
        ready: None: as soon as all before it in the queue is done.
    """

    what: str
    run: Callable[[], None] | None = None
    ready: Callable[[], bool] | None = None


@dataclass(eq=False)
class Queue:
    """A stream of the hardware.

    Attributes:
        issued, done: how many so far.
        priority: the smallest is taken up first.
        returned: gives back memory, once this queue makes new memory.
    """

    name: str
    number: int
    work: deque[Work] = field(default_factory=deque)
    issued: int = 0
    done: int = 0
    priority: float = 0.0
    returned: list[Callable[[], None]] = field(default_factory=list)

    def issue(self, work: Work) -> Moment:
        self.work.append(work)
        self.issued += 1
        return Moment(self, self.issued)

    @property
    def now(self) -> Moment:
        return Moment(self, self.issued)

    def wait(self, moment: Moment) -> None:
        if moment.queue is not self and not moment.past:
            self.issue(Work(f"wait for {moment.queue.name}", ready=lambda: moment.past))


@dataclass(frozen=True, slots=True)
class Moment:
    """When the first `count` of a queue are done."""

    queue: Queue
    count: int

    @property
    def past(self) -> bool:
        return self.queue.done >= self.count


class Scheduler:
    """Takes up the work of all queues, in the order of number `order`."""

    def __init__(self, order: int) -> None:
        self.queues: list[Queue] = []
        self.redraw(order)
        self.later: list[tuple[list[Moment], Callable[[], None]]] = []  # done as soon as these moments are past

    def redraw(self, order: int) -> None:
        """Go on in another order."""
        self._draw = random.Random(order)
        self._order, self._changes = order, self._draw.choice((0.0, 0.0, 0.02, 0.2))
        for queue in self.queues:
            self._place(queue)

    def first(self, count: int) -> int:
        """Which of `count` queues is given out first."""
        return 0 if self._order < LAST else self._draw.randrange(count)

    def new(self, name: str, number: int) -> Queue:
        queue = Queue(name, number)
        self._place(queue)
        self.queues.append(queue)
        return queue

    def _place(self, queue: Queue) -> None:
        queue.priority = 1.0 + self._draw.random() if queue.number == self._order else self._draw.random()

    def run(self, enough: Callable[[], bool]) -> bool:
        """Go on until there is enough, or nobody can (False)."""
        while not enough():
            self._run_later()
            free = [q for q in self.queues if q.work and ((ready := q.work[0].ready) is None or ready())]
            if not free:
                return False
            queue = min(free, key=lambda q: q.priority)
            if self._changes and self._draw.random() < self._changes:
                self._place(queue)
            self.take(queue)
        return True

    def take(self, queue: Queue) -> None:
        """Do what stands first in a queue."""
        work = queue.work.popleft()
        if work.run is not None:
            work.run()
        queue.done += 1

    def _run_later(self) -> None:
        waiting = []
        for moments, run in self.later:
            if all(moment.past for moment in moments):
                run()
            else:
                waiting.append((moments, run))
        self.later = waiting

    @property
    def idle(self) -> bool:
        return not any(queue.work for queue in self.queues)

    def standing(self) -> Iterable[str]:
        """What every queue that cannot go on waits for."""
        return (f"{queue.name}: {queue.work[0].what}" for queue in self.queues if queue.work)
