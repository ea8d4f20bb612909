"""A program written for training, applied to a step without a backward pass: `validation_step`, `test_step`, `predict_step`.

What is kept is where the regions are: `place` and `replicate` (each replica has its local batch, and parameters are gathered from
the shards of training). What is left out is how the training step is cut up in time: `split` and `order`. An evaluation step needs
no microbatches, for it saves nothing for a backward pass, and on the whole batch its values are those of one device, whatever it
computes from them (a ratio, the exponential of a mean). The batch runs where the first microbatch runs: so a region with several
device groups (DualPipe) has one.

A forward-only step may have regions that the training step has not, or has under another annotation. Each directive is applied as
far as it matches. What no `place` matches then follows, in trace order:

1. its parameters: to the device group that has all of them, in training or in a region that is placed;
2. else its inputs: to the group of the region that makes the last one;
3. else its readers: to the group of the first region that reads what it makes;
4. else to the program's first device (or group).

What the step returns goes to all devices, of each replica what it has computed.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from lightning_piper.directives.place import Place
from lightning_piper.directives.program import Program
from lightning_piper.directives.split import Split
from lightning_piper.directives.transfers import connect, connect_report, place_around
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.metrics import Report
from lightning_piper.ops.results import Result
from lightning_piper.passes.base import Pass

Group = tuple[int, ...]


def forward_passes(program: Program, training: TrainingDAG | None = None) -> list[Pass]:
    """The passes that apply a training program to the DAG of a forward-only step.

    Args:
        training: the training step's finished DAG, if there is one: it says where parameters are.
    """
    early = [i for i, directive in enumerate(program) if isinstance(directive, Place | Split)]
    late = [i for i in range(len(program)) if i not in early]
    groups = _groups(program, training)
    rest = Pass("place the rest", "bitwise", partial(_place_rest, groups=groups, training=training), apart=False)
    passes: list[Pass] = []
    for index in [*early, *late]:
        directive = program[index]
        if directive.replica_groups():
            passes.append(rest)
        passes.append(Pass(directive.op, directive.contract, partial(directive.apply_forward, training=training), index))
    return [*passes, rest, Pass("return everywhere", "bitwise", partial(_return_everywhere, groups=groups), apart=False)]


def _groups(program: Program, training: TrainingDAG | None) -> list[Group]:
    """The device groups that regions have in training, or would have."""
    found = [directive.group for directive in program if isinstance(directive, Place)]
    found += [chunk.devices for chunk in training.of_type(Chunk)] if training is not None else []
    return list(dict.fromkeys(found))


def _place_rest(dag: TrainingDAG, groups: list[Group], training: TrainingDAG | None) -> None:
    """Give every chunk without a device one, by the rules above."""
    rest = [chunk for chunk in dag.of_type(Chunk) if not chunk.devices]
    if not groups or not rest:
        return
    if training is None and len(rest) == len(list(dag.of_type(Chunk))) and any(dag.interface(chunk).params for chunk in rest):
        found = ", ".join(dict.fromkeys(dag.regions[chunk.region].label for chunk in rest))
        raise DirectiveError(
            f"no place of the program selects a region of this step, which has {found}; annotate it as the training step is"
        )
    for chunk in rest:
        groups_of = _groups_of_params(dag, training)
        inputs = [dag.nodes[ref[0]].devices for ref in chunk.inputs if dag.nodes[ref[0]].devices]
        readers = [user.devices for user in dag.users(chunk) if isinstance(user, Chunk) and user.devices]
        near = [*reversed(inputs), *readers]
        having = _having(dag, chunk, groups_of)
        candidates = [group for group in near if group in having] or having or near or groups
        dag.change(chunk, devices=candidates[0])
        for (_, group), mesh in (training or dag).arranged.copy().items():
            if group == chunk.devices:
                dag.arranged.setdefault((chunk.region, group), mesh)
        place_around(dag, [chunk])


def _groups_of_params(dag: TrainingDAG, training: TrainingDAG | None) -> dict[str, list[Group]]:
    """Where each parameter is."""
    found: dict[str, list[Group]] = {}
    for source in [dag] if training is None else [training, dag]:
        for chunk in source.of_type(Chunk):
            for name in source.interface(chunk).params if chunk.devices else ():
                found.setdefault(name, []).append(chunk.devices)
    return found


def _having(dag: TrainingDAG, chunk: Chunk, groups_of: dict[str, list[Group]]) -> list[Group]:
    """The device groups that have all parameters that a chunk reads; those that no region has (yet) are left aside."""
    wanted = {name: groups_of[name] for name in dag.interface(chunk).params if name in groups_of}
    if not wanted:
        return []
    (first, there), *others = wanted.items()
    found = [group for group in dict.fromkeys(there) if all(group in other for _, other in others)]
    if not found:
        name, elsewhere = next((name, other) for name, other in others if not set(other) & set(there))
        region = dag.regions[chunk.region]
        raise DirectiveError(
            f"region {region.label} (begins at {region.source}) reads {first}, which is on device {_shown(there[0])}, and {name}, "
            f"which is on device {_shown(elsewhere[0])}; annotate its parts as the training step's are"
        )
    return found


def _shown(group: Group) -> str:
    return ",".join(map(str, group))


def _return_everywhere(dag: TrainingDAG, groups: list[Group]) -> None:
    """Let every device have what the step returns, and what it logs."""
    for result in list(dag.of_type(Result)):
        others = [group for group in groups if group != result.devices]
        connect(dag, [dag.add(dataclasses.replace(result, id=-1, devices=group)) for group in others])
    dag.change(next(dag.of_type(Report)), devices=tuple(sorted({device for group in groups for device in group})))
    connect_report(dag)
