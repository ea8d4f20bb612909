"""`compile_plans`: compile a training DAG to one plan per device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.plan.columns import Column, columns_of
from lightning_piper.plan.instructions import Collective, SendInstruction
from lightning_piper.plan.irecv import place_irecvs
from lightning_piper.plan.lifetimes import mark_last_reads
from lightning_piper.plan.lowering import lower
from lightning_piper.plan.no_sync import sync_only
from lightning_piper.plan.order import global_order
from lightning_piper.plan.plan import Plan
from lightning_piper.plan.send_completion import LeavesColumnError
from lightning_piper.plan.streams import add_events


def compile_plans(dag: TrainingDAG, device: int | None = None) -> Plans:
    """Compile one plan for each logical device of the DAG. The same DAG always gives the same plans.

    Compilation takes about n log n time in the nodes, for each column of devices whose plans are requested.

    Args:
        device: The device whose column represents all columns (default: the first device).

    Raises:
        VerificationError: The DAG cannot run: it has a cycle, a node without device, or a value that is not
            on the device that reads it.
    """
    return Plans(dag, device)


class Plans(Mapping[int, Plan]):
    """A mapping from each logical device to its plan.

    The first access to a plan makes all plans of its column (`plan.columns`).

    Attributes:
        order: All nodes, in the order in which every device runs its own.
        representatives: Plans that represent all plans. If columns differ only in device names, these are the
            plans of one column, otherwise all plans.
    """

    def __init__(self, dag: TrainingDAG, device: int | None = None) -> None:
        self._dag, self.order, self._late = dag, global_order(dag), sync_only(dag)
        self._rank = {node.id: i for i, node in enumerate(self.order)}
        self._devices, self._columns = dag.devices(), columns_of(dag)
        self._made: dict[int, Plan] = {}
        try:
            self.representatives: Mapping[int, Plan] = self._represent(device)
        except LeavesColumnError:  # an operation of another package sent a message to another column
            self._columns = self._columns.together()
            self._made.clear()
            self.representatives = self._represent(device)

    def _represent(self, device: int | None) -> dict[int, Plan]:
        first = device if device is not None and device in self._columns.index else self._devices[0]
        return {
            d: self[d] for d in (self._columns.column_of(first) if self._columns.alike else self._devices)
        }

    def __getitem__(self, device: int) -> Plan:
        if device not in self._made:
            self._make(self._columns.column_of(device))
        return self._made[device]

    def __iter__(self) -> Iterator[int]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    def group_rank_of(self, device: int) -> int:
        """Return the `Plan.group_rank` of a device without compiling its plan."""
        return self._columns.group_rank_of[device]

    def image(self, device: int) -> int:
        """Return the device whose plan represents the plan of `device`: `device` itself if its plan is a
        representative, otherwise the device at the same position of the represented column."""
        if device in self.representatives:
            return device
        return tuple(self.representatives)[self._columns.index[device][1]]

    def _make(self, column: Column) -> None:
        """Compile the plans of the devices in a column."""
        for device, lowered in lower(self._dag, self.order, self._columns, column).items():
            instructions = place_irecvs(lowered.instructions, lowered.irecvs, self._rank)
            instructions = mark_last_reads(device, instructions)
            instructions, events = add_events(instructions)
            irecvs = lowered.irecvs.values()
            channels = {i.channel for i in instructions if isinstance(i, SendInstruction)} | {
                irecv.channel for irecv in irecvs
            }
            groups = {i.group for i in instructions if isinstance(i, Collective) and len(i.members) > 1}
            self._made[device] = Plan(
                device,
                self._devices,
                self._dag.size,
                lowered.group_rank,
                lowered.replica,
                self._dag.replicas,
                lowered.slots,
                events,
                tuple(sorted(channels)),
                tuple(sorted(groups)),
                lowered.shards,
                tuple(instructions),
                sync_only=self._late,
            )
