"""What the values of a step need on one device, over virtual time.

A value's bytes are those of its tensors' specs. It is there from the start of the instruction that makes it (a received one: of
the transfer) to the end of the last that reads it; what was sent, until its send is waited for; gradients and buffers that are
handed out, to the end of the step. Bundles are counted one by one, so memory that two of them share counts twice.

Kinds of values: `activations` (what passes hand to each other and save for their backward), `gradients`, `gathered` (parameters
brought together from shards), `other` (metrics, new values of buffers); and `host`: what waits in the memory of the host, which
counts for itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind, Slice
from lightning_piper.plan.instructions import Add, Deliver, HostCopy, Instruction, Irecv, Send, WaitSend
from lightning_piper.plan.plan import Plan
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.engine import Trace

Curve = tuple[tuple[Number, int], ...]  # (time, value from then on), of one moment possibly several in their order
KINDS = ("activations", "gradients", "gathered", "other", "host")
_KIND_OF = {Kind.ACTIVATION: "activations", Kind.SAVED: "activations", Kind.COTANGENT: "activations", Kind.GRAD: "gradients",
            Kind.PARAM: "gathered"}  # fmt: skip
_Moment = tuple[Number, int, int]  # time; instruction; 0 for its start, 1 for its end


@dataclass(slots=True)
class _Held:
    """A value that is there. `holders`: the slot, and sends that are not waited for. `until`: when its last user so far is done."""

    nbytes: int
    kind: str
    part: Slice | None  # the microbatch, of what a forward pass saved for its backward pass
    holders: int = 1
    until: _Moment = (0, 0, 0)


_Change = tuple[_Moment, int, _Held]  # 1 where the value comes to be, -1 where it goes


def curves(dag: TrainingDAG, plan: Plan, trace: Trace) -> tuple[Curve, dict[str, Curve], Curve]:
    """Bytes of values, the same by kind, and microbatches whose activations are kept for their backward pass, over time."""
    held: dict[int, _Held] = {}
    sent: dict[int, _Held] = {}  # send -> what it keeps
    changes: list[_Change] = []

    def use(value: _Held, moment: _Moment, last: bool) -> None:
        # The last reader need not be the one that is done last: another may run longer on another stream.
        value.until = max(value.until, moment)
        value.holders -= last
        if not value.holders:
            changes.append((value.until, -1, value))

    for i, instruction in enumerate(plan.instructions):
        start, end = trace.times[plan.device][i]
        if isinstance(instruction, Irecv):
            start = trace.exchanges[plan.device, instruction.node][0]
        for k, slot in enumerate(instruction.writes):
            if slot is not None and slot not in held:  # a sum in place and a completed receive are there already
                held[slot] = _Held(_nbytes(dag, instruction, k, held), _kind(dag, instruction, k), _kept(dag, instruction, k))
                changes.append(((start, i, 0), 1, held[slot]))
        for read in instruction.reads:
            value = held[read.slot]
            if isinstance(instruction, Send | Deliver):
                value.holders += 1
            if isinstance(instruction, Send):
                sent[instruction.node] = value
            use(value, (end, i, 1), read.last)
        if isinstance(instruction, WaitSend):
            use(sent[instruction.node], (end, i, 1), last=True)
    changes.sort(key=lambda change: change[0])
    by_kind = {kind: _bytes_over_time([c for c in changes if c[2].kind == kind]) for kind in KINDS}
    return _bytes_over_time([c for c in changes if c[2].kind != "host"]), by_kind, _in_flight_over_time(changes)


def _nbytes(dag: TrainingDAG, instruction: Instruction, k: int, held: dict[int, _Held]) -> int:
    """Of the k-th value that the instruction writes."""
    tensors = getattr(instruction, "tensors", None)
    if tensors is not None and len(instruction.writes) == 1:
        return sum(spec.nbytes for spec in tensors)
    if isinstance(instruction, Add) and instruction.bucket is not None:
        return instruction.bucket.whole.nbytes
    if isinstance(instruction, Add):
        return held[instruction.reads[0].slot].nbytes
    return dag.value((instruction.node, k)).nbytes


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


def _bytes_over_time(changes: list[_Change]) -> Curve:
    points: list[tuple[_Moment, int]] = []
    total = 0
    for moment, sign, value in changes:
        total += sign * value.nbytes
        _point(points, moment, total)
    return ((0, 0), *((moment[0], level) for moment, level in points))


def _in_flight_over_time(changes: list[_Change]) -> Curve:
    points: list[tuple[_Moment, int]] = []
    live: Counter[Slice] = Counter()
    for moment, sign, value in changes:
        if value.part is not None:
            live[value.part] += sign
            if not live[value.part]:
                del live[value.part]
            _point(points, moment, len(live))
    return ((0, 0), *((moment[0], level) for moment, level in points))


def _point(points: list[tuple[_Moment, int]], moment: _Moment, level: int) -> None:
    """What begins (or ends) with one instruction is one change."""
    if points and points[-1][0] == moment:
        points.pop()
    points.append((moment, level))
