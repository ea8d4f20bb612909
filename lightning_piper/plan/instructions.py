"""All instructions of a plan by name: those that operations define, and those that only plans have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_piper.ops.all_to_all import AllToAllInstruction as AllToAll
from lightning_piper.ops.bucket import PackInstruction as Pack
from lightning_piper.ops.chunk import Place, Run
from lightning_piper.ops.gather import AllGatherInstruction as AllGather
from lightning_piper.ops.host import FetchInstruction as Fetch
from lightning_piper.ops.host import StoreInstruction as Store
from lightning_piper.ops.instruction import Channel, Collective, Group, HostCopy, Instruction, Read, WaitWork
from lightning_piper.ops.metrics import Merge
from lightning_piper.ops.metrics import ReportInstruction as Report
from lightning_piper.ops.p2p import Irecv, WaitSend
from lightning_piper.ops.p2p import SendInstruction as Send
from lightning_piper.ops.reduce import AllReduceInstruction as AllReduce
from lightning_piper.ops.reduce import ReduceScatterInstruction as ReduceScatter
from lightning_piper.ops.samples import ConcatInstruction as Concat
from lightning_piper.ops.samples import CutInstruction as Cut
from lightning_piper.ops.update import Add, Deliver

__all__ = [
    "Add",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Channel",
    "Collective",
    "Concat",
    "Cut",
    "Deliver",
    "Fetch",
    "Group",
    "HostCopy",
    "Instruction",
    "Irecv",
    "Keep",
    "Merge",
    "Pack",
    "Place",
    "Read",
    "Record",
    "ReduceScatter",
    "Report",
    "Run",
    "Send",
    "Store",
    "WaitEvent",
    "WaitSend",
    "WaitWork",
]


@dataclass(frozen=True, kw_only=True)
class Record(Instruction):
    """An instruction that records an event on its stream, if another stream reads a value made before it."""

    op: ClassVar[str] = "record"
    event: int

    def details(self) -> list[str]:
        return [f"e{self.event}"]


@dataclass(frozen=True, kw_only=True)
class Keep(Instruction):
    """An instruction that keeps a flat gradient until the last batch of an accumulation (`plan.not_last`)."""

    op: ClassVar[str] = "keep"


@dataclass(frozen=True, kw_only=True)
class WaitEvent(Instruction):
    """An instruction that makes its stream wait for an event.

    `shared` are the slots of another stream that this one reads next.
    """

    op: ClassVar[str] = "await"
    event: int
    shared: tuple[int, ...]

    def details(self) -> list[str]:
        return [f"e{self.event}", "for", ", ".join(f"s{slot}" for slot in self.shared)]
