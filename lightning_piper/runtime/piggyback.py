"""A small sum that travels in the message of a larger sum: one gloo message carries a bucket of gradients and
the step's metrics.

A sum over gloo wakes threads in all processes. With few cores this takes as long as a tiny step. So if
replicas sum a small bucket of gradients and a vector of metrics, Piper sums the bucket and the vector in one
message.

The message also carries a digest of each process. If all digests are equal, the processes agree on what the
digest stands for, without a message for this purpose. A process that cannot run the step sends zeros instead
(`vote_abort`). Zero is not a valid digest, so the step is then void for all processes.

The vector of metrics has elements for each replica. A replica writes its own elements, and leaves zeros in
the elements of other replicas. So the sum only joins the vectors. Piper sends each byte as one element of the
gradients' dtype. Integers up to 255 are exact in every dtype, and so is the sum of such an integer and zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ops.base import Bound, Bundle, Exchange, Slots
from lightning_piper.plan.instructions import (
    AllReduceInstruction,
    Collective,
    Irecv,
    Merge,
    SendInstruction,
    WaitWork,
)
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.collectives import Members

SMALL = 2**16  # maximum elements of a bucket that is copied to append the metrics
CAPACITY = 2**9  # how many 8-byte numbers a message carries at most besides gradients
Start = Callable[[], None]


class DigestMismatch(Exception):
    """The processes passed different digests. The step is void, and none of its results is kept."""


class Piggyback:
    """The metrics and digests that the messages of one plan carry besides gradients.

    Attributes:
        metrics_node: The node of the sum of the metrics.
        gradients_node: The node of the sum of gradients that carries the metrics.
        agreed: Whether all processes sent the same digest in this step. Also True if the step did not
            exchange digests, or has not received them yet.

    Args:
        plan: The plan of this process.
        metrics_sum, gradients_sum: The sum of the metrics, and the sum of gradients that carries it.
    """

    def __init__(
        self, plan: Plan, metrics_sum: AllReduceInstruction, gradients_sum: AllReduceInstruction
    ) -> None:
        assert gradients_sum.bucket is not None
        self.metrics_node, self.gradients_node = metrics_sum.node, gradients_sum.node
        # the starts of all other sums, and the waits for them, in order
        self._sums = [
            each
            for each in plan.instructions
            if isinstance(each, AllReduceInstruction | WaitWork) and each.node != metrics_sum.node
        ]
        self._bucket, self._numel = gradients_sum.bucket, gradients_sum.bucket.numel
        reported = metrics_sum.tensors[0].numel
        # The metrics, and then the bits of a digest for each replica.
        message = torch.zeros(reported + plan.replicas, dtype=torch.float64)
        self._reported, self._digests = reported, message[reported:].view(torch.int64).numpy()
        self._metrics, self._bytes, self._replica = (
            message[:reported],
            message.view(torch.uint8),
            plan.replica,
        )
        self._room = self._numel + message.nbytes  # elements of the message of the gradients
        self._received: Bundle = ()  # the summed metrics of this step
        self._on = False  # whether this step sums gradients, so that their message carries the metrics
        self.agreed = True

    def begin(self, digest: int, on: bool) -> None:
        """Begin a step.

        Args:
            digest: The nonzero digest of this process.
            on: Whether the step sums gradients over processes. If not, it exchanges no digests.
        """
        self._on, self.agreed = on, True
        self._digests[self._replica] = digest

    def bind_metrics(self, exchange: Exchange, into: int, slots: Slots, own: Bound) -> Start:
        """Return the function that starts the sum of the metrics. In a step that sums gradients, it copies
        the metrics into the message of the gradients. Otherwise it calls `own`, which starts a separate sum
        of the metrics."""

        def start() -> None:
            if not self._on:
                own()
                return
            (vector,) = exchange.bring()
            self._metrics.copy_(vector)
            slots[into] = ([], ())

        return start

    def finish_metrics(self, values: Bundle) -> Bundle:
        """Return the summed metrics. In a step that sums gradients, these come from the message of the
        gradients. Otherwise they are `values`, the result of the separate sum."""
        return self._received if self._on else values

    def bind_gradients(self, exchange: Exchange, into: int, slots: Slots, members: Members) -> Start:
        """Return the function that starts the sum of the message: the bucket of gradients, the metrics and
        the digests."""

        numel, room = self._numel, self._room

        def start() -> None:
            (flat,) = exchange.bring()
            if flat.untyped_storage().nbytes() >= room * flat.itemsize:
                message = flat.as_strided((room,), (1,))
            else:
                message = torch.cat([flat, flat.new_empty(room - numel)])
            message[numel:] = self._bytes
            work, total = members.add_up(message)
            slots[into] = ([work], (total,))

        return start

    def room(self, bucket: Bucket) -> int:
        """Return how many elements a flat tensor of this bucket needs with its part of the message."""
        return self._room if bucket == self._bucket else bucket.numel

    def finish_gradients(self, values: Bundle) -> Bundle:
        """Return the summed gradients, a view of the summed message. Also store the message's metrics for
        `finish_metrics`, and set `agreed`."""
        (message,) = values
        found = message[self._numel :].to(torch.uint8).view(torch.float64)
        digests = found.numpy()[self._reported :].view(np.int64)
        self.agreed = bool((digests == digests[0]).all())
        self._received = (found[: self._reported],)
        return (message[: self._numel],)

    def vote_abort(self, members_of: Callable[[Collective], Members]) -> None:
        """Take part, with zeros, in the sums of a step that this process cannot run but other processes may
        run. The zero digest makes the step void for all processes. `members_of` returns the members of a
        sum."""
        works = {}
        for each in self._sums:
            if isinstance(each, AllReduceInstruction):
                assert each.bucket is not None
                zeros = torch.zeros(self.room(each.bucket), dtype=each.bucket.dtype)
                works[each.node], _ = members_of(each).add_up(zeros)
            else:
                works.pop(each.node).wait()


def only_sums(plan: Plan) -> bool:
    """Return whether the processes of a plan communicate only by all-reduces over all replicas. All processes then have
    equal lists of instructions."""
    sums = [each for each in plan.instructions if isinstance(each, Collective)]
    return (
        not any(isinstance(each, SendInstruction | Irecv) for each in plan.instructions)
        and all(
            isinstance(each, AllReduceInstruction) and len(each.members) == plan.replicas for each in sums
        )
        and len({each.members for each in sums}) == 1
    )


def piggyback_of(plan: Plan, device: torch.device) -> Piggyback | None:
    """Return the `Piggyback` of a plan; None if the plan does not allow it.

    The plan must be of replicas on CPUs that communicate only by all-reduces over all replicas. It needs a
    small bucket of gradients. The sum of this bucket must start after the sum of the metrics starts, and its
    wait must come before the wait for the metrics.
    """
    if device.type != "cpu" or plan.replicas < 2 or not only_sums(plan):
        return None
    sums = [each for each in plan.instructions if isinstance(each, AllReduceInstruction)]
    reported = [each for each in sums if each.bucket is None]
    merges = [each for each in plan.instructions if isinstance(each, Merge)]
    if len(reported) != 1 or len(merges) != 1 or not merges[0].counts:
        return None
    (metrics_sum,) = reported
    last = _wait(plan, metrics_sum)
    if (
        [read.slot for read in metrics_sum.reads] != [merges[0].into]
        or len(metrics_sum.tensors) != 1
        or metrics_sum.tensors[0].dtype != torch.float64
        or metrics_sum.tensors[0].numel + plan.replicas > CAPACITY
    ):
        return None
    first = plan.instructions.index(metrics_sum)
    for each in sums:
        small = each.bucket is not None and each.bucket.numel <= SMALL and each.bucket.dtype.is_floating_point
        if small and first < plan.instructions.index(each) and _wait(plan, each) < last:
            return Piggyback(plan, metrics_sum, each)
    return None


def _wait(plan: Plan, collective: Collective) -> int:
    return next(
        i
        for i, each in enumerate(plan.instructions)
        if isinstance(each, WaitWork) and each.node == collective.node
    )
