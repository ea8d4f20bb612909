"""The end of a program: every region gets a device, and weights that follow from the batch and early updates get
nodes."""

from __future__ import annotations

from typing import Any

from lightning_piper.common.units import counted
from lightning_piper.directives.rewrites.transfers import place_around
from lightning_piper.directives.rewrites.unplaced_regions import without_device
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import selecting
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import LateSpecs
from lightning_piper.ir.values import Partial, Sharded
from lightning_piper.ops.early_update import STREAM, EarlyUpdate
from lightning_piper.ops.order import Barrier
from lightning_piper.ops.update import Update
from lightning_piper.passes.batch_weights import weigh


def complete(dag: TrainingDAG) -> None:
    """Complete a DAG after its last directive: make the code of its chunks, check its devices, and add nodes for
    weights (`weigh`) and for early updates. If the program places nothing, all nodes run on device 0.

    Raises:
        DirectiveError: The program places or replicates only some regions, or leaves a node without a device.
            Or gradients reach an update without a sum over the replicas, or the device numbers have gaps.
    """
    _make_code(dag)
    unplaced = [chunk for chunk in dag.of_type(Chunk) if not chunk.devices]
    if len(unplaced) == len(list(dag.of_type(Chunk))):
        for node in (*unplaced, *dag.of_type(Barrier)):
            dag.change(node, devices=(0,))
        place_around(dag, unplaced)
        for node in [node for node in dag.nodes.values() if not node.devices]:
            dag.change(node, devices=(0,))
        weigh(dag)
        return
    if (forgotten := without_device(dag)) is not None:
        found, advice = forgotten
        raise DirectiveError(f"{found}. {advice[0].upper()}{advice[1:]}")
    _check_devices(dag)
    for chunk in dag.of_type(Chunk):
        if len(chunk.devices) != len(dag.mesh.group_ranks):
            raise _misplaced(dag, chunk)
    _check_summed(dag)
    devices = dag.devices()
    if devices != tuple(range(len(devices))):
        raise DirectiveError(
            f"the program places regions on {'devices' if len(devices) > 1 else 'device'} "
            f"{', '.join(map(str, devices))}. Use "
            f"{f'devices 0 to {len(devices) - 1}, without gaps' if len(devices) > 1 else 'device 0'} [PIPER-D009]"
        )
    weigh(dag)
    _update_early(dag)


def _make_code(dag: TrainingDAG) -> None:
    """Make the code of all chunks: replace `LateSpecs` by the specs for which they stand."""
    for node in dag.nodes.values():
        for value in node.outputs:
            tensors: Any = value.tensors
            if isinstance(tensors, LateSpecs):
                object.__setattr__(value, "tensors", tensors.specs)


def _update_early(dag: TrainingDAG) -> None:
    """Add an early update before each update of whole parameters, if the `replicate` of the region that makes
    their gradients asks for it.

    A parameter that several regions use has no early update, because its gradient is a sum that only the
    update makes. A parameter that only later batches use has none either, because it has no owner: no program
    shards it.
    """
    for update in list(dag.of_type(Update)):
        value = dag.value(update.inputs[0])
        owned = value.bucket is not None and value.bucket.owners is not None
        if len(update.inputs) > 1 or not owned or not isinstance(value.placement, Sharded):
            continue
        policy = dag.policies.get(dag.producer(update.inputs[0]).region)
        if policy is None or not policy.overlap_update:
            continue
        early = dag.add(
            EarlyUpdate(
                inputs=update.inputs,
                tags=update.tags,
                devices=update.devices,
                stream=STREAM,
                origin=update.origin,
                placed_by=update.placed_by,
            )
        )
        dag.order(early, update, update.origin)


def _check_summed(dag: TrainingDAG) -> None:
    """Raise an error if gradients reach an update without a sum over the replicas. Then each replica would train on
    its own gradients, even without verification."""
    terms = [
        (update, ref)
        for update in dag.of_type(Update)
        for ref in update.inputs
        if isinstance(dag.value(ref).placement, Partial)
    ]
    if terms:
        update, ref = terms[0]
        regions = {dag.producer(ref).region for _, ref in terms}
        raise DirectiveError(
            f"no directive sums the gradient of {dag.value(ref).names[0]} over devices {list(update.devices)}, so "
            f"every replica would step with its own gradient. Add a replicate with the filter "
            f"{selecting(dag, regions)} [PIPER-D010]"
        )


def _misplaced(dag: TrainingDAG, chunk: Chunk) -> DirectiveError:
    """Return the error for a chunk whose number of devices is not the size of the program's mesh."""
    wanted = len(dag.mesh.group_ranks)
    if wanted == 1:
        has = "does not divide the batch over them"
        fix = "Add a replicate, or place the region on one device"
    else:
        has, fix = f"is for groups of {wanted} devices", f"Place the region on {wanted} devices"
    return DirectiveError(
        f"{chunk.label} is on {counted(len(chunk.devices), 'device')}, {list(chunk.devices)} (directive "
        f"{chunk.placed_by}), but the program {has}. {fix} [PIPER-D009]"
    )


def _check_devices(dag: TrainingDAG) -> None:
    """Raise an error if a node has no devices: a directive of another package added it after every `place`, or it
    does not depend on a chunk.
    """
    for node in dag.nodes.values():
        if not node.devices:
            by = "" if node.origin is None else f", made by directive {node.origin},"
            raise DirectiveError(
                f"{node.label} %{node.id}{by} has no device. Let the directive give the node the devices of the "
                "node that it reads, or put the directive before a place [PIPER-D007]"
            )
