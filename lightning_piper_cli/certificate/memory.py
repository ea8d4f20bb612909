"""The memory of one device: the contents of its slots, and the streams that may use the slots."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Json = dict[str, Any]
Clock = dict[str, int]  # stream -> index of its last instruction that is certainly done
COLLECTIVES = {
    "reduce", "reduce_groups", "total", "sum_parts", "reduce_scatter", "scatter_samples", "all_gather", "redistribute", "shift",
    "all_to_all", "gather_samples",
}  # fmt: skip


class Fault(Exception):
    """A statement of a certificate that is wrong. The text names the device, the instruction and the reason."""


def need(good: object, reason: str) -> None:
    if not good:
        raise Fault(reason)


class DeviceMemory:
    """The slots and streams of one device, while its instructions run in order.

    Attributes:
        state: Slot -> pending, ready or host. An empty slot is absent.
        type, maker: Slot -> its type; the operation and node that wrote it.
        clocks: For each stream, the work that is certainly done when the stream reaches its next instruction.
        made: Slot -> stream and index of its last write.
        owner: Slot -> the stream whose memory it is.
        shared: (slot, stream) for each stream whose use of the slot's memory is recorded.
        kept: Bucket that the device keeps between steps -> slot of its last gather.
        passing: Slots of gathered buckets that are freed after their use.
    """

    def __init__(self, types: list[Json]) -> None:
        self.types, self.reports = types, 0
        self.state: dict[int, str] = {}
        self.type: dict[int, int] = {}
        self.maker: dict[int, tuple[str, int]] = {}
        self.sending: dict[int, int] = {}  # send -> slot
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.events: dict[int, Clock] = {}
        self.made: dict[int, tuple[str, int]] = {}
        self.owner: dict[int, str] = {}
        self.readers: dict[int, Clock] = defaultdict(dict)
        self.shared: set[tuple[int, str]] = set()
        self.kept: dict[int, int] = {}
        self.passing: set[int] = set()

    def step(self, x: Json) -> None:
        """Run an instruction. Set `given`, the types of what it reads, and `had`, the type that a sum had."""
        op, stream, clock = x["op"], x["stream"], self.clocks[x["stream"]]
        if op == "record":
            self.events[x["event"]] = {**clock, stream: x["place"]}
        elif op == "await":
            need(x["event"] in self.events, f"event {x['event']} is not recorded")
            for other, index in self.events[x["event"]].items():
                clock[other] = max(index, clock.get(other, -1))
            self.shared |= {(slot, stream) for slot in x["shared"]}
        elif op == "retire":
            need(x["node"] in self.sending, "the send has not started, or was waited for before")
            slot = self.sending.pop(x["node"])
            need(
                self.owner[slot] == stream,
                f"slot {slot} goes back to stream {self.owner[slot]}, not {stream}",
            )
        elif op in ("deliver", "report"):
            need(stream == "compute", "only the stream compute is waited for at the end of the step")
        self.reports += op == "report"
        if op in ("wait", "retire"):
            need(x["time"] > x.get("started", x["time"]), "it may run before all parties have started")
        if x.get("in_place"):
            x["had"] = self.types[self.type.get(x["writes"][0], 0)]
        x["given"] = [self.read(x, slot, last) for slot, last in x["reads"]]
        self.share_buckets(x)
        for slot, made in zip(x["writes"], x["makes"], strict=True):
            need((slot is None) == (made is None), "it types a slot that it does not write, or the reverse")
            if slot is not None:
                self.write(x, slot, made)

    def read(self, x: Json, slot: int, last: bool) -> Json:
        stream = x["stream"]
        state = self.state.get(slot, "freed" if slot in self.type else "not written")
        need(state == ("host" if x["op"] == "fetch" else "ready"), f"slot {slot} is {state}")
        owner = self.owner[slot]
        self.is_made(slot, stream)
        need(owner == stream or (slot, stream) in self.shared, f"stream {owner} may reuse slot {slot}")
        self.readers[slot][stream] = x["place"]
        if last:
            del self.state[slot]
            passes = slot not in self.passing or owner in self.readers[slot]
            need(passes, f"the gathered bucket in slot {slot} is not read on its stream")
        return self.types[self.type[slot]]

    def share_buckets(self, x: Json) -> None:
        """Check the memory of buckets and messages, which several instructions use."""
        op, stream = x["op"], x["stream"]
        if op == "send":
            self.sending[x["node"]] = x["reads"][0][0]
        elif op in ("reduce", "reduce_groups") and x["bucket"] is not None and len(x["reads"]) == 1:
            self.is_read(x["reads"][0][0], stream)
        elif op == "reduce_scatter":
            need(self.owner[x["reads"][0][0]] == stream, "it sums the memory of another stream")
        elif op == "all_gather" and not x["kept"]:
            self.passing.add(x["writes"][0])
        elif op == "all_gather":
            if x["bucket"] in self.kept:
                self.is_read(self.kept[x["bucket"]], stream)
            self.kept[x["bucket"]] = x["writes"][0]

    def write(self, x: Json, slot: int, made: int) -> None:
        op, node, stream, state = x["op"], x["node"], x["stream"], self.state.get(slot)
        if op == "wait":
            need(state == "pending" and self.maker[slot][1] == node, f"slot {slot} is not filled by %{node}")
            need(self.type[slot] == made, f"slot {slot} has another type after the wait")
            need(self.owner[slot] == stream, f"stream {self.owner[slot]} started slot {slot}")
        elif x.get("in_place"):
            need(
                state == "ready" and self.maker[slot] == ("add", node), f"slot {slot} is not a sum of %{node}"
            )
        else:
            need(slot not in self.type, f"slot {slot} is written twice")
        if slot in self.made:
            self.is_made(slot, stream)
            self.is_read(slot, stream)
            need(slot not in self.sending.values(), f"slot {slot} changes while it is sent")
        begins = op == "post" or op in COLLECTIVES
        self.state[slot] = "pending" if begins else "host" if op == "store" else "ready"
        self.type[slot], self.maker[slot], self.made[slot] = made, (op, node), (stream, x["place"])
        self.owner.setdefault(slot, stream)

    def is_made(self, slot: int, stream: str) -> None:
        source, index = self.made[slot]
        late = source != stream and self.clocks[stream].get(source, -1) < index
        need(not late, f"stream {stream} may use slot {slot} before stream {source} has written it")

    def is_read(self, slot: int, stream: str) -> None:
        for reader, index in self.readers[slot].items():
            late = reader != stream and self.clocks[stream].get(reader, -1) < index
            need(not late, f"slot {slot} changes before stream {reader} has read it")

    def end(self) -> None:
        need(not self.state, f"slots {sorted(self.state)} are not empty")
        need(not self.sending, f"no instruction waits for the sends {sorted(self.sending)}")
        need(self.reports == 1, f"the device reports {self.reports} times")
