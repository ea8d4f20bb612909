"""What the values of a step need on one device, over virtual time.

Memory is counted by storages: tensors that share one count once, in whatever values they are. A storage is there from the start
of the instruction that makes it (a received one: from when its receive is posted) to the end of the last that reads a value on
it; what was sent, until its send is waited for; gradients and buffers that are handed out, to the end of the step. All of it not
before the pass is done that the plan has before it. What lies on parameters, buffers of the module or the batch needs nothing.

While a pass runs, the curve is what is there in the moment in which most is (`footprint`): what it lets go of before does not
count, nor what it makes later; what it makes for itself alone is `workspace`. So it is while two bundles of gradients are added.

Kinds of values: `activations` (what passes hand to each other and save for their backward), `gradients`, `gathered` (parameters
brought together from shards), `workspace`, `other` (metrics, new values of buffers); and `host`: what waits in the memory of the
host, which counts for itself.
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
    AllGather,
    AllReduce,
    Deliver,
    HostCopy,
    Instruction,
    ReduceScatter,
    Run,
    Send,
    WaitSend,
)
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.engine import Trace
from lightning_piper.simulate.footprint import Footprint, footprint

Curve = tuple[tuple[Number, int], ...]  # (time, value from then on), of one moment possibly several in their order
KINDS = ("activations", "gradients", "gathered", "workspace", "other", "host")
_KIND_OF = {Kind.ACTIVATION: "activations", Kind.SAVED: "activations", Kind.COTANGENT: "activations", Kind.GRAD: "gradients",
            Kind.PARAM: "gathered"}  # fmt: skip
_Moment = tuple[Number, int, int]  # time; instruction; 0 for its start, 1 for its end


@dataclass(slots=True, eq=False)
class _Storage:
    """Memory. `values`: how many that are there lie on it. `until`: when the last user so far of one of them is done."""

    nbytes: int
    kind: str
    values: int = 0
    until: _Moment = (0, 0, 0)


_Storages = tuple[_Storage, ...]  # of each tensor of a value


@dataclass(slots=True)
class _Held:
    """A value that is there. `holders`: the slot, and sends that are not waited for. `until`: when its last user so far is done."""

    storages: _Storages
    part: Slice | None  # the microbatch, of what a forward pass saved for its backward pass
    holders: int = 1
    until: _Moment = (0, 0, 0)


def curves(dag: TrainingDAG, plan: Plan, trace: Trace) -> tuple[Curve, dict[str, Curve], Curve]:
    """Bytes of values, the same by kind, and microbatches whose activations are kept for their backward pass, over time."""
    account = _Account(dag)
    worked: Number = 0
    for i, instruction in enumerate(plan.instructions):
        start, end = trace.times[plan.device][i]
        # Other streams may run ahead of what computes; memory is taken, and let go of, in the order of the plan.
        worked = max(worked, end) if isinstance(instruction, Run) else worked
        start, end = (start, end) if isinstance(instruction, Run) else (max(start, worked), max(end, worked))
        account.enter(instruction, (start, i, 0), (end, i, 1))
    changes = sorted(account.changes, key=lambda change: change[0])
    by_kind = {kind: _bytes_over_time(change for change in changes if change[2] == kind) for kind in KINDS}
    of_device = (change for change in changes if change[2] != "host")
    return _bytes_over_time(of_device), by_kind, _in_flight_over_time(sorted(account.kept, key=lambda change: change[0]))


class _Account:
    """What comes and goes with the instructions of one device.

    Attributes:
        changes: of bytes, and their kind.
        kept: microbatches of which something saved comes (1) or goes (-1).
    """

    def __init__(self, dag: TrainingDAG) -> None:
        self._dag = dag
        self._held: dict[int, _Held] = {}
        self._sent: dict[int, _Held] = {}  # send -> what it keeps
        self._summed: dict[int, _Storages] = {}  # slot of a shard that is on its way -> the bucket that it comes from
        self.changes: list[tuple[_Moment, int, str]] = []
        self.kept: list[tuple[_Moment, int, Slice]] = []

    def enter(self, instruction: Instruction, start: _Moment, end: _Moment) -> None:
        work = _Work(self._dag, instruction, self._held) if isinstance(instruction, Run) else None
        for k, slot in enumerate(instruction.writes):
            if slot in self._held:  # a sum in place and a completed receive are there already
                self._let_go(self._summed.pop(slot, ()), end)
            elif slot is not None:
                storages = self._made(instruction, k) if work is None else work.made(k, _kind(self._dag, instruction, k))
                self._held[slot] = _Held(storages, _kept(self._dag, instruction, k))
                self._come(storages, start)
                if (part := self._held[slot].part) is not None:
                    self.kept.append((start, 1, part))
        if isinstance(instruction, ReduceScatter):
            bucket = self._summed[instruction.into] = self._held[instruction.reads[0].slot].storages
            self._come(bucket, start)
        gone: list[_Storage] = []
        for read in instruction.reads:
            value = self._held[read.slot]
            if isinstance(instruction, Send | Deliver):
                value.holders += 1
            if isinstance(instruction, Send):
                self._sent[instruction.node] = value
            gone += self._use(value, end, read.last)
        if isinstance(instruction, WaitSend):
            self._use(self._sent[instruction.node], end, last=True)
        if work is not None:
            self._at_most(*work.most([storage for storage in gone if storage.until == end]), start, end)
        elif isinstance(instruction, Add) and not instruction.in_place and instruction.bucket is None:
            total = self._held[instruction.into].storages
            most = _most_of_sum([storage.nbytes for storage in total], sum(storage.nbytes for storage in gone))
            self._at_most(0, [(total[0].kind, most)], start, end)

    def _come(self, storages: _Storages, moment: _Moment) -> None:
        for storage in dict.fromkeys(storages):
            if not storage.values:
                self.changes.append((moment, storage.nbytes, storage.kind))
            storage.values += 1

    def _use(self, value: _Held, moment: _Moment, last: bool) -> list[_Storage]:
        """Gives the storages on which nothing lies any more."""
        # The last reader need not be the one that is done last: another may run longer on another stream.
        value.until = max(value.until, moment)
        value.holders -= last
        if value.holders:
            return []
        if value.part is not None:
            self.kept.append((value.until, -1, value.part))
        return self._let_go(value.storages, value.until)

    def _let_go(self, storages: _Storages, moment: _Moment) -> list[_Storage]:
        gone = []
        for storage in dict.fromkeys(storages):
            storage.until = max(storage.until, moment)
            storage.values -= 1
            if not storage.values:
                self.changes.append((storage.until, -storage.nbytes, storage.kind))
                gone.append(storage)
        return gone

    def _at_most(self, workspace: int, absent: Iterable[tuple[str, int]], start: _Moment, end: _Moment) -> None:
        """While an instruction runs, the curve has what is there when most is."""
        for kind, nbytes in (("workspace", -workspace), *absent):
            if nbytes:
                self.changes.append((start, -nbytes, kind))
                self.changes.append((end, nbytes, kind))

    def _made(self, instruction: Instruction, k: int) -> _Storages:
        """What the tensors of the k-th value that the instruction writes lie on."""
        kind = _kind(self._dag, instruction, k)
        if isinstance(instruction, AllReduce) and instruction.bucket is not None and [r.last for r in instruction.reads] == [True]:
            return self._held[instruction.reads[0].slot].storages  # summed in place
        if isinstance(instruction, AllGather):
            assert instruction.bucket is not None
            nbytes = sum(spec.nbytes for spec in instruction.tensors)
            return (_Storage(nbytes, kind),) * len(instruction.bucket.names)
        if isinstance(instruction, HostCopy):  # what shared memory shares it again; what was not the step's own is a copy now
            lies = self._held[instruction.reads[0].slot].storages
            copies = {x: _Storage(x.nbytes or spec.nbytes, kind) for x, spec in zip(lies, instruction.tensors, strict=True)}
            return tuple(copies[x] for x in lies)
        tensors = getattr(instruction, "tensors", None)
        if tensors is not None and len(instruction.writes) == 1:
            return tuple(_Storage(spec.nbytes, kind) for spec in tensors)
        if isinstance(instruction, Add) and instruction.bucket is not None:
            return (_Storage(instruction.bucket.whole.nbytes, kind),)
        if isinstance(instruction, Add):
            # Of gradients that share memory, each has a sum of its own.
            return tuple(
                _Storage(spec.nbytes, kind) for spec in self._dag.value(self._dag.nodes[instruction.node].inputs[0]).tensors
            )
        return tuple(_Storage(spec.nbytes, kind) for spec in self._dag.value((instruction.node, k)).tensors)


class _Work:
    """A pass: its arguments, what it makes, and what is there at once."""

    def __init__(self, dag: TrainingDAG, run: Run, held: dict[int, _Held]) -> None:
        code, interface = dag.code_at(run.key, run.samples), dag.code.interface_of(run.key)
        self._found: Footprint = footprint(code)
        read = [held[each.slot].storages for each in run.reads]
        self._arguments: list[_Storage | None] = [storage for storages in read[: run.inputs] for storage in storages]
        params = run.params or (None,) * len(interface.params)
        state = run.state or (None,) * len(interface.state)
        for place in (*params, *(None,) * len(interface.buffers), *state):
            self._arguments.append(None if place is None else read[place[0]][place[1]])
        self._arguments += [None] * (len(code.inputs) - len(self._arguments))  # the batch, and gradients of the loss
        self._made: dict[int, _Storage] = {}

    def made(self, k: int, kind: str) -> _Storages:
        """What its k-th output lies on."""
        return tuple(self._storage(number, kind) for number in self._found.outputs[k])

    def _storage(self, number: int, kind: str) -> _Storage:
        if number < len(self._arguments):
            return self._arguments[number] or _Storage(0, kind)
        if number not in self._made:
            self._made[number] = _Storage(self._found.nbytes[number], kind)
        return self._made[number]

    def most(self, gone: Sequence[_Storage]) -> tuple[int, list[tuple[str, int]]]:
        """When most is there: bytes that it has for itself alone; and what is not there of what it makes or lets go of, by kind."""
        group = {storage: i for i, storage in enumerate(gone)}
        given = [None if storage is None else group.get(storage) for storage in self._arguments]
        peak = self._found.peak(given, tuple(storage.nbytes for storage in gone))
        there = [storage for i, storage in enumerate(gone) if i in peak.groups]
        there += [storage for number, storage in self._made.items() if number in peak.results]
        absent = [x for x in (*gone, *self._made.values()) if x not in there]
        return peak.nbytes - sum(storage.nbytes for storage in there), [(storage.kind, storage.nbytes) for storage in absent]


def _most_of_sum(total: Sequence[int], freed: int) -> int:
    """Bytes of a sum of bundles that are not there yet when most is: each pair of terms goes when it has been added."""
    each = freed // sum(total) if sum(total) else 0  # how many of the two terms nobody else holds
    made, most = 0, 0
    for nbytes in total:
        most = max(most, made + nbytes - each * made)
        made += nbytes
    return made - most


def _kind(dag: TrainingDAG, instruction: Instruction, k: int) -> str:
    if isinstance(instruction, HostCopy) and instruction.to_host:
        return "host"
    node = dag.nodes[instruction.node]
    # A sum that belongs to no value of its own is one of what its node reads.
    value = node.outputs[k] if k < len(node.outputs) else dag.value(node.inputs[0])
    return _KIND_OF.get(value.kind, "other")


def _kept(dag: TrainingDAG, instruction: Instruction, k: int) -> Slice | None:
    node = dag.nodes[instruction.node]
    if isinstance(node, Chunk) and node.kind == "F" and node.outputs[k].kind == Kind.SAVED:
        return node.slice
    return None


def _bytes_over_time(changes: Iterable[tuple[_Moment, int, str]]) -> Curve:
    points: list[tuple[_Moment, int]] = []
    total = 0
    for moment, nbytes, _ in changes:
        total += nbytes
        _point(points, moment, total)
    return ((0, 0), *((moment[0], level) for moment, level in points))


def _in_flight_over_time(kept: Iterable[tuple[_Moment, int, Slice]]) -> Curve:
    points: list[tuple[_Moment, int]] = []
    live: Counter[Slice] = Counter()
    for moment, sign, part in kept:
        live[part] += sign
        if not live[part]:
            del live[part]
        _point(points, moment, len(live))
    return ((0, 0), *((moment[0], level) for moment, level in points))


def _point(points: list[tuple[_Moment, int]], moment: _Moment, level: int) -> None:
    """What begins (or ends) with one instruction is one change."""
    if points and points[-1][0] == moment:
        points.pop()
    points.append((moment, level))
