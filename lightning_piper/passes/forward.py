"""A training program applied to a forward-only step: `validation_step`, `test_step`, `predict_step`.

Piper keeps `place`, `replicate` and the directives that shard tensors or experts: each replica has its local
batch, and parameters are gathered from the shards of training. Piper skips `order`, `recompute` and `offload`,
and a `split` does not cut the batch. An evaluation step needs no microbatches, because it saves nothing for a
backward pass. On the whole batch the step's values equal its values on one device, whatever the step computes
from them (a ratio, the exponential of a mean). The batch runs where the first microbatch runs, so a region with
several device groups (DualPipe) uses one of these groups.

A forward-only step may have regions that the training step lacks or annotates differently. Each directive
applies to the regions that it matches. A region that no `place` matches gets, in trace order:

1. the device group that has all of its parameters, in training or in a placed region;
2. otherwise the group of its last input's region;
3. otherwise the group of the first region that reads its output;
4. otherwise the program's first device (or group).

All devices get the step's return values for the local batch of their own replica.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

from lightning_piper.directives.place import Place
from lightning_piper.directives.program import Program
from lightning_piper.directives.rewrites.transfers import connect, connect_report, place_around
from lightning_piper.directives.sequence import applied_order
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.metrics import StepReport
from lightning_piper.ops.results import Result
from lightning_piper.passes.base import Pass

Group = tuple[int, ...]


def forward_passes(program: Program, training: TrainingDAG | None = None) -> list[Pass]:
    """Return the passes that apply a training program to the DAG of a forward-only step.

    Args:
        training: The training step's finished DAG, if there is one. It says where parameters are.
    """
    groups = _groups(program, training)
    rest = Pass(
        "place the rest", "bitwise", partial(_place_rest, groups=groups, training=training), apart=False
    )
    passes: list[Pass] = []
    for index in applied_order(program):
        directive = program[index]
        if directive.replica_groups():  # a directive that divides the batch needs all chunks on devices
            passes.append(rest)
        passes.append(
            Pass(
                directive.op,
                directive.contract,
                partial(directive.apply_forward, training=training),
                index,
                directive=directive,
            )
        )
    return [
        *passes,
        rest,
        Pass("return everywhere", "bitwise", partial(_return_everywhere, groups=groups), apart=False),
    ]


def _groups(program: Program, training: TrainingDAG | None) -> list[Group]:
    """Return the device groups of the program's `place` directives and of the training step's regions."""
    found = [directive.group for directive in program if isinstance(directive, Place)]
    found += [chunk.devices for chunk in training.of_type(Chunk)] if training is not None else []
    return list(dict.fromkeys(found))


def _place_rest(dag: TrainingDAG, groups: list[Group], training: TrainingDAG | None) -> None:
    """Place every chunk that does not have a device, by the rules of this module. Do nothing if there are no
    groups. Raise an error if a step with parameters has no training step and no `place` matches its
    regions."""
    rest = [chunk for chunk in dag.of_type(Chunk) if not chunk.devices]
    if not groups or not rest:
        return
    if (
        training is None
        and len(rest) == len(list(dag.of_type(Chunk)))
        and any(dag.interface(chunk).params for chunk in rest)
    ):
        found = ", ".join(dict.fromkeys(dag.regions[chunk.region].label for chunk in rest))
        raise DirectiveError(
            f"no place of the program selects a region of this step. Its regions are {found}. Use the same "
            "piper.annotate(...) in this step as in training_step [PIPER-D004]"
        )
    for chunk in rest:
        groups_of = _groups_of_params(dag, training)
        inputs = [dag.nodes[ref[0]].devices for ref in chunk.inputs if dag.nodes[ref[0]].devices]
        readers = [user.devices for user in dag.users(chunk) if isinstance(user, Chunk) and user.devices]
        near = [*reversed(inputs), *readers]
        having = _having(dag, chunk, groups_of)
        candidates = [group for group in near if group in having] or having or near or groups
        dag.change(chunk, devices=candidates[0])
        # If a `place` gave this device group a mesh, the chunk's region has the same mesh.
        for (_, group), mesh in (training or dag).arranged.copy().items():
            if group == chunk.devices:
                dag.arranged.setdefault((chunk.region, group), mesh)
        place_around(dag, [chunk])


def _groups_of_params(dag: TrainingDAG, training: TrainingDAG | None) -> dict[str, list[Group]]:
    """Return parameter -> the device groups of the placed chunks that read it, in the training DAG first."""
    found: dict[str, list[Group]] = {}
    for source in [dag] if training is None else [training, dag]:
        for chunk in source.of_type(Chunk):
            for name in source.interface(chunk).params if chunk.devices else ():
                found.setdefault(name, []).append(chunk.devices)
    return found


def _having(dag: TrainingDAG, chunk: Chunk, groups_of: dict[str, list[Group]]) -> list[Group]:
    """Return the device groups that have all parameters that a chunk reads.

    Parameters that no placed chunk reads are ignored. The result is empty if there are no other parameters.
    Raise an error if no group has all parameters.
    """
    wanted = {name: groups_of[name] for name in dag.interface(chunk).params if name in groups_of}
    if not wanted:
        return []
    of_groups: dict[
        tuple[Group, ...], str
    ] = {}  # device groups -> the first parameter that these groups have
    for name, groups in wanted.items():
        of_groups.setdefault(tuple(dict.fromkeys(groups)), name)
    found = [group for group in next(iter(of_groups)) if all(group in groups for groups in of_groups)]
    if not found:
        # Name two parameters that have no common group, or as few as possible.
        (there, first), (elsewhere, name) = min(
            itertools.combinations(of_groups.items(), 2), key=lambda pair: len({*pair[0][0]} & {*pair[1][0]})
        )
        region = dag.regions[chunk.region]
        advice = "Annotate its parts in the same way as in training_step"
        if dag.program.degrees is not None:
            advice = "Compute from the parameters of one stage at a time, in the modules that have them, or in a hook"
        raise DirectiveError(
            f"the code at {region.source} reads {first}, which is on device {_shown(there)}, and {name}, which is on "
            f"device {_shown(elsewhere)}. {advice} [PIPER-D025]"
        )
    return found


def _shown(groups: Sequence[Group]) -> str:
    return " or ".join(",".join(map(str, group)) for group in groups)


def _return_everywhere(dag: TrainingDAG, groups: list[Group]) -> None:
    """Give every device the step's return values and logged values."""
    for result in list(dag.of_type(Result)):
        others = [group for group in groups if group != result.devices]
        connect(dag, [dag.add(dataclasses.replace(result, id=-1, devices=group)) for group in others])
    dag.change(
        next(dag.of_type(StepReport)), devices=tuple(sorted({device for group in groups for device in group}))
    )
    connect_report(dag)
