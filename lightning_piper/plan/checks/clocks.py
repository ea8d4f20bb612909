"""Streams and memory of one device's plan, proved for every order in which streams can run.

A stream waits only for its own earlier work and for events. A clock says how much of each other stream is
certainly done when a stream reaches its next instruction (Fidge 1988, Mattern 1989). A clock has one entry
for each stream, so the check is linear in instructions times streams. The check shows:

- A value is read after it is made, and only by streams that wait for its maker.
- A value is changed in place, or its memory reused by the next gather, after all readers have read it.
- A whole bucket, gathered or to be reduce-scattered, is in memory of the stream that works with it. The
  stream then frees the bucket and makes the next one in its own order, however far the host is ahead.
- The memory of a value without references is not reused before all streams have read the value. The
  allocator may reuse the memory immediately on the stream that made the value. So each other stream that reads a
  slot records the slot (`WaitEvent.shared`). The outputs of a chunk may be views of its inputs. The check
  covers views because the stream of a chunk records the chunk's inputs.

A send reads its tensors until its `WaitSend`. The `WaitSend` runs on the stream that made the tensors, which
gets the memory back. Step outputs leave on the stream `compute`, because the caller's stream waits for
`compute`.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_piper.ir.buckets import Bucket
from lightning_piper.plan.instructions import (
    AllGatherInstruction,
    AllReduceInstruction,
    Deliver,
    Instruction,
    Record,
    ReduceScatterInstruction,
    ReportInstruction,
    SendInstruction,
    WaitEvent,
    WaitSend,
    WaitWork,
)
from lightning_piper.plan.plan import Plan

Clock = dict[str, int]  # stream -> index of its last instruction that is certainly done


class StreamClocks:
    """A simulation of one device's streams. It records which work is certainly done, and who uses slots."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {}
        self._recorded: dict[int, Clock] = {}  # event -> the clock at its record
        self._made: dict[int, tuple[str, int]] = {}  # slot -> stream and index of its last writer
        self._owner: dict[int, str] = {}  # slot -> stream that made it
        # slot -> for each stream, the index of the stream's last read of the slot
        self._readers: dict[int, Clock] = {}
        # (slot, stream whose use of the slot's memory is recorded)
        self._shared: set[tuple[int, str]] = set()
        self._sending: dict[int, int] = {}  # send -> its slot
        self._gathered: dict[Bucket, int] = {}  # bucket kept between steps -> slot of its last gather
        self._passing: set[int] = set()  # slots of gathered buckets that are freed after use

    def problems(self, i: int, instruction: Instruction) -> Iterator[str]:
        """Issue instruction i on its stream, and yield a text for each problem with streams or memory. Nothing
        is recorded until the caller iterates."""
        stream = instruction.stream
        clock = self._clocks.setdefault(stream, {})
        match instruction:
            case Record():
                self._recorded[instruction.event] = {**clock, stream: i}
            case WaitEvent():
                if instruction.event not in self._recorded:
                    yield f"event e{instruction.event} is awaited before it is recorded"
                    return
                for other, index in self._recorded[instruction.event].items():
                    if index > clock.get(other, -1):
                        clock[other] = index
                self._shared.update((slot, stream) for slot in instruction.shared)
            case WaitSend():
                slot = self._sending.pop(instruction.node, None)
                if slot is not None and self._owner[slot] != stream:
                    made = f"stream {self._owner[slot]} wrote it, and does not wait for the message"
                    yield f"it gives slot s{slot} back on stream {stream}; {made}"
            case Deliver() | ReportInstruction():
                if stream != "compute":
                    yield (
                        f"it delivers a result on stream {stream}, but the caller waits only for stream "
                        "compute"
                    )
        yield from self._reads(i, instruction, clock)
        yield from self._writes(i, instruction, clock)

    def _reads(self, i: int, instruction: Instruction, clock: Clock) -> Iterator[str]:
        """Record the reads of an instruction. Yield the problems of these reads: values that may not be made
        yet, and memory that another stream may reuse too early."""
        stream = instruction.stream
        for read in instruction.reads:
            slot = read.slot
            yield from self._is_made(slot, stream, clock)
            if stream != self._owner[slot] and (slot, stream) not in self._shared:
                made = f"slot s{slot} was written on stream {self._owner[slot]}, which may reuse its memory"
                yield f"{made}: no event wait on stream {stream} records the shared use"
            self._readers.setdefault(slot, {})[stream] = i
            if slot in self._passing and read.last and self._owner[slot] not in self._readers[slot]:
                made = f"slot s{slot}, a gathered bucket, was written on stream {self._owner[slot]}"
                yield (
                    f"{made}, but no instruction on that stream reads it: the next gather does not wait for "
                    "its memory"
                )
        if isinstance(instruction, SendInstruction):
            self._sending[instruction.node] = instruction.reads[0].slot
        elif (
            isinstance(instruction, AllReduceInstruction)
            and instruction.bucket is not None
            and len(instruction.reads) == 1
        ):
            yield from self._is_read(instruction.reads[0].slot, stream, clock)  # summed in place
        elif isinstance(instruction, ReduceScatterInstruction) and stream != (
            made := self._owner[instruction.reads[0].slot]
        ):
            yield (
                f"it sums a bucket that stream {made} wrote, but runs on stream {stream}: the next bucket "
                "does not wait for its memory"
            )
        elif isinstance(instruction, AllGatherInstruction) and not instruction.kept:
            self._passing.add(instruction.into)
        elif isinstance(instruction, AllGatherInstruction):
            assert instruction.bucket is not None
            if instruction.bucket in self._gathered:
                yield from self._is_read(self._gathered[instruction.bucket], stream, clock)
            self._gathered[instruction.bucket] = instruction.into

    def _writes(self, i: int, instruction: Instruction, clock: Clock) -> Iterator[str]:
        """Record the writes of an instruction. Yield the problems of these writes, such as a change of a slot
        that may still be read or sent."""
        stream = instruction.stream
        for slot in instruction.writes:
            if slot is None:
                continue
            if slot in self._made:  # The instruction adds to the slot in place, or completes it by a wait.
                yield from self._is_made(slot, stream, clock)
                yield from self._is_read(slot, stream, clock)
                if isinstance(instruction, WaitWork) and self._owner[slot] != stream:
                    started = f"stream {self._owner[slot]} started it, and gets its memory back"
                    yield f"it is waited for on stream {stream}; {started}"
                if slot in self._sending.values():
                    yield f"slot s{slot} is changed while it is sent"
            self._owner.setdefault(slot, stream)
            self._made[slot] = (stream, i)

    def _is_made(self, slot: int, stream: str, clock: Clock) -> Iterator[str]:
        """Yield a problem if the stream does not wait for the last write of the slot."""
        source, index = self._made[slot]
        if source != stream and clock.get(source, -1) < index:
            yield f"slot s{slot} was written on stream {source}, and no event orders the two"

    def _is_read(self, slot: int, stream: str, clock: Clock) -> Iterator[str]:
        """Yield a problem for each other stream for whose read of the slot the stream does not wait."""
        for reader, index in self._readers.get(slot, {}).items():
            if reader != stream and clock.get(reader, -1) < index:
                yield f"slot s{slot} is changed here, and stream {reader} may not have read it yet"


def problems_of(plan: Plan) -> Iterator[tuple[int, Instruction, str]]:
    """Yield the problems with streams and memory in a plan.

    The caller has checked that the plan writes each slot before it reads the slot.
    """
    streams = StreamClocks()
    for i, instruction in enumerate(plan.instructions):
        for problem in streams.problems(i, instruction):
            yield i, instruction, problem
