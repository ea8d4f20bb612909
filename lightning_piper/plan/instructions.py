"""All instructions of a plan by name. Operations define most instructions. `Record`, `Keep` and `WaitEvent`
are defined here, because no operation has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_piper.ops.chunk import Run, TensorSource
from lightning_piper.ops.communication.all_to_all import AllToAllInstruction
from lightning_piper.ops.communication.bucket import PackInstruction
from lightning_piper.ops.communication.gather import AllGatherInstruction
from lightning_piper.ops.communication.p2p import Irecv, SendInstruction, WaitSend
from lightning_piper.ops.communication.reduce import AllReduceInstruction, ReduceScatterInstruction
from lightning_piper.ops.early_update import EarlyUpdateInstruction
from lightning_piper.ops.host import FetchInstruction, StoreInstruction
from lightning_piper.ops.instruction import Channel, Collective, Group, HostCopy, Instruction, Read, WaitWork
from lightning_piper.ops.metrics import Merge, ReportInstruction
from lightning_piper.ops.samples import ConcatInstruction, CutInstruction
from lightning_piper.ops.update import Add, Deliver

__all__ = [
    "Add",
    "AllGatherInstruction",
    "AllReduceInstruction",
    "AllToAllInstruction",
    "Channel",
    "Collective",
    "ConcatInstruction",
    "CutInstruction",
    "Deliver",
    "EarlyUpdateInstruction",
    "FetchInstruction",
    "Group",
    "HostCopy",
    "Instruction",
    "Irecv",
    "Keep",
    "Merge",
    "PackInstruction",
    "Read",
    "Record",
    "ReduceScatterInstruction",
    "ReportInstruction",
    "Run",
    "SendInstruction",
    "StoreInstruction",
    "TensorSource",
    "WaitEvent",
    "WaitSend",
    "WaitWork",
]


@dataclass(frozen=True, kw_only=True)
class Record(Instruction):
    """An instruction that records an event on its stream, because another stream waits for earlier work of this
    stream (`plan.streams`)."""

    op: ClassVar[str] = "record"
    event: int

    def details(self) -> list[str]:
        return [f"e{self.event}"]


@dataclass(frozen=True, kw_only=True)
class Keep(Instruction):
    """An instruction that keeps a flat gradient until the last batch of an accumulation
    (`plan.no_sync_plan`).
    """

    op: ClassVar[str] = "keep"


@dataclass(frozen=True, kw_only=True)
class WaitEvent(Instruction):
    """An instruction that makes its stream wait for an event.

    Attributes:
        event: Number of the event.
        shared: Slots that another stream made and this stream uses from here on. The instruction records this
            use, so that the allocator does not reuse their memory too early.
    """

    op: ClassVar[str] = "await"
    event: int
    shared: tuple[int, ...]

    def details(self) -> list[str]:
        return [f"e{self.event}", "for", ", ".join(f"s{slot}" for slot in self.shared)]
