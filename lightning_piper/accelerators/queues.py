"""Queues of a simulated accelerator, with issued work that is not done yet, and the order in which it runs.

Issued work waits until the host needs a result. Then the queues run in a random order. The random order
respects only the order within a queue, the events between queues, and that members of an operation wait for
each other. So a queue can be delayed as long as synchronization permits, and a missing wait between two
queues shows.

An order is a number. In each of the first `LAST` orders, one queue comes last: it runs only if no other queue
can. An operation of another queue that lacks a wait for this queue then runs too early, so these orders
together show every missing wait. The other orders draw priorities of the queues at random, and some of them
draw new priorities during the run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

LAST = 33  # number of queues of a device: 32, and the queue of the caller's stream


@dataclass(slots=True)
class QueuedWork:
    """A piece of issued work.

    Attributes:
        what: The work's name in messages.
        run: Does the work; None if the work is only a wait.
        ready: Returns whether the work can run; None if it can run as soon as all earlier work of the
            queue is done.
    """

    what: str
    run: Callable[[], None] | None = None
    ready: Callable[[], bool] | None = None


@dataclass(eq=False)
class Queue:
    """A hardware queue.

    Attributes:
        name: The queue's name in messages.
        number: Position of the queue in its pool. In the order with the same number, the queue comes last.
        work: The works that are issued and not done, first to last.
        issued, done: Number of works issued and done so far.
        priority: The queue with the smallest priority runs first.
        returned: Functions that reuse freed memory of this queue. They are called at its next allocation.
    """

    name: str
    number: int
    work: deque[QueuedWork] = field(default_factory=deque)
    issued: int = 0
    done: int = 0
    priority: float = 0.0
    returned: list[Callable[[], None]] = field(default_factory=list)

    def issue(self, work: QueuedWork) -> Moment:
        self.work.append(work)
        self.issued += 1
        return Moment(self, self.issued)

    @property
    def now(self) -> Moment:
        return Moment(self, self.issued)

    def wait(self, moment: Moment) -> None:
        if moment.queue is not self and not moment.past:
            self.issue(QueuedWork(f"wait for {moment.queue.name}", ready=lambda: moment.past))


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment when the first `count` works of a queue are done. Events and waits refer to it."""

    queue: Queue
    count: int

    @property
    def past(self) -> bool:
        return self.queue.done >= self.count


class Scheduler:
    """A scheduler that runs the work of all queues, in order number `order`."""

    def __init__(self, order: int) -> None:
        self.queues: list[Queue] = []
        self.redraw(order)
        # (moments, function that runs as soon as all of these moments are past)
        self.later: list[tuple[list[Moment], Callable[[], None]]] = []

    def redraw(self, order: int) -> None:
        """Continue in order number `order`."""
        self._draw = random.Random(order)
        # `_changes`: the probability that a queue gets a new priority when its next work runs
        self._order, self._changes = order, self._draw.choice((0.0, 0.0, 0.02, 0.2))
        for queue in self.queues:
            self._place(queue)

    def first(self, count: int) -> int:
        """Return the index of the queue, of `count` queues, that the first stream takes."""
        return 0 if self._order < LAST else self._draw.randrange(count)

    def new(self, name: str, number: int) -> Queue:
        queue = Queue(name, number)
        self._place(queue)
        self.queues.append(queue)
        return queue

    def _place(self, queue: Queue) -> None:
        queue.priority = 1.0 + self._draw.random() if queue.number == self._order else self._draw.random()

    def run(self, enough: Callable[[], bool]) -> bool:
        """Run work until `enough()` holds, or until no queue can continue. Return whether `enough()`
        holds."""
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
        """Run the first work of a queue."""
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
        """Return, for each queue that cannot continue, its name and its first work, which cannot run."""
        return (f"{queue.name}: {queue.work[0].what}" for queue in self.queues if queue.work)
