"""Bugs of the memory that buckets lie in. All numbers are right; but a device that falls behind its host runs
out of memory.
"""

from __future__ import annotations

from typing import Any

from lightning_piper.ops.communication.gather import AllGatherInstruction
from lightning_piper.ops.communication.reduce import ReduceScatterInstruction
from lightning_piper.plan import device as device_plan
from lightning_piper.plan import instructions as ins
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

START = (device_plan.DevicePlan, "start")


def _on_its_own_stream(kind: type[ins.Collective]) -> Wrap:
    def wrap(original: Function, seeded: Seeded) -> Function:
        def start(
            self: Any, node: Any, started: Any, reads: Any, stream: str | None = None, **fields: Any
        ) -> None:
            wrong = started is kind and stream not in (None, node.stream)
            seeded.hits += wrong
            original(self, node, started, reads, None if wrong else stream, **fields)

        return start

    return wrap


mutation("gathers on a stream of their own", "no gather waits for the last reader of the bucket before "
                                             "it", "plan", START,
         scenario="sharded chain")(_on_its_own_stream(AllGatherInstruction))  # fmt: skip
mutation("sums of buckets on a stream of their own", "no bucket is packed behind the sum of the one before "
                                                     "it", "plan", START,
         scenario="sharded chain")(_on_its_own_stream(ReduceScatterInstruction))  # fmt: skip


@mutation("sums waited for elsewhere", "a stream gets a bucket back, and another one has waited for its "
                                       "sum", "plan",
          (device_plan, "WaitWork"), scenario="sharded chain")  # fmt: skip
def _waited_for_elsewhere(original: Function, seeded: Seeded) -> Function:
    def wait(**fields: Any) -> ins.WaitWork:
        seeded.hit()
        found: ins.WaitWork = original(**(fields | {"stream": "elsewhere"}))
        return found

    return wait
