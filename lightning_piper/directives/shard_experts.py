"""`shard_experts`: expert parallelism. It divides the experts of a region over devices, and tokens travel to the
experts and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from lightning_piper.directives.base import register
from lightning_piper.directives.group_sharding import Sharding
from lightning_piper.directives.place import example_of
from lightning_piper.directives.rewrites.batch_sharding import shard_batch
from lightning_piper.directives.rewrites.sharded_parameters import hold_parts
from lightning_piper.directives.rewrites.sharding import Conflict, gather_as_in_training, readers_of
from lightning_piper.directives.rewrites.transfers import connect
from lightning_piper.ir import values
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN, selecting
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.regions import Output, Routed
from lightning_piper.ir.values import Kind, Slice, TensorSpec, Value
from lightning_piper.ops.chunk import outputs_of
from lightning_piper.ops.communication.all_to_all import AllToAll
from lightning_piper.routing import COMBINE, COUNTS, DISPATCH

ROWS = "pass a tensor with one row for each token through piper.dispatch, and use any other tensor after piper.combine"


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardExperts(Sharding):
    """Divide the experts of the regions that `filter` selects over the devices of a group.

        F[EP=0] @0,1     --shard_experts-->     all-to-all -> F[EP=0], half of the experts on each @0,1 -> all-to-all

    Attributes:
        filter: Selects chunks (default: all chunks). A `place` must put them on the groups. Only regions between
            `piper.dispatch` and `piper.combine` are divided. Operations with the same annotation before or
            after such a region are not.
        devices: One group, `[0, 1]`, or a list of groups, `[[0, 1], [2, 3]]`. Each group has all experts, and
            device i of n has the i-th of n equal parts. A stage on `[0, 1, 2, 3]` may have its experts twice,
            on `[0, 1]` and on `[2, 3]`. Default: the lines along `axis` of the mesh on which chunks are
            placed. Without a mesh, the groups on which the program places chunks.
        axis: The name of the axis along which the experts are divided (default: "ep").
        stream: The logical stream of the exchanges of tokens (default: "alltoall").

    Every device works on its own local batch, as with a `replicate` over the same devices. In a divided region, a
    parameter whose first dimension is the number of experts is divided, with its gradient and optimizer state.
    The devices that hold the same experts sum these gradients, and shard the optimizer state further.

    The gradients of all other parameters are summed as the `replicate` of their region says. The `replicate`
    may come before or after this directive. Its levels (shard_grads, shard_params) also apply to the experts,
    over the devices that hold the same experts.

    The gradient of an expert is a sum over the tokens of all devices, so it is equal up to reassociation.
    """

    op: ClassVar[str] = "shard_experts"

    axis: str = "ep"
    stream: str = "alltoall"

    def apply(self, dag: TrainingDAG) -> None:
        """Divide experts, insert the exchanges of tokens, and let each device sum and update its experts.
        Raise an error if the directive does not fit the DAG."""
        self.check_not_offloaded(dag)
        regions = self._divide(dag, {chunk.region for chunk in self.select(dag, "filter", self.filter)})
        try:
            connect(dag, hold_parts(dag, regions))
        except Conflict as conflict:
            advice = conflict.advice or "give regions that share parameters the same replicate options"
            self.refuse(
                "filter",
                str(conflict),
                f"{advice} [PIPER-D017]",
            )

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """Divide experts as in training. If there is a training step, parameters come from the shards that
        the training step keeps. Do nothing if the selected regions do not have experts to divide."""
        selected = {chunk.region for chunk in self.select(dag, "filter", self.filter)}
        if not selected & dag.code.routed.keys():
            return
        if training is None:
            self.apply(dag)
            return
        self._divide(dag, selected)
        gather_as_in_training(dag, training)

    def dividing_axes(self, dag: TrainingDAG) -> tuple[str, ...]:
        return (self.axis, *(division.axis for division in dag.step.divisions))

    def _divide(self, dag: TrainingDAG, selected: set[int]) -> list[int]:
        """Divide the experts of the `selected` regions and insert the exchanges of tokens. Return the
        selected regions that have experts. Raise an error if no selected region has experts, or if the
        experts cannot be divided."""
        if len(dag.member_axes) < len(dag.step.divisions):
            self.refuse(
                "filter",
                "a later directive shards weights or sequences",
                "move this directive after it [PIPER-D007]",
            )
        regions = sorted(selected & dag.code.routed.keys())
        if not regions and dag.code.routed:
            labels = ", ".join(sorted({dag.regions[r].label for r in selected})[:3])
            self.refuse(
                "filter",
                f"the filter selects only regions without experts: {labels}",
                f"select the experts, with the filter {selecting(dag, dag.code.routed.keys())} [PIPER-D016]",
            )
        if not regions:
            self.refuse(
                "filter",
                "no region of the step dispatches tokens to experts",
                "mark where tokens enter and leave the experts, with piper.dispatch and piper.combine"
                " [PIPER-D016]",
            )
        chunks = {region: [c for c in dag.of_type(Chunk) if c.region == region] for region in regions}
        for chunk in (
            chunk for found in chunks.values() for chunk in found if chunk.tags.get("PASS") == AGAIN
        ):
            says = f"{chunk.label} is the second forward pass that directive {chunk.origin} makes"
            self.refuse("filter", says, "move this directive before the recompute [PIPER-D007]")
        if dag.step.divisions and self.devices is not None:
            axes = [*(division.axis for division in dag.step.divisions), self.axis]
            self.refuse(
                "devices",
                "another directive shards weights or sequences",
                f"place the chunks on a mesh with the axes {axes}, such as {example_of(axes)}, and leave devices out "
                "[PIPER-D017]",
            )
        mesh = self.mesh_of(dag, [chunk for found in chunks.values() for chunk in found])
        for region in regions:
            self._check_region(dag, region, mesh.size(self.axis))
        self._check_shared(dag, regions, mesh)
        shard_batch(dag, dag.mesh if dag.member_axes else Mesh.flat(len(mesh.group_ranks)), self)
        dag.divide(dict.fromkeys(regions, mesh))
        for found in chunks.values():
            self._exchange(dag, found, mesh)
        return regions

    def _check_region(self, dag: TrainingDAG, region: int, degree: int) -> None:
        """Check that the experts of a region can be divided over `degree` devices.

        Raises:
            DirectiveError: The experts are divided already or cannot be divided evenly, or the region does
                more than work on dispatched rows.
        """
        experts = dag.code.routed[region]
        label = f"region {dag.regions[region].label} ({dag.regions[region].source})"
        if region in dag.meshes:
            self.refuse(
                "filter",
                f"the experts of {label} are already sharded",
                "shard each region only once [PIPER-D016]",
            )
        if experts.count % degree:
            self.refuse(
                "devices",
                f"the {experts.count} experts of {label} cannot be divided evenly over {degree} devices",
                f"{'use a number of devices' if self.written_for is None else 'give an ep'} that divides "
                f"{experts.count} [PIPER-D016]",
            )
        if not experts.params:
            self.refuse(
                "filter",
                f"{label} reads no parameter whose first dimension is its number of experts, {experts.count}",
                "annotate the experts together with dispatch and combine, and keep their weights in "
                f"parameters of shape [{experts.count}, ...] [PIPER-D016]",
            )
        for (of, kind), interface in dag.code.interfaces.items():
            if of != region:
                continue
            if interface.random:
                found = f"{label} draws random numbers, which would go to other tokens if experts are sharded"
                self.refuse(
                    "filter",
                    found,
                    "move the random operation, such as dropout, out of the region [PIPER-D016]",
                )
            if interface.batch:
                self.refuse(
                    "filter",
                    f"{label} reads tensors of the batch, but its tokens are on other devices",
                    f"{ROWS} [PIPER-D016]",
                )
            entering = zip(interface.inputs, interface.arrives, strict=True)
            received = [
                dag.code.interface_of(ref[:2]).outputs[ref[2]]
                for ref, direction in entering
                if not direction and ref[0] != region
            ]
            returned = [
                out
                for out, direction in zip(interface.outputs, interface.leaves, strict=True)
                if not direction and out.kind not in (Kind.SAVED, Kind.GRAD)
            ]
            if direct := received or returned:
                # A backward pass receives what its forward pass returns, as gradients.
                enters = bool(received) == (kind == "F")
                self._refuse_direct(label, enters, direct)

    def _refuse_direct(self, label: str, enters: bool, direct: Sequence[Output]) -> NoReturn:
        """Raise the error for the values `direct`, which enter or leave the experts without an exchange."""
        # The directives that shard tensors have put a change of placements into the region.
        if any(out.names[0].startswith("change") for out in direct):
            self.refuse(
                "filter",
                f"{label} has a change of sharding inside, which another directive needs",
                "change the dimension of the parameters of this region in that directive's params, or leave them out "
                "[PIPER-D016]",
            )
        names = ", ".join(out.names[0] for out in direct[:3])
        if enters:
            found = f"{label} reads {names} without dispatch"
            advice = ROWS
        else:
            found = f"{label} returns {names} without combine"
            advice = "pass each tensor that leaves the region through piper.combine"
        self.refuse(
            "filter",
            f"{found}, but the tokens in this region are on other devices and in another order",
            f"{advice} [PIPER-D016]",
        )

    def _check_shared(self, dag: TrainingDAG, regions: Sequence[int], mesh: Mesh) -> None:
        """Raise an error if another region that reads a divided parameter is not divided in the same way, or
        if the experts of a parameter are not contiguous in memory.
        """
        readers = readers_of(dag)
        for name in dict.fromkeys(name for region in regions for name in dag.code.routed[region].params):
            for other in sorted(readers[name]):
                mine = other in regions or dag.meshes.get(other) == mesh
                routed = dag.code.routed.get(other)
                if routed is None or name not in routed.params:
                    self.refuse(
                        "filter",
                        f"region {dag.regions[other].label} also uses {name!r}, but not as a weight of experts",
                        f"give this region a parameter of its own instead of {name!r} [PIPER-D016]",
                    )
                if not mine:
                    self.refuse(
                        "filter",
                        f"region {dag.regions[other].label} also uses {name!r}, but this directive does not select "
                        "the region",
                        f"select all regions that use {name!r} [PIPER-D016]",
                    )
            spec = dag.step.params[name].spec
            if spec.dim_order[0] != 0:
                self.refuse(
                    "filter",
                    f"{name} has strides {list(spec.stride)}, which interleave its experts in memory",
                    "create it as a contiguous tensor with the experts in its first dimension [PIPER-D016]",
                )

    def _exchange(self, dag: TrainingDAG, chunks: Sequence[Chunk], mesh: Mesh) -> None:
        """Insert exchanges of rows before and after the chunks of one region. If experts may get different
        numbers of rows, also insert one exchange of counts for each slice. Give the chunks' outputs the specs
        for divided experts."""
        experts = dag.code.routed[chunks[0].region]
        routes: dict[Slice, tuple[Ref, ...]] = {}  # slice -> (counts before their exchange, counts after it)
        for chunk in sorted(chunks, key=lambda c: (c.kind != "F", c.id)):
            interface, whole = dag.interface(chunk), chunk.outputs
            if chunk.slice not in routes and not experts.even:
                counts = chunk.inputs[interface.arrives.index(COUNTS)]
                arrived = self._all_to_all(
                    dag, chunk, COUNTS, (counts,), self._counts(dag.value(counts), experts, mesh), mesh
                )
                routes[chunk.slice] = (counts, arrived)
            route = routes.get(chunk.slice, ())
            dag.change(chunk, outputs=outputs_of(dag, chunk.key, chunk.slice))
            inputs = []
            for ref, direction in zip(chunk.inputs, interface.arrives, strict=True):
                if direction == COUNTS:
                    ref = route[1]
                elif direction == DISPATCH:
                    value = self._sent(dag.value(ref), experts, mesh)
                    ref = self._all_to_all(dag, chunk, DISPATCH, (ref, *route), value, mesh)
                inputs.append(ref)
            dag.rewire(chunk, inputs=tuple(inputs))
            for i, direction in enumerate(interface.leaves):
                if direction == COMBINE:
                    readers = dag.readers((chunk.id, i))
                    back = self._all_to_all(dag, chunk, COMBINE, ((chunk.id, i), *route), whole[i], mesh)
                    for reader in readers:
                        dag.substitute(reader, (chunk.id, i), back)

    def _all_to_all(
        self,
        dag: TrainingDAG,
        chunk: Chunk,
        direction: str,
        inputs: tuple[Ref, ...],
        value: Value,
        mesh: Mesh,
    ) -> Ref:
        """Add an exchange of rows or counts for a chunk, and return the exchanged value."""
        tags = {tag: index for tag, index in chunk.tags.items() if tag != "PASS"}
        node = AllToAll(
            inputs=inputs,
            outputs=(value,),
            tags=tags,
            devices=chunk.devices,
            stream=self.stream,
            placed_by=dag.origin,
            direction=direction,
            region=chunk.region,
            mesh=mesh,
            axis=self.axis,
        )
        return (dag.add(node).id, 0)

    def _counts(self, value: Value, experts: Routed, mesh: Mesh) -> Value:
        """Return the value of the counts that arrived: `[devices of the line, experts of each device]`."""
        owners = mesh.size(self.axis)
        here = experts.count // owners
        spec = TensorSpec((owners, here), value.tensors[0].dtype, (here, 1))
        return dataclasses.replace(value, tensors=(spec,), others=((self.axis, values.Sharded(0)),))

    def _sent(self, value: Value, experts: Routed, mesh: Mesh) -> Value:
        """Return the value of the rows that a device's experts receive, given the `value` that devices send.

        If the number of received rows is not fixed, the specs have the number of sent rows, as in the
        balanced case.
        """
        (spec,), shape = value.tensors, value.tensors[0].shape
        if experts.even:
            owners = mesh.size(self.axis)
            shape = (shape[0] // owners, shape[1] * owners, *shape[2:])
        stride, steps = [], 1
        for size in reversed(shape):
            stride.append(steps)
            steps *= max(size, 1)
        spec = TensorSpec(shape, spec.dtype, tuple(reversed(stride)))
        return dataclasses.replace(value, tensors=(spec,), others=((self.axis, values.Sharded(0)),))
