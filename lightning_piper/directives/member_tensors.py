"""Tensors that the members of an axis have parts of: what a `shard` with `params` does to a training DAG.

    F[0] -> F[1] -> F[2]     --take parts over [0, 1]-->     F[0] -> F[1] @0,1, a part each -> allreduce -> F[2]

The step is captured for it (`prepare`): it is cut where members change what they hold of a value. Until the directive is applied,
its passes run on all of every tensor, as one device does, and nothing is done between them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_piper.directives.base import Directive
from lightning_piper.directives.batch_sharding import shard_batch
from lightning_piper.directives.divided import hold_parts
from lightning_piper.directives.place import Place
from lightning_piper.directives.sharding import Conflict, gather_as_in_training, readers_of, reduce_gradients
from lightning_piper.directives.transfers import connect, disconnect
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.division import Division
from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.policies import ShardingPolicy
from lightning_piper.ir.regions import Step
from lightning_piper.ir.values import Kind, Partial, Placement, Replicate, Value
from lightning_piper.ir.values import Shard as Part
from lightning_piper.limits import shown
from lightning_piper.ops.chunk import make_chunk
from lightning_piper.ops.p2p import Recv, Send
from lightning_piper.ops.redistribute import CutOut, Redistribute, changed_specs

if TYPE_CHECKING:
    from lightning_piper.directives.shard import Shard


def check_tensors(directive: Shard) -> None:
    for field in ("params", "values"):
        given: Any = getattr(directive, field)
        if given is None:
            continue
        says = _is_dimension if field == "values" else _is_placement
        if not isinstance(given, Mapping) or not all(isinstance(k, str) and says(v) for k, v in given.items()):
            directive.refuse(field, shown(given), 'give names, or patterns, with dimensions: {"*.q_proj.weight": 0}')
    if directive.attention not in (None, "keys", "heads"):
        directive.refuse("attention", shown(directive.attention), "give 'keys' or 'heads'")
    if directive.attention is not None and directive.values is None:
        directive.refuse("attention", "no values are divided", "divide sequences: values={'*': 1}")


def _is_dimension(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_placement(value: Any) -> bool:
    """A dimension, or one with a number of runs."""
    if isinstance(value, Sequence) and len(value) == 2:
        return _is_dimension(value[0]) and type(value[1]) is int and value[1] > 0
    return _is_dimension(value)


def divided_step(directive: Shard, step: Step, program: Sequence[Directive]) -> Step:
    """The step, cut for this directive."""
    degree = len(lines_of(directive, program)[0])
    division = Division(directive.axis, degree, _params(directive, step, degree), dict(directive.values or {}), directive.attention)
    if step.division is None:
        return step.divided(division)
    if step.division != division:
        directive.refuse("params", f"another directive divides tensors along {step.division.axis!r}", "say all in one directive")
    return step


def lines_of(directive: Shard, program: Sequence[Directive]) -> list[tuple[int, ...]]:
    """The lines of devices along the axis, of all groups."""
    if directive.devices is not None:
        return directive._groups()
    found = []
    for place in program:
        if isinstance(place, Place) and directive.axis in place.axes:
            found += [tuple(place.group[p] for p in line) for line in place.mesh.lines(directive.axis)]
    if found:
        return found
    directive.refuse(
        "axis", f"no place of the program has an axis {directive.axis!r}", "name one in place(axes=...), or give devices"
    )


def _params(directive: Shard, step: Step, degree: int) -> dict[str, Part]:
    """How each parameter is divided, by its canonical name. Later patterns win."""
    found: dict[str, Part] = {}
    for pattern, said in (directive.params or {}).items():
        names = [
            name for name, info in step.params.items()
            if any(fnmatch.fnmatchcase(n, pattern) for n in (name, *info.aliases))
        ]  # fmt: skip
        if not names:
            some = ", ".join(list(step.params)[:3])
            directive.refuse("params", f"{shown(pattern)} matches no parameter", f"the module has {some}, ...")
        found |= dict.fromkeys(names, Part(said) if isinstance(said, int) else Part(*said))
    for name, part in found.items():
        shape = step.params[name].spec.shape
        if part.dim >= len(shape) or shape[part.dim] % (degree * part.blocks):
            have, runs = f"{name} has shape {list(shape)}", f" of {part.blocks} runs" if part.blocks > 1 else ""
            directive.refuse(
                "params", f"{have}: {degree} devices cannot have equal parts{runs} along dimension {part.dim}", "give another one"
            )
    return found


def take_parts(directive: Shard, dag: TrainingDAG, mesh: Mesh, training: TrainingDAG | None = None) -> None:
    """Let the members of the axis have their parts of tensors, and change what they hold between passes. A step without a backward
    pass reads parameters as `training` keeps them, if there is one."""
    if dag.step.division is None:
        directive.refuse("params", "the step was captured without it", "apply it as a part of the whole program")
    if dag.replicas > 1 and dag.member_axis is None:
        directive.refuse("filter", "the batch is divided over replicas already", "put the shard before every replicate")
    if dag.member_axis is not None:
        directive.refuse("filter", "tensors are divided already", "say all in one directive")
    if dag.meshes:
        directive.refuse("filter", "experts are divided", "divide experts or tensors in a program, not both")
    _check_selected(directive, dag)
    labels = list(dict.fromkeys(region.label for region in dag.regions))
    for pattern in (directive.values or {}) if not dag.forward_only else ():
        if not fnmatch.filter(labels, pattern):
            directive.refuse("values", f"{shown(pattern)} matches no region", f"the step has {', '.join(labels[:3])}")
    whole = [chunk for chunk in dag.of_type(Chunk) if len(chunk.devices) != len(mesh.places)]
    if whole:
        where = f"on {list(whole[0].devices)}" if whole[0].devices else "on no device yet"
        directive.refuse("devices", f"{whole[0].label} is {where}", f"place every region on groups of {len(mesh.places)} devices")
    shard_batch(dag, mesh, directive)
    dag.take_parts(directive.axis, training)
    chunks = list(dag.of_type(Chunk))
    disconnected = disconnect(dag, chunks)
    for chunk in chunks:
        dag.change(chunk, outputs=make_chunk(dag, chunk.key, chunk.slice, (), {}).outputs)
    _follow(dag, chunks)
    changed = [node for chunk in chunks for node in _change(dag, chunk, directive.stream)]
    touched: list[Node] = [*disconnected, *chunks, *changed, *(user for node in changed for user in dag.users(node))]
    try:
        if training is not None:
            gather_as_in_training(dag, training)
        else:
            touched += hold_parts(dag, {chunk.region for chunk in chunks})
        if dag.replicas == 1:  # else a replicate sums them with the batch
            touched += reduce_gradients(dag, {chunk.region for chunk in chunks}, ShardingPolicy())
    except Conflict as conflict:
        directive.refuse("filter", str(conflict), "select all regions that use it")
    connect(dag, [node for node in touched if node.id in dag.nodes])


def _check_selected(directive: Shard, dag: TrainingDAG) -> None:
    """The filter selects all that reads what is divided: what follows from it is divided wherever it goes."""
    selected = {chunk.region for chunk in directive.select(dag, "filter", directive.filter)}
    readers = readers_of(dag)
    for name in dag.code.divided:
        for region in sorted(readers[name] - selected):
            found = f"{name} is read in {dag.regions[region].label} too, which it does not select"
            directive.refuse("filter", found, "select all regions that use it, such as {}")


def _follow(dag: TrainingDAG, chunks: Sequence[Chunk]) -> None:
    """What hands on what chunks make, or sums it, has it as they make it now."""
    stack: list[Node] = [user for chunk in chunks for user in dag.users(chunk)]
    while stack:
        node = stack.pop()
        if isinstance(node, Chunk) or not node.inputs or not node.outputs:
            continue
        value = dag.value(node.inputs[0])
        old = node.outputs[0]
        if value.kind in (Kind.GRAD, Kind.ACTIVATION, Kind.COTANGENT) and old.bucket is None and len(node.outputs) == 1:
            new = dataclasses.replace(old, tensors=value.tensors, placement=value.placement, others=value.others)
            if new != old:
                dag.change(node, outputs=(new,))
                stack += dag.users(node)


def _change(dag: TrainingDAG, chunk: Chunk, stream: str) -> list[Node]:
    """Put a change behind each output whose readers want another placement than it has."""
    made: list[Node] = []
    for i, output in enumerate(dag.interface(chunk).outputs):
        readers = dag.readers((chunk.id, i))
        if output.change is None or not readers:
            continue
        before, after = output.change
        value = chunk.outputs[i]
        specs = changed_specs(value.tensors, before, after, dag.mesh.size(dag.member_axis or ""))
        changed = dataclasses.replace(value, tensors=specs, others=_others(dag, after))
        kind = CutOut if isinstance(before, Replicate) else Redistribute
        tags = {tag: index for tag, index in chunk.tags.items() if tag != "PASS"}
        node = dag.add(
            kind(inputs=((chunk.id, i),), outputs=(changed,), tags=tags, devices=chunk.devices, placed_by=dag.origin,
                 stream="compute" if kind is CutOut else stream, before=before, after=after, mesh=dag.mesh,
                 axis=dag.member_axis or "")
        )  # fmt: skip
        for reader in readers:
            dag.substitute(reader, (chunk.id, i), (node.id, 0))
        made.append(node)
    return made


def _others(dag: TrainingDAG, placement: Placement) -> tuple[tuple[str, Placement], ...]:
    return () if isinstance(placement, Replicate) or dag.member_axis is None else ((dag.member_axis, placement),)


__all__ = ["DATA", "Partial", "Recv", "Ref", "Send", "Value", "check_tensors", "divided_step", "take_parts"]
