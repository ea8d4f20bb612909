"""`compile_plans`: the steps that turn a training DAG into one plan per device."""

from __future__ import annotations

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.plan.instructions import Collective, Send
from lightning_piper.plan.irecv import place_irecvs
from lightning_piper.plan.lifetimes import mark_last_reads
from lightning_piper.plan.lower import lower
from lightning_piper.plan.no_sync import sync_only
from lightning_piper.plan.order import global_order
from lightning_piper.plan.plan import Plan
from lightning_piper.plan.streams import add_events


def compile_plans(dag: TrainingDAG) -> dict[int, Plan]:
    """One plan for each logical device of the DAG; about n log n in its nodes. The same DAG always gives the same plans.

    Raises:
        VerificationError: the DAG cannot be executed: a cycle, a node without device, a value that is not where it is read.
    """
    order = global_order(dag)
    lowerings = lower(dag, order)
    rank = {node.id: i for i, node in enumerate(order)}
    late = sync_only(dag)
    plans: dict[int, Plan] = {}
    for device, lowered in lowerings.items():
        instructions = place_irecvs(lowered.instructions, lowered.irecvs, rank)
        instructions = mark_last_reads(device, instructions)
        instructions, events = add_events(instructions)
        irecvs = lowered.irecvs.values()
        channels = {i.channel for i in instructions if isinstance(i, Send)} | {irecv.channel for irecv in irecvs}
        groups = {i.group for i in instructions if isinstance(i, Collective) and len(i.members) > 1}
        plans[device] = Plan(device, dag.devices(), dag.size, lowered.place, lowered.replica, dag.replicas, lowered.slots, events,
                             tuple(sorted(channels)), tuple(sorted(groups)), lowered.shards, tuple(instructions),
                             sync_only=late)  # fmt: skip
    return plans
