"""A simulated accelerator that runs work late, in a random order that respects only streams and events.

    with Simulated(order=7) as device:
        results = run_local(executors, leaves, seed=0)
        device.synchronize()

The program's tensors are CPU tensors. Every operation on them goes into the queue of the current stream, and
its outputs are poison until it has run (`queues`, `memory`). Views are made at once. A read by the host
(`item`, `tolist`, `cpu`) waits for the current stream and for nothing else, as on CUDA.

So a missing event, a missing wait, or memory that is freed too early gives wrong numbers in some order.
`Simulated.faults` also lists each operation that uses memory which is already reused, and each operation that
does not wait for earlier work on the same memory (`accelerators.conflicts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from lightning_piper.accelerators import in_use
from lightning_piper.accelerators._torch_dispatch import TorchDispatchMode
from lightning_piper.accelerators.captured_work import CapturedWork
from lightning_piper.accelerators.conflicts import Access, Conflicts, Note
from lightning_piper.accelerators.dispatch_mode import Issuing
from lightning_piper.accelerators.memory import Memory, StorageBlock
from lightning_piper.accelerators.queues import Moment, Queue, Scheduler
from lightning_piper.common.units import counted
from lightning_piper.errors import ExecutionError

T = TypeVar("T")
QUEUES = 32  # number of hardware queues of a CUDA device; the k-th stream gets queue k modulo this number


class Stream:
    """A stream of the program. It runs on one of the hardware's queues, which other streams may share."""

    def __init__(self, simulated: Simulated, queue: Queue) -> None:
        self._simulated, self.queue = simulated, queue

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return id(self.queue)

    def wait_stream(self, other: Stream) -> None:
        self.queue.wait(other.queue.now)

    def wait_event(self, event: Event) -> None:
        if event.moment is not None:  # an event that was never recorded is past
            self.queue.wait(event.moment)

    def record_event(self) -> Event:
        event = Event(self._simulated)
        event.record(self)
        return event


class Event:
    """An event. `record` sets its moment, and streams wait for this moment (None: not recorded yet)."""

    def __init__(self, simulated: Simulated) -> None:
        self._simulated = simulated
        self.moment: Moment | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.moment = (self._simulated.host.current if stream is None else stream).queue.now

    def wait(self, stream: Stream | None = None) -> None:
        (self._simulated.host.current if stream is None else stream).wait_event(self)


class Host:
    """A simulated device with the streams of its program.

    Attributes:
        caller: The stream that exists from the start.
        current: The stream to which the program issues work.
        inside: Whether the simulation's own code is running, whose operations run immediately.
        named: Name -> the stream of this name.
        captured: The graph that gets the program's operations; None if no capture is running.
    """

    def __init__(self, simulated: Simulated, name: str, queues: int) -> None:
        first = simulated.scheduler.first(queues)
        self._pools = {
            kind: _Pool(simulated, f"{name}{kind}", queues, first) for kind in ("stream", "communicator")
        }
        self.caller = Stream(simulated, simulated.scheduler.new(f"{name}caller", queues))
        self.current, self.inside = self.caller, False
        self.named: dict[object, Stream] = {}
        self.captured: CapturedWork | None = None

    def stream(self, name: object) -> Stream:
        """Return the stream of this name. The first call creates it."""
        if name not in self.named:
            self.named[name] = stream = self._pools["stream"].next()
            if isinstance(name, tuple):
                stream.queue.name += f" ({', '.join(map(str, name))})"
        return self.named[name]

    def for_communicator(self) -> Stream:
        """Return a new stream for a communicator. Named streams do not share its queue."""
        return self._pools["communicator"].next()


class _Pool:
    """A pool of queues. Each new stream takes the next one; after the last queue, the first is next."""

    def __init__(self, simulated: Simulated, name: str, queues: int, first: int) -> None:
        self._simulated, self._name = simulated, name
        self._queues: list[Queue | None] = [None] * queues
        self._next = first

    def next(self) -> Stream:
        index = self._next
        self._next = (index + 1) % len(self._queues)
        queue = self._queues[index]
        if queue is None:
            queue = self._queues[index] = self._simulated.scheduler.new(f"{self._name} {index}", index)
        return Stream(self._simulated, queue)


class Simulated:
    """A simulated accelerator. It is in use inside of `with`, by one thread. See the module's docstring.

    Args:
        order: Number of the random order of work (see `queues`).
        queues: Number of hardware queues for named streams, and also for the streams of communicators.

    Attributes:
        faults: Reports of conflicts, of operations on memory that was already reused, and of failed
            operations.
        conflicts: The work that has not run yet, and the memory that it uses.
        host: The device to which work is issued.
        doing: Name in messages of the instruction that issues work. Empty if the caller does not set it.
    """

    def __init__(self, order: int, queues: int = QUEUES) -> None:
        self.faults: list[str] = []
        self.conflicts = Conflicts()
        self.doing = ""
        self.scheduler = Scheduler(order)
        self.memory = Memory(self.scheduler)
        self.queues = queues
        self.host = Host(self, "", queues)
        self._issuing = Issuing(self)
        # Lets the other hosts continue, or raises the error that its argument makes; None if there is one
        # host. See `cooperative_threads`.
        self.others: Callable[[Callable[[], ExecutionError]], None] | None = None
        self.progressed: Callable[[], None] = lambda: None  # called when a wait has ended

    # The interface of `Accelerator`

    def stream(self, device: torch.device, name: object) -> Stream:
        return self.host.stream(name)

    def new_event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.host.current

    def set_stream(self, stream: Stream) -> None:
        self.host.current = stream

    def record_stream(self, x: torch.Tensor, stream: Stream) -> None:
        block = self.memory.of(x)
        if block is not None and block.owner is not stream.queue:
            block.uses.add(stream.queue)

    def new_graph_pool(self) -> None:
        """Return None. Memory that a graph allocates stays with the graph."""

    def capture(self, work: Callable[[], T], device: torch.device, pool: object) -> tuple[CapturedWork, T]:
        """Capture the operations that `work` issues (`Accelerator.capture`).

        Raises:
            ExecutionError: `work` waits for the device, draws random numbers, or captures.
        """
        if self.host.captured is not None:
            raise ExecutionError(
                "the simulated accelerator: a capture begins inside of a capture. Report this [PIPER-X001]"
            )
        graph = self.host.captured = CapturedWork(self)
        try:
            return graph, work()
        finally:
            self.host.captured = None

    def synchronize(self) -> None:
        """Wait for all issued work.

        Raises:
            ExecutionError: Queues wait for each other; or there is a fault, such as the use of memory that
                was already reused.
        """
        self._wait(lambda: self.scheduler.idle)
        if self.faults:
            more = f" (and {counted(len(self.faults) - 1, 'more fault')})" if len(self.faults) > 1 else ""
            raise ExecutionError(
                f"on the simulated accelerator, {self.faults[0]}{more}. If you added an operation, check what "
                "it waits for. Otherwise, report this [PIPER-X001]"
            )

    def read(self, what: str, accesses: list[Access]) -> None:
        """Add the conflicts of a read by the host to `faults`. The host has waited for its current stream.

        Args:
            what: Name of the operation that reads.
        """
        self.faults += self.conflicts.before(
            f"the host, which reads ({what}{self.doing and f' of {self.doing}'}),", accesses
        )

    def wait_for_current(self) -> None:
        """Wait for the current stream, as a host does before it reads a tensor.

        Raises:
            ExecutionError: Queues wait for each other.
        """
        moment = self.host.current.queue.now
        self._wait(lambda: moment.past)

    def _wait(self, enough: Callable[[], bool]) -> None:
        """Let queued work run until `enough` returns true. If no queue can continue, let other hosts
        continue.

        Raises:
            ExecutionError: Queues wait for each other, or a capture is running.
        """
        host, inside = self.host, self.host.inside
        if host.captured is not None:
            raise ExecutionError(
                "the host waits for the device while it records a CUDA graph, and a replay of the graph cannot wait. Move "
                "the read or the synchronization out of the recorded work [PIPER-X001]"
            )
        host.inside = True
        try:
            while not self.scheduler.run(enough):
                if self.others is None:
                    raise self._standing()
                self.others(self._standing)
            self.progressed()
        finally:
            host.inside = inside

    def _standing(self) -> ExecutionError:
        """Return the error for queues that wait for each other."""
        return ExecutionError(
            f"the simulated accelerator cannot continue: {'; '.join(self.scheduler.standing())}. If you "
            "added an operation, check what it waits for. Otherwise, report this [PIPER-X001]"
        )

    def of_work(self, x: torch.Tensor, touched: list[StorageBlock]) -> torch.Tensor:
        """Return the tensor for the device's work: on the storage of its block, not on the program's storage.

        So pending work does not keep the program's storage alive. The tensor's block is appended to
        `touched`. An empty tensor, or the storage of a tensor without a block, stays unchanged.
        """
        if not x.numel():
            return x
        block = self.memory.of(x)
        if block is not None:
            touched.append(block)
        storage = x.untyped_storage() if block is None else block.storage
        return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())

    def note(self, what: str, queue: Queue, accesses: list[Access]) -> Note:
        """Record that work is issued to a queue, and return the record. `what` names the work in messages."""
        return self.conflicts.issued(f"{what}{self.doing and f' of {self.doing}'} on {queue.name}", accesses)

    def check(self, note: Note, touched: list[StorageBlock]) -> None:
        """Add the faults of work that runs now: conflicts with earlier work, and memory that is already
        reused."""
        self.faults += self.conflicts.ran(note)
        self.faults += [
            f"{note.what} uses memory that {block.made} made on {block.owner.name}, but that is already "
            "reused"
            for block in touched
            if block.gone
        ]

    # Contexts

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Intercept the tensor operations of this thread, so that they run on this accelerator."""
        with _Functions(self), _Operations(self):
            yield

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Return a context in which new executors use this accelerator's streams. The context does not
        intercept tensor operations."""
        in_use.append(self)
        try:
            yield
        finally:
            in_use.remove(self)

    @contextlib.contextmanager
    def step(self, order: int) -> Iterator[None]:
        """Return a context that uses the accelerator again in the order `order`. The memory of earlier uses
        stays. The context ends with `synchronize`.

        Raises:
            ExecutionError: As `synchronize` does.
        """
        self.scheduler.redraw(order)
        with self.bound(), self.modes():
            yield
        self.synchronize()

    def __enter__(self) -> Simulated:
        self._modes = self.modes()
        self._modes.__enter__()
        in_use.append(self)
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        in_use.remove(self)
        self._modes.__exit__(None, None, None)
        try:
            if kind is None:
                self.synchronize()
        finally:
            self.memory.closed = True

    def dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Issue an operation of the program, and return its results. If the simulation's own code calls the
        operation, run it immediately."""
        host = self.host
        if host.inside:
            return func(*args, **kwargs)
        host.inside = True
        try:
            return self._issuing.issue(func, args, kwargs)
        finally:
            host.inside = False


class _Operations(TorchDispatchMode):
    def __init__(self, simulated: Simulated) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulated = simulated

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._simulated.dispatched(func, args, kwargs or {})


# Methods of a tensor with which the host reads its values, and that are not dispatched as operations.
_READING: set[Callable[..., Any]] = {
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.__deepcopy__,
}


class _Functions(TorchFunctionMode):
    """A mode that handles functions which are not dispatched as operations: reads, and pinned memory."""

    def __init__(self, simulated: Simulated) -> None:
        super().__init__()
        self._simulated = simulated

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Before a read, wait for the current stream. Allocate pinned memory outside of the simulation."""
        kwargs = kwargs or {}
        if not self._simulated.host.inside:
            if func in _READING:
                self._simulated.wait_for_current()
                self._simulated.read(str(getattr(func, "__name__", func)), [Access.of(args[0], False)])
            # Pinned memory belongs to the host, so it is not poisoned or reused too early.
            elif kwargs.get("pin_memory") and func is torch.empty:
                self._simulated.host.inside = True
                try:
                    return torch.zeros(*args, **(kwargs | {"pin_memory": False}))
                finally:
                    self._simulated.host.inside = False
        return func(*args, **kwargs)
