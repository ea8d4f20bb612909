"""Nodes -> instructions: the training DAG in one global order, each node on each of its devices."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node
from lightning_piper.ops.base import asked, operation_of
from lightning_piper.plan.device import DevicePlan
from lightning_piper.plan.send_completion import SendCompletion


def lower(dag: TrainingDAG, order: Sequence[Node]) -> dict[int, DevicePlan]:
    """The instructions of each device.

    Raises:
        VerificationError: a node has no device, or reads what is not there.
    """
    send_completion = SendCompletion(dag.devices())
    plans = {device: DevicePlan(dag, device, send_completion) for device in dag.devices()}
    for node in dag.nodes.values():
        if not node.devices:
            raise VerificationError(f"%{node.id} {node.label} has no device")
        if node.reads_from != "channel":  # it reads the channel, not the value
            for device in node.devices:
                plans[device].expect(node)
    for node in order:
        emit = operation_of(node).lower
        with asked(node, "lowering"):
            for device in node.devices:
                emit(plans[device], node)
    for plan in plans.values():
        plan.finish()
    return plans
