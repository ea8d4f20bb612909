"""Lower nodes to instructions in one global order on the devices of one column."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node
from lightning_piper.ops.base import noting_operation, operation_of
from lightning_piper.plan.columns import Column, Columns
from lightning_piper.plan.device import DevicePlan
from lightning_piper.plan.send_completion import SendCompletion


def lower(dag: TrainingDAG, order: Sequence[Node], columns: Columns, column: Column) -> dict[int, DevicePlan]:
    """Return the instructions of each device of a column.

    Raises:
        VerificationError: A node does not have a device, or reads a value that is not there.
        LeavesColumnError: A message leaves the column.
    """
    send_completion = SendCompletion(column)
    members: dict[tuple[int, ...], tuple[int, ...]] = {}
    plans = {
        device: DevicePlan(dag, device, columns.group_rank_of[device], send_completion, members)
        for device in column
    }
    here: dict[int, list[DevicePlan]] = {}  # by identity of a group: the plans of its devices in the column
    for node in dag.nodes.values():
        if not node.devices:
            raise VerificationError(
                f"%{node.id} {node.label} has no device. If you wrote a directive, give its nodes devices in "
                "`apply`. Otherwise, report this [PIPER-V002]"
            )
        if id(node.devices) not in here:
            here[id(node.devices)] = [plans[device] for device in node.devices if device in plans]
        if node.reads_from != "channel":  # a receive reads the channel, not the value
            for plan in here[id(node.devices)]:
                plan.register(node)
    for node in order:
        emit = operation_of(node).lower
        with noting_operation(node, "lowering"):
            for plan in here[id(node.devices)]:
                emit(plan, node)
    for plan in plans.values():
        plan.finish()
    return plans
