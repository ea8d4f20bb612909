"""Tensor parallelism: the rewrite of `shard_weights` and `shard_sequences`. Ranks of an axis hold shards of
tensors.

    F[0] -> F[1] -> F[2]     --shard_weights over [0, 1]-->     F[0] -> F[1] @0,1, a shard each -> allreduce -> F[2]

`TensorSharding.prepare` cuts the step for this rewrite: regions end where the placement of a value must change. Until
the directive is applied, the passes run on whole tensors as on one device, without communication between
them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_piper.common.argument_names import did_you_mean
from lightning_piper.common.limits import shown
from lightning_piper.common.units import counted
from lightning_piper.directives.base import Directive
from lightning_piper.directives.group_sharding import Sharding
from lightning_piper.directives.place import Place, example_of
from lightning_piper.directives.rewrites.batch_sharding import shard_batch
from lightning_piper.directives.rewrites.sharded_parameters import hold_parts
from lightning_piper.directives.rewrites.sharding import (
    Conflict,
    gather_as_in_training,
    readers_of,
    reduce_gradients,
)
from lightning_piper.directives.rewrites.transfers import connect, disconnect
from lightning_piper.directives.sequence import OF_TENSORS
from lightning_piper.ir import sharded_values
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.division import Change, Division
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.policies import ShardingPolicy
from lightning_piper.ir.regions import PassKey, Step
from lightning_piper.ir.values import Kind, Replicated, Sharded, Value
from lightning_piper.ops.chunk import outputs_of
from lightning_piper.ops.communication.gather_samples import GatherSamples, ScatterSamples, exchanged
from lightning_piper.ops.communication.redistribute import CutOut, Redistribute, changed_specs, held_after
from lightning_piper.ops.communication.total import Total

Dimensions = Mapping[str, int | Sequence[int]]  # name or pattern -> dimension, or (dimension, number of runs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorSharding(Sharding):
    """A directive that shards weights, or the values between regions, along an axis.

    All devices of a line along the axis work on the same samples. Several such directives may divide other
    parameters and other dimensions along other axes of one mesh. Then all devices of a block of these axes work on
    the same samples. Piper propagates placements through the captured graph, and inserts a node where a placement
    must change. All regions must be placed on the lines. Piper applies the directive after `place` and `split`, and
    before `replicate`.

    Attributes:
        values: Labels of regions, or patterns -> the dimension along which their outputs are divided. None: the
            outputs are divided only where weights require it.
        attention: How attention works on shards of sequences.
    """

    values: Dimensions | None = None
    attention: str | None = None

    @property
    @abstractmethod
    def weights(self) -> Dimensions:
        """Names of parameters, or patterns -> the dimension along which each is divided."""

    def check_fields(self) -> None:
        check_tensors(self)
        super().check_fields()

    def prepare(self, step: Step, program: Sequence[Directive]) -> Step:
        return divided_step(self, step, program)

    def apply(self, dag: TrainingDAG) -> None:
        """Divide tensors, insert the exchanges, and let each device sum and update its shards. Raise an error if
        the directive does not fit the DAG."""
        self.check_not_offloaded(dag)
        take_parts(self, dag, self.mesh_of(dag, self.select(dag, "filter", self.filter)))

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """Divide tensors as in training. If there is a training step, parameters come from the shards that it
        keeps."""
        # The step may lack the regions of the filter. All regions are on the same lines.
        chunks = self.select(dag, "filter", self.filter) or list(dag.of_type(Chunk))
        take_parts(self, dag, self.mesh_of(dag, chunks), training)

    def member_lines(self, program: Sequence[Directive]) -> Sequence[Sequence[int]]:
        return blocks_of(self, program)

    def dividing_axes(self, dag: TrainingDAG) -> tuple[str, ...]:
        return tuple(division.axis for division in dag.step.divisions)


def check_tensors(directive: TensorSharding) -> None:
    """Check the fields `params`, `values` and `attention`. Raise an error if one is not
    valid."""
    fields: dict[str, Any] = {"params": directive.weights, "values": directive.values}
    if directive.values is None:
        del fields["values"]
    for field, given in fields.items():
        if not isinstance(given, Mapping) or not all(
            isinstance(k, str) and _is_placement(v) for k, v in given.items()
        ):
            example = '{"*.q_proj.weight": 0}' if field == "params" else '{"PP=0": 1}'
            what = "parameters" if field == "params" else "regions"
            directive.refuse(
                field,
                f"{shown(given)} does not map names of {what} to dimensions",
                f"give names or patterns with dimensions counted from 0, such as {example} [PIPER-D003]",
            )
    if directive.attention is not None and str(directive.attention) not in ("keys", "heads", "ring"):
        directive.refuse(
            "attention",
            f"{shown(directive.attention)} is unknown",
            "give 'keys', 'heads' or 'ring' [PIPER-D003]",
        )
    if directive.attention is not None and directive.values is None:
        directive.refuse(
            "attention",
            f"{directive.attention!r} needs sharded values",
            "shard sequences: values={'*': 1} [PIPER-D017]",
        )


def _is_dimension(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_placement(value: Any) -> bool:
    """Return whether `value` is a dimension, or a pair of a dimension and a number of blocks (`Sharded.blocks`)."""
    if isinstance(value, Sequence) and len(value) == 2:
        return _is_dimension(value[0]) and type(value[1]) is int and value[1] > 0
    return _is_dimension(value)


def _part(said: int | Sequence[int]) -> Sharded:
    """Return the placement for an entry of `params` or `values`: a dimension, or (dimension, number of
    runs)."""
    return Sharded(said) if isinstance(said, int) else Sharded(*said)


def divided_step(directive: TensorSharding, step: Step, program: Sequence[Directive]) -> Step:
    """Return the step cut where placements change, if `directive` is the last one that divides tensors.

    The last directive cuts the step for all directives that divide tensors. For an earlier directive, this
    function only checks the fields and returns the step unchanged. Raise an error if an axis has fewer than
    two devices, or if `directive` does not fit the step or an earlier directive.
    """
    divisions = []
    blocks_of(directive, program)
    for other in _dividing(program):
        degree = len(lines_of(other, program)[0])
        if degree < 2:
            found = f"there is only one device along {other.axis!r}"
            directive.refuse("axis", found, "give the axis two or more devices [PIPER-D017]")
        values = {pattern: _part(said) for pattern, said in (other.values or {}).items()}
        divisions.append(
            Division(other.axis, degree, _params(other, step, degree), values, other.stream, other.attention)
        )
        if other is directive:
            break  # later directives report their own errors
    _check_together(directive, divisions)
    return step.divided(tuple(divisions)) if len(divisions) == len(_dividing(program)) else step


def _dividing(program: Sequence[Directive]) -> list[TensorSharding]:
    """Return the directives of a program that divide tensors."""
    found: list[Any] = [each for each in program if each.op in OF_TENSORS]
    return found


def _check_together(directive: TensorSharding, divisions: Sequence[Division]) -> None:
    """Raise an error if the last division, which is of `directive`, shards the same parameter as an earlier
    division, or the same dimension of values."""
    *earlier, mine = divisions
    for other in earlier:
        if both := sorted(mine.params.keys() & other.params.keys()):
            found = f"an earlier directive shards {both[0]} along {other.axis!r}"
            directive.refuse("params", found, "shard each parameter along one axis only [PIPER-D017]")
        if dims := {part.dim for part in mine.values.values()} & {part.dim for part in other.values.values()}:
            found = f"an earlier directive shards dimension {min(dims)} of values along {other.axis!r}"
            directive.refuse("values", found, "shard each dimension along one axis only [PIPER-D017]")


def blocks_of(directive: TensorSharding, program: Sequence[Directive]) -> list[tuple[int, ...]]:
    """Return the groups of devices that work on the same samples: blocks along all axes that divide
    tensors.
    """
    return lines_of(directive, program, _axes_of(directive, program))


def _axes_of(directive: TensorSharding, program: Sequence[Directive]) -> list[str]:
    """Return the axes along which a program divides tensors. Raise an error if several directives have the
    axis of `directive`."""
    axes = [other.axis for other in _dividing(program)]
    if axes.count(directive.axis) > 1:
        found = f"several directives shard tensors along {directive.axis!r}"
        directive.refuse("axis", found, "combine them into one directive [PIPER-D017]")
    return axes


def lines_of(
    directive: TensorSharding, program: Sequence[Directive], axes: Sequence[str] = ()
) -> list[tuple[int, ...]]:
    """Return the lines of devices along the directive's axis, in all groups: the field `devices`, or else the
    lines of the meshes that the program's `place` directives give. Raise an error if there are none.

    With several `axes`, which include the directive's axis, return the blocks along these axes.
    """
    axes = axes or [directive.axis]
    replicas = ["dp"] if any(each.op == "replicate" for each in program) else []
    if directive.devices is not None:
        if len(_dividing(program)) > 1:
            named = [*replicas, *dict.fromkeys(each.axis for each in _dividing(program))]
            directive.refuse(
                "devices",
                f"{len(_dividing(program))} directives shard tensors, and their devices do not show how they form "
                "one mesh",
                f"place the chunks on a mesh with the axes {named}, such as {example_of(named)}, and give devices "
                "to none of these directives [PIPER-D017]",
            )
        return directive.groups()
    found: list[tuple[int, ...]] = []
    for index, place in enumerate(program):
        if isinstance(place, Place) and directive.axis in place.axes:
            if missing := [axis for axis in axes if axis not in place.axes]:
                wanted = [*replicas, *axes]
                directive.refuse(
                    "axis",
                    f"directive {index} (place) has only the axes {list(place.axes)}, but another directive shards "
                    f"tensors along {missing[0]!r}",
                    f"give directive {index} a mesh with the axes {wanted}, such as {example_of(wanted)} "
                    "[PIPER-D017]",
                )
            found += [tuple(place.group[p] for p in block) for block in place.mesh.blocks(axes)]
    if found:
        return found
    directive.refuse(
        "axis",
        f"no place of the program has an axis {directive.axis!r}",
        f"place the chunks on a mesh with this axis, such as {example_of([*replicas, *axes])} [PIPER-D017]",
    )


def _params(directive: TensorSharding, step: Step, degree: int) -> dict[str, Sharded]:
    """Return, by canonical name, the division of each parameter that a pattern of the directive matches. If
    several patterns match, the last one counts. Raise an error if a pattern matches nothing, or if the
    dimension cannot be divided evenly."""
    found: dict[str, Sharded] = {}
    for pattern, said in directive.weights.items():
        names = [
            name
            for name, info in step.params.items()
            if any(fnmatch.fnmatchcase(n, pattern) for n in (name, *info.aliases))
        ]
        if not names:
            matrices = [name for name, info in step.params.items() if len(info.spec.shape) == 2]
            some = ", ".join((matrices or list(step.params))[:3])
            near = did_you_mean(pattern, step.params)
            directive.refuse(
                "params",
                f"{shown(pattern)} matches no parameter",
                f"give a name or pattern of parameters, such as {some}{near} [PIPER-D004]",
            )
        found |= dict.fromkeys(names, _part(said))
    for name, part in found.items():
        shape = step.params[name].spec.shape
        if part.dim >= len(shape) or shape[part.dim] % (degree * part.blocks):
            runs = f" in each of {part.blocks} runs" if part.blocks > 1 else ""
            found_no = (
                f"{name} has shape {list(shape)}, whose dimension {part.dim} cannot be sharded evenly{runs} over "
                f"{degree} devices"
                if part.dim < len(shape)
                else f"{name} has shape {list(shape)}, which does not have a dimension {part.dim}"
            )
            even = [str(dim) for dim, size in enumerate(shape) if size and size % (degree * part.blocks) == 0]
            # Few operations work on shards of a tensor that is not a matrix.
            advice = (
                f"give it dimension {' or '.join(even)}"
                if even and len(shape) == 2
                else f"leave {name} out of params"
            )
            directive.refuse("params", found_no, f"{advice} [PIPER-D017]")
    return found


def take_parts(
    directive: TensorSharding, dag: TrainingDAG, mesh: Mesh, training: TrainingDAG | None = None
) -> None:
    """Let ranks hold shards of tensors along all axes, and insert the communication that changes placements
    between passes. For a second directive of a program, this function only checks its fields. Raise an error
    if the directive does not fit the DAG.

    A forward-only step reads parameters as `training` stores them, if there is a training DAG.
    """
    if not dag.step.divisions:
        directive.refuse(
            "filter",
            "the step was captured without this directive, so its tensors are whole",
            "compile the whole program at once [PIPER-D018]",
        )
    if dag.replicas > 1 and not dag.member_axes:
        directive.refuse(
            "filter",
            "the batch is divided over replicas already",
            "move this directive before every replicate [PIPER-D007]",
        )
    _check_selected(directive, dag)
    labels = list(dict.fromkeys(region.label for region in dag.regions))
    for pattern in (directive.values or {}) if not dag.forward_only else ():
        if not fnmatch.filter(labels, pattern):
            directive.refuse(
                "values",
                f"{shown(pattern)} matches no region",
                f"give a label or pattern of regions, such as {', '.join(labels[:3])} [PIPER-D004]",
            )
    _check_divided(directive, dag)
    if dag.member_axes:
        return  # an earlier directive has rewritten the DAG for all axes
    whole = [chunk for chunk in dag.of_type(Chunk) if len(chunk.devices) != len(mesh.group_ranks)]
    if whole:
        directive.refuse(
            "devices",
            f"{whole[0].label} is on {list(whole[0].devices)}, but the mesh has {len(mesh.group_ranks)} devices"
            if whole[0].devices
            else f"{whole[0].label} is not placed yet",
            f"place every region on groups of {len(mesh.group_ranks)} devices [PIPER-D005]",
        )
    shard_batch(dag, mesh, directive)
    sharded_values.take_parts(dag, training)
    chunks = list(dag.of_type(Chunk))
    disconnected = disconnect(dag, chunks)
    made: dict[tuple[PassKey, int], tuple[Value, ...]] = {}
    for chunk in chunks:
        if (at := (chunk.key, len(chunk.slice))) not in made:
            made[at] = outputs_of(dag, chunk.key, chunk.slice)
        dag.change(chunk, outputs=made[at])
    _follow(dag, chunks)
    streams = {division.axis: division.stream for division in dag.step.divisions}
    changed = [node for chunk in chunks for node in _change(dag, chunk, streams)]
    touched: list[Node] = [
        *disconnected,
        *chunks,
        *changed,
        *(user for node in changed for user in dag.users(node)),
    ]
    try:
        if training is not None:
            gather_as_in_training(dag, training)
        else:
            touched += hold_parts(dag, {chunk.region for chunk in chunks})
        # With several replicas, a `replicate` sums gradients over ranks and replicas together.
        if dag.replicas == 1:
            touched += reduce_gradients(dag, {chunk.region for chunk in chunks}, ShardingPolicy())
    except Conflict as conflict:
        advice = conflict.advice or "select all regions that use these parameters"
        directive.refuse("filter", str(conflict), f"{advice} [PIPER-D017]")
    connect(dag, [node for node in touched if node.id in dag.nodes])


def _check_divided(directive: TensorSharding, dag: TrainingDAG) -> None:
    """Raise an error if no output of a region has a dimension that the directive divides."""
    ranks = {
        len(specs[0].shape)
        for key, interface in dag.code.interfaces.items()
        for output, specs in zip(interface.outputs, dag.code.code[key].outputs, strict=True)
        if output.kind == Kind.ACTIVATION
    }
    dims = {_part(said).dim for said in (directive.values or {}).values()}
    written = directive.written_for is not None
    if dims and not ranks and not directive.weights and not dag.forward_only:
        found = "the step is one region, so it has no values between regions to shard"
        advice = f"annotate parts of the step, such as the layers{', or leave cp out' if written else ''}"
        directive.refuse("values", found, f"{advice} [PIPER-D017]")
    if dims and ranks and min(dims) >= max(ranks):
        found = (
            f"no region outputs a value with a dimension {min(dims)}, because the outputs of all regions have "
            f"at most {counted(max(ranks), 'dimension')}"
        )
        advice = "name another dimension: positions are dimension 1 of [samples, positions, features]"
        if written:
            advice = "leave cp out, because the step has no sequences to shard"
        directive.refuse("values", found, f"{advice} [PIPER-D017]")


def _check_selected(directive: TensorSharding, dag: TrainingDAG) -> None:
    """Raise an error if the filter does not select all regions that read a divided parameter."""
    selected = {chunk.region for chunk in directive.select(dag, "filter", directive.filter)}
    readers = readers_of(dag)
    for name in (name for name, (axis, _) in dag.code.divided.items() if axis == directive.axis):
        for region in sorted(readers[name] - selected):
            found = f"{dag.regions[region].label} also reads {name}, but the filter does not select it"
            directive.refuse(
                "filter", found, f"select all regions that read {name}. {{}} selects all regions [PIPER-D017]"
            )


def _follow(dag: TrainingDAG, chunks: Sequence[Chunk]) -> None:
    """Copy the changed specs and placements of the chunks' outputs to the nodes that forward or sum them."""
    stack: list[Node] = [user for chunk in chunks for user in dag.users(chunk)]
    while stack:
        node = stack.pop()
        if isinstance(node, Chunk) or not node.inputs or not node.outputs:
            continue
        value = dag.value(node.inputs[0])
        old = node.outputs[0]
        if (
            value.kind in (Kind.GRAD, Kind.ACTIVATION, Kind.COTANGENT)
            and old.bucket is None
            and len(node.outputs) == 1
        ):
            if isinstance(node, GatherSamples | ScatterSamples):
                new = exchanged(dag, node)  # it has other samples than its input
            else:
                placement = old.placement if isinstance(node, Total) else value.placement
                new = dataclasses.replace(
                    old, tensors=value.tensors, placement=placement, others=value.others
                )
            if new != old:
                dag.change(node, outputs=(new,))
                stack += dag.users(node)


def _change(dag: TrainingDAG, chunk: Chunk, streams: Mapping[str, str]) -> list[Node]:
    """Insert the placement changes that the readers of a chunk's outputs need, and return the new nodes.
    `streams` maps an axis to the logical stream of its exchanges."""
    made: list[Node] = []
    for i, output in enumerate(dag.interface(chunk).outputs):
        readers = dag.readers((chunk.id, i))
        if not output.changes or not readers:
            continue
        ref = (chunk.id, i)
        for change in output.changes:
            node = _changed(dag, chunk, ref, change, streams[change.axis])
            made.append(node)
            ref = (node.id, 0)
        for reader in readers:
            dag.substitute(reader, (chunk.id, i), ref)
    return made


def _changed(dag: TrainingDAG, chunk: Chunk, ref: Ref, change: Change, stream: str) -> Redistribute:
    """Insert a node that changes the placement of `ref`, a value from an output of a chunk. Return the
    node."""
    value = dag.value(ref)
    about = {"before": change.before, "after": change.after, "mesh": dag.mesh, "axis": change.axis}
    specs = changed_specs(value.tensors, change.before, change.after, dag.mesh.size(change.axis))
    changed = dataclasses.replace(
        value, tensors=specs, others=held_after(value.others, change.axis, change.after)
    )
    kind = CutOut if isinstance(change.before, Replicated) else Redistribute
    tags = {tag: index for tag, index in chunk.tags.items() if tag != "PASS"}
    return dag.add(
        kind(
            inputs=(ref,),
            outputs=(changed,),
            tags=tags,
            devices=chunk.devices,
            placed_by=dag.origin,
            stream="compute" if kind is CutOut else stream,
            **about,  # type: ignore[arg-type]
        )
    )
