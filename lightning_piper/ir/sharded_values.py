"""Placements, in the training DAG, of the tensors that a step divides along axes (`Step.divisions`)."""

from __future__ import annotations

import operator

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import Output, PassKey
from lightning_piper.ir.values import Kind, Partial, Placement, Sharded


def take_parts(dag: TrainingDAG, training: TrainingDAG | None = None) -> None:
    """Record in a DAG that its chunks compute on parts of tensors: the axes, the divided parameters, and the
    meshes of parameters.

    Args:
        training: The training DAG, if `dag` is of a forward-only step and there is a training step. The
            parameters then have the meshes that they have in training, because only gradients show them.
    """
    dag.member_axes = tuple(division.axis for division in dag.step.divisions)
    dag.divided |= {name: (axis,) for name, (axis, _) in dag.code.divided.items()}
    if training is not None:
        dag.param_meshes |= training.param_meshes
    for output in (output for interface in dag.code.interfaces.values() for output in interface.outputs):
        if is_summed(dag, output):
            terms = {axis for axis, placement in output.held if isinstance(placement, Partial)}
            mesh = dag.mesh.against(*(axis for axis in dag.member_axes if axis not in terms))
            dag.param_meshes |= dict.fromkeys(output.names, mesh)


def is_summed(dag: TrainingDAG, output: Output) -> bool:
    """Return whether an output is a gradient that is summed over members of an axis and over replicas."""
    terms = any(isinstance(placement, Partial) for _, placement in output.held)
    return bool(dag.member_axes) and output.kind == Kind.GRAD and terms


def others_of(dag: TrainingDAG, key: PassKey, index: int) -> tuple[tuple[str, Placement], ...]:
    """Return `Value.others` of an output of a pass.

    It lists the axes along which members have parts of the output. In a region of divided experts, these
    include the axes along which its rows and gradients are divided.
    """
    output = dag.code.interface_of(key).outputs[index]
    summed = is_summed(dag, output)
    parts = [
        (axis, held)
        for axis, held in output.held
        if dag.member_axes and not (summed and isinstance(held, Partial))
    ]
    if key[0] in dag.meshes and not (output.kind == Kind.GRAD and output.names[0] not in dag.divided):
        parts += [(axis, Sharded(0)) for axis in dag.routed_axes(dag.meshes[key[0]])]
    return tuple(sorted(parts, key=operator.itemgetter(0)))
