"""Logical streams: streams and events of an accelerator. A CPU does not have streams, so `Streams` and
`Arrival` do nothing there, and instructions run in plan order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from lightning_piper.accelerators import Accelerator, accelerator_of
from lightning_piper.plan.instructions import Record, WaitEvent
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.transport import Bound, Bundle, Slots


class Streams:
    """The streams of one executor on a device without streams. All methods do nothing."""

    def begin(self) -> None:
        """Make the step start after the work that the caller has issued."""

    def end(self, results: Iterable[torch.Tensor], updates: Iterable[torch.Tensor] = ()) -> None:
        """Make the caller's next work start after the step, and give the caller ownership of `results`, which
        are from the stream `compute`, and of `updates`, which are from other streams."""

    def enter(self, stream: str) -> None:
        """Issue all following work to this stream."""

    def leave(self) -> None:
        """Issue to the caller's stream again."""

    def switch(self, stream: str) -> Bound | None:
        """Return the function that switches to this stream; None on a device without streams."""
        return None

    def record(self, instruction: Record) -> Bound | None:
        return None

    def wait(self, instruction: WaitEvent, slots: Slots) -> Bound | None:
        return None


class DeviceStreams(Streams):
    """The streams of one executor on an accelerator, and the events between them.

    The caching allocator may reuse a freed block immediately on the stream that allocated it. So if another
    stream reads a tensor, `record_stream` records the tensor on that stream. Results are recorded on the
    caller's stream.

    Args:
        api: The accelerator.
        plan: The plan of the executor.
        device: The torch device.
        own_compute: Whether `compute` gets a stream of its own. If not, it is the stream that is current when
            this object is made.
    """

    def __init__(self, api: Accelerator, plan: Plan, device: torch.device, own_compute: bool) -> None:
        self._api, self._device = api, device
        self._caller = api.current_stream(device)
        names = [name for name in plan.streams if own_compute or name != "compute"]
        self._streams = {name: api.stream(device, (plan.device, name)) for name in names}
        self._streams.setdefault("compute", self._caller)
        self._events = [api.new_event() for _ in range(plan.events)]

    def begin(self) -> None:
        caller = self._api.current_stream(self._device)
        for stream in self._streams.values():
            if stream != caller:
                stream.wait_stream(caller)

    def end(self, results: Iterable[torch.Tensor], updates: Iterable[torch.Tensor] = ()) -> None:
        caller = self._api.current_stream(self._device)
        for stream in self._streams.values():
            if stream != caller:
                caller.wait_stream(stream)
        for x in results if self._streams["compute"] != caller else ():
            self._api.record_stream(x, caller)
        for x in updates:
            self._api.record_stream(x, caller)

    def enter(self, stream: str) -> None:
        self._caller = self._api.current_stream(self._device)
        self._api.set_stream(self._streams[stream])

    def leave(self) -> None:
        self._api.set_stream(self._caller)

    def switch(self, stream: str) -> Bound:
        return partial(self._api.set_stream, self._streams[stream])

    def record(self, instruction: Record) -> Bound:
        return partial(self._events[instruction.event].record, self._streams[instruction.stream])

    def wait(self, instruction: WaitEvent, slots: Slots) -> Bound:
        stream = self._streams[instruction.stream]
        event = self._events[instruction.event]
        shared = instruction.shared
        record_stream = self._api.record_stream

        def wait() -> None:
            stream.wait_event(event)
            for slot in shared:
                for x in slots[slot]:
                    record_stream(x, stream)

        return wait


class Arrival:
    """The point from which another device of this process may read a bundle. This class is for CPUs, where
    another device may always read. `_DeviceArrival` is for accelerators."""

    def record(self) -> None:
        """Set the point after all work that the current stream has received so far."""

    def take(self, bundle: Bundle, device: torch.device) -> Bundle:
        """Return the bundle on `device`, readable on the device's current stream. Tensors that are there
        already are returned without a copy, and so are tensors in host memory."""
        return bundle


class _DeviceArrival(Arrival):
    def __init__(self, api: Accelerator) -> None:
        self._api, self._event = api, api.new_event()

    def record(self) -> None:
        self._event.record()

    def take(self, bundle: Bundle, device: torch.device) -> Bundle:
        api = self._api
        stream = api.current_stream(device)
        stream.wait_event(self._event)
        taken = []
        for x in bundle:
            if x.device == device:
                api.record_stream(x, stream)
            elif x.device.type != "cpu":  # a number that a step keeps on the host stays there
                api.record_stream(x, api.current_stream(x.device))  # the stream on which torch copies
                x = x.to(device, non_blocking=True)
            taken.append(x)
        return tuple(taken)


def arrival(device: torch.device) -> Arrival:
    """Return a new `Arrival` for bundles that this device makes."""
    api = accelerator_of(device)
    return Arrival() if api is None else _DeviceArrival(api)


def streams_of(plan: Plan, device: torch.device, own_compute: bool) -> Streams:
    """Return the streams of an executor of this plan. `DeviceStreams` explains `own_compute`."""
    api = accelerator_of(device)
    return Streams() if api is None else DeviceStreams(api, plan, device, own_compute)
