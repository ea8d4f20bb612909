"""The end of a program: every region gets a device, and weights that follow from the batch get nodes."""

from __future__ import annotations

from lightning_piper.common.units import counted
from lightning_piper.directives.rewrites.transfers import place_around
from lightning_piper.directives.rewrites.unplaced_regions import without_device
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Partial
from lightning_piper.ops.order import Barrier
from lightning_piper.ops.update import Update
from lightning_piper.passes.batch_weights import weigh


def complete(dag: TrainingDAG) -> None:
    """Complete a DAG after its last directive: check its devices, and add nodes for weights (`weigh`). If the
    program places nothing, all nodes run on device 0.

    Raises:
        DirectiveError: The program places or replicates only some regions, or leaves a node without a device.
            Or gradients reach an update without a sum over the replicas, or the device numbers have gaps.
    """
    unplaced = [chunk for chunk in dag.of_type(Chunk) if not chunk.devices]
    if len(unplaced) == len(list(dag.of_type(Chunk))):
        for node in (*unplaced, *dag.of_type(Barrier)):
            dag.change(node, devices=(0,))
        place_around(dag, unplaced)
        _check_devices(dag)
        weigh(dag)
        return
    if (forgotten := without_device(dag)) is not None:
        found, advice = forgotten
        raise DirectiveError(f"{found}. {advice[0].upper()}{advice[1:]}")
    _check_devices(dag)
    for chunk in dag.of_type(Chunk):
        if len(chunk.devices) != len(dag.mesh.group_ranks):
            raise _misplaced(dag, chunk)
    for update in dag.of_type(Update):
        # Check here even if verification is off: without a sum, each replica trains on its own gradients.
        if any(isinstance(dag.value(ref).placement, Partial) for ref in update.inputs):
            name = dag.value(update.inputs[0]).names[0]
            raise DirectiveError(
                f"no directive sums the gradient of {name} over devices {list(update.devices)}, so every replica would "
                f"step with its own gradient. Add a replicate whose filter selects region {dict(update.tags)} "
                "[PIPER-D010]"
            )
    devices = dag.devices()
    if devices != tuple(range(len(devices))):
        raise DirectiveError(
            f"the program places regions on {'devices' if len(devices) > 1 else 'device'} "
            f"{', '.join(map(str, devices))}. Use "
            f"{f'devices 0 to {len(devices) - 1}, without gaps' if len(devices) > 1 else 'device 0'} [PIPER-D009]"
        )
    weigh(dag)


def _misplaced(dag: TrainingDAG, chunk: Chunk) -> DirectiveError:
    """Return the error for a chunk with another number of devices than the mesh of the program."""
    wanted = len(dag.mesh.group_ranks)
    if dag.member_axes:
        has, fix = f"is for {counted(wanted, 'device')} ({dag.mesh})", f"Place the region on {wanted} devices"
    elif wanted == 1:
        has = "has 1 replica"
        fix = "Add a replicate that divides the batch over these devices, or place the region on one device"
    else:
        has = f"has {counted(wanted, 'replica')}"
        fix = f"Place the region on {wanted} devices, and let a replicate select it"
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
