"""The points at which a sender may free sent tensors without waiting.

A tensor must live until its receiver has it. Some backends do not report completion without a wait (gloo),
and waiting would stall the device. But a device that has received a message which its peer sent *after* it
had received our message knows that our message has arrived. Waiting for the send then takes no time. This
module computes with vector clocks (Mattern 1989) which receive proves which sends complete.
For example in 1F1B: when the gradient of microbatch 0 comes back, its activation has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_piper.plan.instructions import Channel


class LeavesColumnError(Exception):
    """An error for a message whose peer is not among the devices whose plans are compiled together."""


class SendCompletion:
    """A record of the sends that each sender can know to be complete.

    Call `send` and `receive` for all messages of the devices, each receive after its send.

    `_clock[a][b]` is the number of receives of the b-th device that the a-th device knows to be done. A message
    is named by its channel and the id of its send node, because each replica sends the same node on another
    channel.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self._index = {device: i for i, device in enumerate(devices)}
        self._devices = list(devices)
        self._clock = [[0] * len(devices) for _ in devices]
        self._known_by: dict[tuple[Channel, int], list[int]] = {}  # message -> the sender's clock at the send
        # message -> the receiver's clock entry at the receive
        self._received: dict[tuple[Channel, int], int] = {}
        # channel -> its messages whose arrival the sender does not know, in the order of the sends
        self._pending: dict[Channel, deque[int]] = {}

    def send(self, channel: Channel, message: int) -> None:
        if channel[1] not in self._index:
            raise LeavesColumnError
        self._known_by[channel, message] = self._clock[self._index[channel[0]]].copy()
        self._pending.setdefault(channel, deque()).append(message)

    def receive(self, channel: Channel, message: int) -> list[int]:
        """Note that the receiver has the message.

        Returns the messages that the receiver has sent and that it now knows to have arrived.
        """
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
        """Return the messages whose arrival the device, their sender, never learns, sorted by id."""
        return sorted(m for (sender, _), queue in self._pending.items() if sender == device for m in queue)
