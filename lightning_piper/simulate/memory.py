"""The memory of a step's values on one device, over virtual time.

Memory is counted by storages: tensors that share a storage count once, in any number of values. A storage is
allocated from the start of the instruction that makes it, or from the post of its receive. It is freed at the
end of the last instruction that reads a value on it. A sent value is freed when its send has been awaited.
Values that the step outputs, such as gradients, stay until the end of the step. Memory changes in the order
of the plan: an instruction after a pass changes it only when this pass has ended. Values on parameters, the
module's buffers or the batch need no memory.

While a pass runs, the curve shows the memory at the peak of the pass (`footprint`). It excludes inputs that
the pass frees before the peak, and outputs that it makes later. Memory that only the pass itself uses is
`workspace`. While an instruction adds two bundles of gradients, the curve shows the memory at the peak of the
addition.

The kinds of values are `activations` (values that passes exchange or save for backward), `gradients`,
`gathered` (parameters gathered from shards), `workspace`, `other` (metrics, new values of buffers and of
parameters) and `host`. Values of kind `host` lie in host memory and are counted separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.plan.instructions import (
    Add,
    AllGatherInstruction,
    AllReduceInstruction,
    Deliver,
    EarlyUpdateInstruction,
    HostCopy,
    Instruction,
    ReduceScatterInstruction,
    Run,
    SendInstruction,
    WaitSend,
)
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.engine import Trace
from lightning_piper.simulate.footprint import Footprint, footprint

# (time, value from this time on). Of several entries with one time, the last one holds from this time on.
Curve = tuple[tuple[Number, int], ...]
KINDS = ("activations", "gradients", "gathered", "workspace", "other", "host")
_KIND_OF = {  # the kind of a value that is not on the host; other kinds of the DAG are "other"
    Kind.ACTIVATION: "activations",
    Kind.SAVED: "activations",
    Kind.COTANGENT: "activations",
    Kind.GRAD: "gradients",
    Kind.PARAM: "gathered",
}
_Moment = tuple[Number, int, int]  # (time, index of the instruction, 0 for its start or 1 for its end)


@dataclass(slots=True, eq=False)
class _Storage:
    """One storage.

    Attributes:
        nbytes: The number of bytes. The storage of a tensor that exists before the step, such as the device's
            own parameter, counts 0 bytes.
        kind: One of `KINDS`.
        values: The number of live values on the storage.
        until: The latest end so far of an instruction that used a value on it.
    """

    nbytes: int
    kind: str
    values: int = 0
    until: _Moment = (0, 0, 0)


_Storages = tuple[_Storage, ...]  # one for each tensor of a value


@dataclass(slots=True)
class _LiveValue:
    """A live value.

    Attributes:
        storages: The storage of each tensor of the value.
        part: The microbatch, if a forward pass saved the value for its backward pass. Otherwise None.
        holders: The number of its holders: its slot, each send that has not been awaited, and the step's
            outputs.
        until: The latest end so far of an instruction that used the value.
    """

    storages: _Storages
    part: Slice | None
    holders: int = 1
    until: _Moment = (0, 0, 0)


def curves(dag: TrainingDAG, plan: Plan, trace: Trace) -> tuple[Curve, dict[str, Curve], Curve]:
    """Return three results for one device: the curve of the bytes in its own memory, the curve of each of
    `KINDS`, and the curve of the number of microbatches in flight.

    A microbatch is in flight while activations are saved for its backward pass.
    """
    account = _Account(dag)
    worked: Number = 0  # the latest end of a pass so far
    for i, instruction in enumerate(plan.instructions):
        start, end = trace.times[plan.device][i]
        # Other streams may run ahead of the compute stream, but memory is allocated and freed in the order of
        # the plan.
        worked = max(worked, end) if isinstance(instruction, Run) else worked
        start, end = (start, end) if isinstance(instruction, Run) else (max(start, worked), max(end, worked))
        account.enter(instruction, (start, i, 0), (end, i, 1))
    changes = sorted(account.changes, key=lambda change: change[0])
    by_kind = {kind: _bytes_over_time(change for change in changes if change[2] == kind) for kind in KINDS}
    of_device = (change for change in changes if change[2] != "host")
    return (
        _bytes_over_time(of_device),
        by_kind,
        _in_flight_over_time(sorted(account.kept, key=lambda change: change[0])),
    )


class _Account:
    """The allocations and frees of one device's instructions.

    Attributes:
        changes: (moment, change in bytes, kind).
        kept: (moment, 1 or -1, microbatch) when a saved value is allocated or freed.
    """

    def __init__(self, dag: TrainingDAG) -> None:
        self._dag = dag
        self._held: dict[int, _LiveValue] = {}  # slot -> its value
        self._sent: dict[int, _LiveValue] = {}  # node of a send -> the value that it holds
        # Slot of a running collective -> the storages that are freed when it is complete: the bucket that a
        # reduce-scatter reads, the rounded shard and bucket of a gather.
        self._passing: dict[int, _Storages] = {}
        # Slot of a running gather of rounded parameters -> the storages that are made when it is complete.
        self._later: dict[int, _Storages] = {}
        self.changes: list[tuple[_Moment, int, str]] = []
        self.kept: list[tuple[_Moment, int, Slice]] = []

    def enter(self, instruction: Instruction, start: _Moment, end: _Moment) -> None:
        """Record the values that an instruction makes, uses and frees between the moments `start` and
        `end`."""
        work = _PassMemory(self._dag, instruction, self._held) if isinstance(instruction, Run) else None
        for k, slot in enumerate(instruction.writes):
            if slot in self._held:  # a sum in place, or the end of an exchange: the slot has its storages
                self._come(self._later.pop(slot, ()), (end[0], end[1], 0))
                self._let_go(self._passing.pop(slot, ()), end)
            elif slot is not None:
                storages = (
                    self._made(instruction, k)
                    if work is None
                    else work.made(k, _kind(self._dag, instruction, k))
                )
                self._held[slot] = _LiveValue(storages, _kept(self._dag, instruction, k))
                if isinstance(instruction, AllGatherInstruction) and instruction.passing:
                    self._later[slot] = storages
                    storages = tuple(_Storage(spec.nbytes, "gathered") for spec in instruction.passing)
                    self._passing[slot] = storages
                self._come(storages, start)
                if (part := self._held[slot].part) is not None:
                    self.kept.append((start, 1, part))
        if isinstance(instruction, EarlyUpdateInstruction):
            self.changes.append((start, instruction.nbytes, "other"))
        # The bucket stays until the reduce-scatter is complete, even if its slot is freed before.
        if isinstance(instruction, ReduceScatterInstruction):
            bucket = self._passing[instruction.into] = self._held[instruction.reads[0].slot].storages
            self._come(bucket, start)
        gone: list[_Storage] = []
        for read in instruction.reads:
            value = self._held[read.slot]
            if isinstance(instruction, SendInstruction | Deliver):
                value.holders += 1
            if isinstance(instruction, SendInstruction):
                self._sent[instruction.node] = value
            gone += self._use(value, end, read.last)
        if isinstance(instruction, WaitSend):
            self._use(self._sent[instruction.node], end, last=True)
        if work is not None:
            self._at_most(*work.most([storage for storage in gone if storage.until == end]), start, end)
        elif isinstance(instruction, Add) and not instruction.in_place and instruction.bucket is None:
            total = self._held[instruction.into].storages
            most = _most_of_sum(
                [storage.nbytes for storage in total], sum(storage.nbytes for storage in gone)
            )
            self._at_most(0, [(total[0].kind, most)], start, end)

    def _come(self, storages: _Storages, moment: _Moment) -> None:
        """Record that one more value lies on these storages. A storage without values until now is allocated
        at `moment`."""
        for storage in dict.fromkeys(storages):
            if not storage.values:
                self.changes.append((moment, storage.nbytes, storage.kind))
            storage.values += 1

    def _use(self, value: _LiveValue, moment: _Moment, last: bool) -> list[_Storage]:
        """Record that an instruction uses a value until `moment`. With `last`, one holder releases the value.
        Return the storages that are freed if this was the last holder."""
        # The last reader in the plan need not end last, because an earlier reader on another stream may run
        # longer.
        value.until = max(value.until, moment)
        value.holders -= last
        if value.holders:
            return []
        if value.part is not None:
            self.kept.append((value.until, -1, value.part))
        return self._let_go(value.storages, value.until)

    def _let_go(self, storages: _Storages, moment: _Moment) -> list[_Storage]:
        """Record that these storages have one value less. Free and return the storages without a value."""
        gone = []
        for storage in dict.fromkeys(storages):
            storage.until = max(storage.until, moment)
            storage.values -= 1
            if not storage.values:
                self.changes.append((storage.until, -storage.nbytes, storage.kind))
                gone.append(storage)
        return gone

    def _at_most(
        self, workspace: int, absent: Iterable[tuple[str, int]], start: _Moment, end: _Moment
    ) -> None:
        """Lower the curve during an instruction to the memory at the instruction's peak.

        Args:
            workspace: Bytes that the instruction itself adds at its peak.
            absent: Kind and bytes of values that the curve counts but that are not in memory at the peak.
            start: The start of the instruction.
            end: The end of the instruction.
        """
        for kind, nbytes in (("workspace", -workspace), *absent):
            if nbytes:
                self.changes.append((start, -nbytes, kind))
                self.changes.append((end, nbytes, kind))

    def _made(self, instruction: Instruction, k: int) -> _Storages:
        """Return the storages of the k-th value that the instruction writes."""
        kind = _kind(self._dag, instruction, k)
        if (
            isinstance(instruction, AllReduceInstruction)
            and instruction.bucket is not None
            and [r.last for r in instruction.reads] == [True]
        ):
            return self._held[instruction.reads[0].slot].storages  # summed in place
        if isinstance(instruction, AllGatherInstruction):
            assert instruction.bucket is not None
            nbytes = sum(spec.nbytes for spec in instruction.tensors)
            return (_Storage(nbytes, kind),) * len(instruction.bucket.names)
        # Tensors on one storage have one copy. The copy of a parameter needs memory, although the parameter
        # itself counts 0 bytes.
        if isinstance(instruction, HostCopy):
            lies = self._held[instruction.reads[0].slot].storages
            copies = {
                x: _Storage(x.nbytes or spec.nbytes, kind)
                for x, spec in zip(lies, instruction.tensors, strict=True)
            }
            return tuple(copies[x] for x in lies)
        tensors = getattr(instruction, "tensors", None)
        if tensors is not None and len(instruction.writes) == 1:
            return tuple(_Storage(spec.nbytes, kind) for spec in tensors)
        if isinstance(instruction, Add) and instruction.bucket is not None:
            return (_Storage(instruction.bucket.whole.nbytes, kind),)
        if isinstance(instruction, Add):
            # Gradients that share memory have separate sums.
            return tuple(
                _Storage(spec.nbytes, kind)
                for spec in self._dag.value(self._dag.nodes[instruction.node].inputs[0]).tensors
            )
        return tuple(_Storage(spec.nbytes, kind) for spec in self._dag.value((instruction.node, k)).tensors)


class _PassMemory:
    """A pass: its arguments, its outputs, and its peak memory."""

    def __init__(self, dag: TrainingDAG, run: Run, held: dict[int, _LiveValue]) -> None:
        """Find the storages of the pass's arguments. `held` has the value of each slot that the pass
        reads."""
        # The storage of each argument of the code, in the order of the code's inputs. The code's own storages
        # are numbered after them. None: an argument that is not counted, such as the device's own parameter.
        code, interface = dag.code_at(run.key, run.samples), dag.code.interface_of(run.key)
        self._found: Footprint = footprint(code)
        read = [held[each.slot].storages for each in run.reads]
        self._arguments: list[_Storage | None] = [
            storage for storages in read[: run.inputs] for storage in storages
        ]
        params = run.params or (None,) * len(interface.params)
        state = run.state or (None,) * len(interface.state)
        for source in (*params, *(None,) * len(interface.buffers), *state):
            self._arguments.append(None if source is None else read[source[0]][source[1]])
        # The remaining arguments are the batch and the gradients of the loss, which have no storage here.
        self._arguments += [None] * (len(code.inputs) - len(self._arguments))
        self._made: dict[int, _Storage] = {}

    def made(self, k: int, kind: str) -> _Storages:
        """Return the storages of the k-th output of the pass."""
        return tuple(self._storage(number, kind) for number in self._found.outputs[k])

    def _storage(self, number: int, kind: str) -> _Storage:
        """Return the storage with this number in the footprint. If the code makes the storage, it gets this
        kind at the first call."""
        if number < len(self._arguments):
            return self._arguments[number] or _Storage(0, kind)
        if number not in self._made:
            self._made[number] = _Storage(self._found.nbytes[number], kind)
        return self._made[number]

    def most(self, gone: Sequence[_Storage]) -> tuple[int, list[tuple[str, int]]]:
        """Return the pass's workspace at its peak, and the storages that are not in memory at the peak.

        Args:
            gone: Storages of inputs that the pass is the last to use.

        Returns:
            The bytes of the workspace, and kind and bytes of each absent storage. A storage is absent if the
            pass has freed it before the peak, or makes it after the peak.
        """
        group = {storage: i for i, storage in enumerate(gone)}
        given = [None if storage is None else group.get(storage) for storage in self._arguments]
        peak = self._found.peak(given, tuple(storage.nbytes for storage in gone))
        there = [storage for i, storage in enumerate(gone) if i in peak.groups]
        there += [storage for number, storage in self._made.items() if number in peak.results]
        absent = [x for x in (*gone, *self._made.values()) if x not in there]
        return peak.nbytes - sum(storage.nbytes for storage in there), [
            (storage.kind, storage.nbytes) for storage in absent
        ]


def _most_of_sum(total: Sequence[int], freed: int) -> int:
    """Return by how many bytes the peak of an addition of two bundles is below the bytes of both bundles and
    their sum together.

    The tensors are added one after another. After each addition of two tensors, a tensor of a bundle that
    nothing else holds is freed.

    Args:
        total: Bytes of each tensor of the sum.
        freed: Bytes of the bundles that nothing else holds.
    """
    each = freed // sum(total) if sum(total) else 0  # how many of the two bundles the addition frees: 0 to 2
    made, most = 0, 0
    for nbytes in total:
        most = max(most, made + nbytes - each * made)
        made += nbytes
    return made - most


def _kind(dag: TrainingDAG, instruction: Instruction, k: int) -> str:
    """Return the kind of the k-th value that an instruction writes: one of `KINDS`."""
    if isinstance(instruction, HostCopy) and instruction.to_host:
        return "host"
    node = dag.nodes[instruction.node]
    # If the node has no k-th output, the instruction adds inputs of the node. The sum has their kind.
    value = node.outputs[k] if k < len(node.outputs) else dag.value(node.inputs[0])
    return _KIND_OF.get(value.kind, "other")


def _kept(dag: TrainingDAG, instruction: Instruction, k: int) -> Slice | None:
    """Return the microbatch if the instruction is a forward pass and saves its k-th output for backward.
    Otherwise return None."""
    node = dag.nodes[instruction.node]
    if isinstance(node, Chunk) and node.kind == "F" and node.outputs[k].kind == Kind.SAVED:
        return node.slice
    return None


def _bytes_over_time(changes: Iterable[tuple[_Moment, int, str]]) -> Curve:
    """Return the sum of all changes up to each moment. The changes are in order of time."""
    points: list[tuple[_Moment, int]] = []
    total = 0
    for moment, nbytes, _ in changes:
        total += nbytes
        _point(points, moment, total)
    return ((0, 0), *((moment[0], level) for moment, level in points))


def _in_flight_over_time(kept: Iterable[tuple[_Moment, int, Slice]]) -> Curve:
    """Return the number of microbatches with at least one saved value, over time. `kept` is in order of
    time."""
    points: list[tuple[_Moment, int]] = []
    live: Counter[Slice] = Counter()
    for moment, sign, part in kept:
        live[part] += sign
        if not live[part]:
            del live[part]
        _point(points, moment, len(live))
    return ((0, 0), *((moment[0], level) for moment, level in points))


def _point(points: list[tuple[_Moment, int]], moment: _Moment, level: int) -> None:
    """Append a point, or replace the last point if its moment is the same."""
    if points and points[-1][0] == moment:
        points.pop()
    points.append((moment, level))
