"""The processes of a run, and the transfer of objects and tensors between them.

With one process, as with `transport="local"`, the operations have the same results without communication. So
callers need not distinguish the cases.
"""

from __future__ import annotations

import atexit
import copy
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_piper.accelerators._torch_groups import keep_all_groups
from lightning_piper.accelerators.kinds import backend_of
from lightning_piper.common.containers import container_like
from lightning_piper.errors import PiperError
from lightning_piper.processes.objects import dumps, of_outline, outlined
from lightning_piper.runtime.groups import local_group
from lightning_piper.runtime.same_machine.machine import machine

T = TypeVar("T")
RANK_ZERO = 0
# Values of `how` in `World.over_replicas`: those for a mean, and name -> operation.
_MEANS = (None, "mean", "avg", dist.ReduceOp.AVG)
_SUMS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# The default group, and the groups that `World` makes: (purpose, ranks) -> group. The groups live as long as
# the default group, and all fits and strategies of a process share them.
_host: tuple[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]] | None = None

_refused: BaseException | None = None  # the error that every exchange in host memory raises
_ends_default = False  # whether `_end_groups` destroys the default group, and so all groups


def refuse_exchanges(error: BaseException | None) -> None:
    """Make every exchange in host memory raise this error, in whichever thread it happens. None allows
    exchanges again."""
    global _refused
    _refused = error


@torch.no_grad()
def fill(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor, even if several of its indices share one element (`expand`)."""
    for dim in range(into.ndim):
        if into.stride(dim) == 0 and into.shape[dim] > 1:
            into, values = into.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    into.copy_(values)


class World:
    """The processes of a run, seen from one of them, or the processes of one local replica of local SGD.

    `broadcast`, `gather`, `to_rank_zero`, `from_rank_zero`, `on_rank_zero` and `decide` are collective, and
    exchange values in host memory.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        device: The device on which this process keeps its tensors.
        timeout: Timeout of communication; None for torch's default.
        replicas: For each rank, the data-parallel replica that it belongs to, such as `(0, 0, 1, 1)`. Each
            replica draws its own batches. By default, all processes are one replica.
        members: For each rank, the process's rank in the run, which also names it in errors. By default, these
            are all processes of the run.
        is_sole: Whether only this process takes part in collectives.
    """

    is_sole = False

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        timeout: timedelta | None = None,
        replicas: Sequence[int] = (),
        members: Sequence[int] = (),
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.timeout, self.members = timeout, tuple(members) or tuple(range(size))
        self._purpose = "tensors in host memory"
        self.replicas = tuple(replicas) or (0,) * size

    def apart(self, purpose: str) -> World:
        """Return the same processes with separate groups for `broadcast`, `gather`, `to_rank_zero` and
        `from_rank_zero`. Collective.

        A thread may call these methods independently of the exchanges of this `World`.

        Args:
            purpose: Name of the groups.
        """
        other = copy.copy(self)
        other._purpose = purpose
        if self.size > 1:
            assert other.host_group is not None  # creates the group now, because its first use is collective
        return other

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == RANK_ZERO

    @property
    def replica(self) -> int:
        """The replica that this process belongs to."""
        return self.replicas[self.rank]

    @property
    def count(self) -> int:
        """The number of replicas, each of which draws its own batches."""
        return max(self.replicas) + 1

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each replica. This rank acts for its replica when each replica counts once."""
        return tuple(self.replicas.index(r) for r in range(self.count))

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The group of all processes for tensors in host memory. The first use is collective."""
        return self.group_of(range(self.size))

    def group_of(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """Return the group of some processes for tensors in host memory. This process must be a member. The
        first use is collective over the members. Raise the error of `refuse_exchanges`, if there is one."""
        if _refused is not None:
            raise _refused
        members, groups = tuple(sorted(self.members[rank] for rank in ranks)), _groups()
        key = self._purpose, members
        if key not in groups:
            groups[key] = local_group(members, self._purpose, "gloo", self.timeout)
        return groups[key]

    @property
    def device_group(self) -> dist.ProcessGroup | None:
        """The group of all processes for tensors on their devices; None for the default group of the run. The
        first use is collective."""
        if self.size == dist.get_world_size():
            return None
        key = f"tensors on {self.device.type}", self.members
        if key not in _groups():
            _groups()[key] = local_group(self.members, key[0], backend_of(self.device), self.timeout)
        return _groups()[key]

    def warn(self, text: str) -> None:
        """Issue a warning on rank 0 of the run only. The warning names the line that calls this method."""
        if self.members[self.rank] == RANK_ZERO:
            warnings.warn(text, stacklevel=2)

    def broadcast(self, value: T, source: int = RANK_ZERO) -> T:
        """Return the value of the process `source` on every process. The other processes pass any value."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.members[source], group=self.host_group)
        return box[0]

    def gather(self, value: T, ranks: Sequence[int] | None = None) -> list[T]:
        """Return the values of all processes, by rank, on every process.

        Args:
            value: This process's value.
            ranks: Exchange values among these ranks only, and return them in this order. Only these ranks
                call this method, after `group_of` was called for them.
        """
        members = sorted(range(self.size) if ranks is None else ranks)
        if len(members) == 1:
            return [value]
        found: list[Any] = [None] * len(members)
        dist.all_gather_object(
            found, dumps(value), group=self.host_group if ranks is None else self.group_of(members)
        )
        values = [pickle.loads(each) for each in found]
        return values if ranks is None else [values[members.index(rank)] for rank in ranks]

    def on_this_machine(self, share: object = None) -> tuple[int, int]:
        """Return this process's index among the processes of its machine, and their number. Collective.

        Args:
            share: A part of the machine. Only processes with an equal value count (default: all processes of the
                machine).
        """
        found = self.gather((machine(), share))
        own = found[self.rank]
        return found[: self.rank].count(own), found.count(own)

    def to_rank_zero(self, value: T) -> list[T] | None:
        """Return the values of all processes, by rank, on rank 0; None on the other ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_rank_zero else None
        dist.gather_object(value, values, dst=self.members[RANK_ZERO], group=self.host_group)
        return values

    def from_rank_zero(self, values: list[T] | None) -> T:
        """Return this process's entry of the list that rank 0 passes, which has an entry for each rank. The
        other ranks pass None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values, src=self.members[RANK_ZERO], group=self.host_group)
        value: T = box[0]
        return value

    def on_rank_zero(self, work: Callable[[], T], share: bool = True) -> T | None:
        """Run `work` on rank 0 and return its result on every process.

        Args:
            work: The function to run.
            share: If false, only rank 0 returns the result, and the other ranks return None.

        Raises:
            Exception: On rank 0, the error of `work`. On the other ranks, a PiperError with its text, of the
                same class if `work` raised a PiperError.
        """
        if self.size == 1:
            return work()
        result: Any = None
        failure: Exception | None = None
        if self.is_rank_zero:
            try:
                result = work()
            except Exception as error:
                failure = error
        kind = None if failure is None else type(failure) if isinstance(failure, PiperError) else PiperError
        shared, kind, text = self.broadcast((result if share else None, kind, failure and described(failure)))
        if failure is not None:
            raise failure
        if kind is not None:
            first = self.members[RANK_ZERO]
            raise of_rank(first, kind(f"rank {first}: {text}"))
        return result if self.is_rank_zero else shared

    def move(
        self, tensor: torch.Tensor | None, source: int, target: int, into: torch.Tensor | None = None
    ) -> None:
        """Copy `tensor` of process `source` into the tensor `into` of process `target`. Other processes do
        nothing, and no process does if `source` is `target`.

        Tensors travel as bytes, so every dtype works. They travel between host memories, because a device
        backend would create a communicator, with its memory, for each pair of processes that ever
        communicates.
        """
        if source == target:
            return
        if self.rank == source:
            assert tensor is not None
            if tensor.numel():
                dist.send(_bytes(tensor.detach().cpu()), self.members[target], group=self.host_group)
        elif self.rank == target:
            assert into is not None
            room = torch.empty(into.shape, dtype=into.dtype)
            if room.numel():
                dist.recv(_bytes(room), self.members[source], group=self.host_group)
            fill(into, room.to(into.device))

    def move_object(self, value: Any, source: int, target: int) -> Any:
        """Send `value` from process `source` to process `target`, which returns it. All other processes,
        including the source, return None. Large tensors do not pass through a pickle."""
        if source == target:
            return value if self.rank == target else None
        group = self.host_group
        if self.rank == source:
            outline, tensors = outlined(value)
            dist.send_object_list([outline], self.members[target], group=group)
            for tensor in tensors:
                dist.send(_bytes(tensor), self.members[target], group=group)
        elif self.rank == target:
            box: list[Any] = [None]
            dist.recv_object_list(box, self.members[source], group=group)
            moved, tensors = of_outline(box[0])
            for tensor in tensors:
                dist.recv(_bytes(tensor), self.members[source], group=group)
            return moved
        return None

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, in place, and return it. Collective."""
        if self.size > 1:
            dist.all_reduce(value, group=self.device_group)
        return value

    def share(self, tensor: torch.Tensor) -> None:
        """Copy the tensor of rank 0 into the tensors of all processes. Collective."""
        if self.size > 1:
            sent = _bytes(tensor.detach())
            dist.broadcast(sent, src=self.members[RANK_ZERO], group=self.device_group)
            fill(tensor, sent.view(tensor.dtype).view(tensor.shape))

    def over_replicas(self, value: torch.Tensor, how: Any) -> torch.Tensor:
        """Return the mean, sum, maximum or minimum over the replicas, each of which counts once.
        Collective.

        Args:
            value: This process's value. It is not changed.
            how: "mean", "avg", "sum", "max", "min", the operation in torch.distributed, or None for the mean.

        Returns:
            With one replica, `value` itself; otherwise a new tensor on the device of `value`.

        Raises:
            PiperError: There are several replicas, and `how` is another operation.
        """
        if self.count == 1:
            return value
        op = dist.ReduceOp.SUM if how in _MEANS else _SUMS.get(how, how)
        if op not in _SUMS.values():
            raise PiperError(
                f"values cannot be reduced over replicas by {how!r}. Give one of 'mean', 'sum', 'max' and "
                "'min' [PIPER-C007]"
            )
        total = value.detach().clone().to(self.device)
        if op == dist.ReduceOp.SUM and self.rank not in self.first_ranks:
            total.zero_()
        dist.all_reduce(total, op=op, group=self.device_group)
        return (total / self.count if how in _MEANS else total).to(value.device)

    def decide(self, decision: bool, all: bool) -> bool:
        """Return whether the decision is true on all processes (with `all`), or on any process."""
        if self.size == 1:
            return decision
        flag = torch.tensor(int(decision))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=self.host_group)
        return bool(flag)


class SoleWorld(World):
    """The processes of a run, if only this process takes part in collectives. A collective returns the result that it
    would return if all processes passed the value of this process."""

    is_sole = True

    def broadcast(self, value: T, source: int = RANK_ZERO) -> T:
        return value

    def gather(self, value: T, ranks: Sequence[int] | None = None) -> list[T]:
        return [value] * (self.size if ranks is None else len(ranks))

    def on_rank_zero(self, work: Callable[[], T], share: bool = True) -> T | None:
        return work()

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return value.mul_(self.size)

    def over_replicas(self, value: torch.Tensor, how: Any) -> torch.Tensor:
        return value * self.count if _SUMS.get(how, how) == dist.ReduceOp.SUM else value.clone()

    def decide(self, decision: bool, all: bool) -> bool:
        return decision


def _groups() -> dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]:
    """Return the groups that belong to the current default group."""
    global _host
    default = dist.group.WORLD
    assert default is not None
    if _host is None or _host[0] is not default:
        _host = (default, {})
    return _host[1]


def together(world: World, doing: str, work: Callable[[], T]) -> list[T]:
    """Run `work` on every process and return all results by rank. If it fails on a process, all processes
    raise the same error. Collective.

    Args:
        doing: A description of the work for the error, such as "saving a.ckpt".
        work: The function to run.

    Raises:
        PiperError: An error of the class that the first failing rank raised. Other exceptions become a
            PiperError that names them.
    """
    value: Any = None
    failure: tuple[type[PiperError], str] | None = None
    cause: Exception | None = None
    try:
        value = work()
    except PiperError as error:
        failure, cause = (type(error), str(error)), error
    except Exception as error:
        failure = (
            PiperError,
            f"{doing} failed on rank {world.members[world.rank]}: {type(error).__name__}: {error} [PIPER-L001]",
        )
        cause = error
    outcomes = world.gather((value, failure))
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            kind, text = failed
            raise of_rank(world.members[rank], kind(text)) from cause
    return [value for value, _ in outcomes]


def end_groups_at_exit(default: bool) -> None:
    """Destroy the groups of this module before this process ends, because their threads must not release
    tensors while the interpreter shuts down.

    Args:
        default: Whether to destroy the default group also, and with it all groups.
    """
    global _ends_default
    _ends_default |= default
    atexit.unregister(keep_all_groups)
    atexit.unregister(_end_groups)
    atexit.register(_end_groups)


def leave_groups_at_exit() -> None:
    """Keep the groups at exit, because the run has failed.

    Destroying a group, or letting the interpreter release it, would wait for messages that no process will
    send.
    """
    atexit.unregister(_end_groups)
    atexit.register(keep_all_groups)


def _end_groups() -> None:
    made = {} if _host is None or _host[0] is not dist.group.WORLD else _host[1]
    if dist.is_initialized() and _ends_default:
        dist.destroy_process_group()
    else:
        for group in made.values():
            dist.destroy_process_group(group)


def store_of_attempt(host: str, port: int, timeout: timedelta) -> dist.Store | None:
    """Return a separate store for the processes of a run on one machine that torchrun has restarted.

    torchrun keeps its store through restarts, including the addresses of the processes that are gone (torch
    2.13). The result is None if torchrun has not restarted the run, or does not share its store. On several
    machines, the result is also None, because torchrun's count of restarts differs between machines. There,
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 makes torchrun use new stores.

    Args:
        host: Address of rank 0.
        port: Port of rank 0.
        timeout: Timeout of communication.
    """
    environ = os.environ
    attempt, one_node = environ.get("TORCHELASTIC_RESTART_COUNT", "0"), environ.get("GROUP_WORLD_SIZE") == "1"
    if attempt == "0" or not one_node or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"attempt {attempt}", store)


def described(error: Exception) -> str:
    """Return the error's text for other processes. The text begins with the error's type, unless it is a
    PiperError, because other messages often mean little without the type."""
    return str(error) if isinstance(error, PiperError) else f"{type(error).__name__}: {error}"


def of_rank(rank: int, error: PiperError) -> PiperError:
    """Return an error that all processes raise, after setting its `rank` to the process that failed."""
    error.rank = rank
    return error


def on_host(value: Any) -> Any:
    """Return a value with all tensors in host memory, because the receiver may not have the sender's device.

    The value may contain mappings, lists and tuples. Their copies have the same classes, or are a dict, a
    list or a tuple if the class cannot be copied or pickled. Other objects are returned unchanged, with the
    tensors in them.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return _like(value, [on_host(v) for v in value.values()])
    if isinstance(value, list | tuple):
        return _like(value, [on_host(v) for v in value])
    return value


def _like(value: Any, contents: list[Any]) -> Any:
    """Return a copy of a container with other contents. The copy can be pickled if its contents can."""
    if type(value) not in (dict, list, tuple):
        try:
            pickle.dumps(container_like(value, [None] * len(contents)))
            return container_like(value, contents)
        except Exception:  # raised by the user's class, or by a function that cannot be pickled
            pass
    if isinstance(value, Mapping):
        return dict(zip(value, contents, strict=True))
    return contents if isinstance(value, list) else tuple(contents)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
