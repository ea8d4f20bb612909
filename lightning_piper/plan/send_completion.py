"""Where a sender may free what it sent, without waiting.

A tensor must live until its receiver has it. Asking is not possible everywhere (gloo tells only those who wait), and waiting
would stall. But a device that has received something which its peer sent *after* it had received our message knows that the
message has arrived: waiting for the send then costs nothing. Which receives bring which knowledge is a property of the plans,
found here with vector clocks (Mattern 1989). For example in 1F1B: the gradient of microbatch 0 comes back, so its activation
has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_piper.plan.instructions import Channel


class LeavesColumnError(Exception):
    """A message goes to, or comes from, a device that is not among those whose plans are made together."""


class SendCompletion:
    """Which sends are complete, as far as the sender can know: follows sends and receives, of all devices that a message can
    reach from one of them, in an order that respects causality.

    `clock[a][b]` is how many of b's receives device a knows of. Messages are named by their channel and the id of
    their send: replicas send the same on channels of their own.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self._index = {device: i for i, device in enumerate(devices)}
        self._devices = list(devices)
        self._clock = [[0] * len(devices) for _ in devices]
        self._known_by: dict[tuple[Channel, int], list[int]] = {}  # message -> the sender's clock
        self._received: dict[tuple[Channel, int], int] = {}  # message -> the receiver's own time at which it had it
        self._pending: dict[Channel, deque[int]] = {}

    def send(self, channel: Channel, message: int) -> None:
        if channel[1] not in self._index:
            raise LeavesColumnError
        self._known_by[channel, message] = self._clock[self._index[channel[0]]].copy()
        self._pending.setdefault(channel, deque()).append(message)

    def receive(self, channel: Channel, message: int) -> list[int]:
        """The receiver has the message. Returns the messages it has sent that it now knows have arrived."""
        device = channel[1]
        if channel[0] not in self._index:
            raise LeavesColumnError
        me = self._index[device]
        clock = self._clock[me]
        clock[me] += 1
        self._received[channel, message] = clock[me]
        arrived: list[int] = []
        for i, time in enumerate(self._known_by.pop((channel, message))):
            if time > clock[i]:
                clock[i] = time
                sent = (device, self._devices[i])
                queue = self._pending.get(sent, ())
                while queue and self._received.get((sent, queue[0]), time + 1) <= time:
                    arrived.append(queue.popleft())
        return arrived

    def unknown(self, device: int) -> list[int]:
        """Messages the device has sent of which it never learns that they arrived, in the order in which they were sent."""
        return sorted(m for (sender, _), queue in self._pending.items() if sender == device for m in queue)
