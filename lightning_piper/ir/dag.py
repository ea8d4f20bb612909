"""The training DAG: all computation and communication of one training step on all devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import networkx as nx

from lightning_piper.common.limits import shown
from lightning_piper.common.units import counted
from lightning_piper.ir.application import Application
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.policies import ShardingPolicy
from lightning_piper.ir.regions import (
    SPLIT_BACKWARD,
    Code,
    Interface,
    LateSpecs,
    PassKey,
    Region,
    Step,
    StepCode,
)
from lightning_piper.ir.values import Slice, TensorSpec, Value

N = TypeVar("N", bound=Node)
# the fields of a node that refer to other nodes' outputs; only a chunk has all of these fields
READS = ("inputs", "state", "params", "weights")


class TrainingDAG:
    """A graph of nodes, the edges between them, and the settings that directives give their regions.

    Attributes:
        step: The captured step, which has the code of every chunk.
        size: Samples in the global batch of one step (N).
        mesh: The mesh of the group ranks, the same for every node. Along `DATA` there are R replicas; replica
            r has samples [r N/R, (r+1) N/R). Members along another axis have the same samples.
        nodes: The nodes by id.
        graph: `networkx` graph of ids. Edge attributes: `data` (the edge carries a value) and `order` (index
            of the directive that ordered the two nodes, or None). Node attribute: `order` (index of the first
            directive that named the node in an order, or None).
        program: The application of a program to this graph, up to the current directive.
        overlaps: One entry for each group of an `order` whose chunks may interleave. The entry has, for each
            filter of the group, the ids of the nodes that the filter selects.
        meshes: Region -> the mesh along whose axes its experts are divided (all axes but `DATA` and
            `member_axes`). Regions without divided experts are absent.
        divided: Parameter -> the axes along which it is divided. Whole parameters are absent.
        member_axes: The axes along which chunks compute on parts of tensors (`Step.divisions`). If empty,
            chunks compute on whole tensors.
        param_meshes: Parameter -> the mesh along whose `DATA` its gradients are summed. For an absent
            parameter, this is `mesh`.
        arranged: (region, device group) -> the mesh that a `place` directive gave to both. A pair without a
            mesh is absent.
        hosted: Parameters whose optimizer states stay in host memory between steps.
        mean_of_replicas: Whether the loss is the mean of the replicas' losses, in which each ratio has the
            replica's own denominator, instead of the loss of the whole batch.
        policies: Region -> what its `replicate` directive shards, and how replicas communicate.
        earlier_buckets: Parameter -> device group -> the bucket that holds the group's shards between steps,
            because an earlier program of the training step (for another layout of the batch) put them there.
            Parameters that no earlier program sharded stay whole. None: this program chooses the buckets.
        revision: The number of changes to nodes that read or make values. Orders do not change it.
    """

    def __init__(self, step: Step, size: int, partial: bool = False) -> None:
        self.step, self.size = step, size
        # `step`, `size`, and their `code`, because rules of nodes ask for it several times for each node
        self._code: tuple[Step, int, StepCode] | None = None
        self.nodes: dict[int, Node] = {}
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.mesh = Mesh.flat(1)
        self.member_axes: tuple[str, ...] = ()
        self.param_meshes: dict[str, Mesh] = {}
        self.program = Application(partial)
        self.overlaps: list[tuple[tuple[int, ...], ...]] = []
        self.meshes: dict[int, Mesh] = {}
        self.divided: dict[str, tuple[str, ...]] = {}
        self.arranged: dict[tuple[int, tuple[int, ...]], Mesh] = {}
        # For each call of `dispatch`: the number of parts into which its region's parameters are divided.
        # 1: they are whole. Empty: all regions are whole.
        self._degrees: tuple[int, ...] = ()
        self.policies: dict[int, ShardingPolicy] = {}
        self.hosted: frozenset[str] = frozenset()
        self.mean_of_replicas = False
        self.earlier_buckets: Mapping[str, Mapping[tuple[int, ...], Bucket]] | None = None
        self.revision = 0
        self._next = 0

    # Reading

    @property
    def code(self) -> StepCode:
        """The step's code for the whole batch. Regions and interfaces are the same at every size."""
        if self._code is None or self._code[0] is not self.step or self._code[1] != self.size:
            self._code = self.step, self.size, self.step.at(self.size)
        return self._code[2]

    @property
    def forward_only(self) -> bool:
        """Whether the step lacks a backward pass, like a `validation_step`."""
        return self.code.forward_only

    @property
    def origin(self) -> int | None:
        """Index of the directive that is being applied, which new nodes get as their origin. None if no
        directive is being applied."""
        return self.program.index

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.code.regions

    @property
    def replicas(self) -> int:
        return self.mesh.size(DATA)

    def replica_of(self, group_rank: int) -> int:
        """Return the replica of a group rank."""
        return self.mesh.line(DATA, group_rank).index(group_rank)

    @property
    def local_batch_size(self) -> int:
        """The number of samples of one replica."""
        return self.size // self.replicas

    def interface(self, chunk: Chunk) -> Interface:
        return self.code.interface_of(chunk.key)

    def divide(self, meshes: Mapping[int, Mesh]) -> None:
        """Record that the expert parameters of some regions are divided along the axes of the regions' meshes.

        Chunks of these regions then run code for one part (`code_at`). This method does not change the nodes.
        `meshes` maps a region to its mesh.
        """
        self.meshes |= meshes
        routed = self.code.routed
        members = {mesh: math.prod(map(mesh.size, self.routed_axes(mesh))) for mesh in self.meshes.values()}
        parts = {site: members[mesh] for region, mesh in self.meshes.items() for site in routed[region].sites}
        self._degrees = tuple(
            parts.get(site, 1) for site in range(1 + max(site for r in routed.values() for site in r.sites))
        )
        for region, mesh in meshes.items():
            self.param_meshes |= dict.fromkeys(routed[region].params, mesh)
            self.divided |= dict.fromkeys(routed[region].params, self.routed_axes(mesh))

    def routed_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of a region's mesh along which rows are dispatched and parameters are divided."""
        return tuple(axis for axis in mesh.axes if axis not in (DATA, *self.member_axes))

    def code_at(self, key: PassKey, samples: int) -> Code:
        """Return the code of a pass for `samples` samples, as the DAG's devices run it."""
        return self._own_step.at(samples, self.degrees_of(key[0])).code_of(key)

    @property
    def _own_step(self) -> Step:
        """The step as the DAG's devices run it."""
        return self.step.member if self.member_axes else self.step

    def degrees_of(self, region: int) -> tuple[int, ...]:
        """Return, for each call of `dispatch` in the step, into how many parts the experts after this call
        are divided. The result is empty if the experts of `region` are not divided."""
        return self._degrees if region in self.meshes else ()

    def code_for(self, key: PassKey, part: Slice) -> Code:
        """Return the code of a pass for a slice of the local batch.

        A region that computes from gathered samples gets code for the whole batch.
        """
        return self.code_at(key, self._samples_of(key, part))

    def _samples_of(self, key: PassKey, part: Slice) -> int:
        return self.size if self.regions[key[0]].joined else len(part)

    def code_of(self, chunk: Chunk) -> Code:
        return self.code_for(chunk.key, chunk.slice)

    def late_specs(self, key: PassKey, part: Slice) -> list[Any]:
        """Return the specs of each output of a pass for a slice of the local batch, as `LateSpecs`.

        If a later directive divides the slice, the program never runs code for it.
        """
        about = self._own_step, self._samples_of(key, part), self.degrees_of(key[0]), key
        return [LateSpecs(*about, i) for i in range(len(self.code.interface_of(key).outputs))]

    def mesh_of(self, name: str) -> Mesh:
        """Return the mesh of a parameter.

        The parameter's gradients are summed along `DATA`. The parameter may be divided along the other axes.
        """
        return self.param_meshes.get(name, self.mesh)

    def spec_of(self, name: str) -> TensorSpec:
        """Return the spec of a parameter on each device: the spec of a part if the parameter is divided."""
        spec = self.step.params[name].spec
        return (
            spec.part(math.prod(map(self.mesh_of(name).size, self.divided[name])))
            if name in self.divided
            else spec
        )

    def value(self, ref: Ref) -> Value:
        return self.nodes[ref[0]].outputs[ref[1]]

    def specs_of(self, ref: Ref, samples: int) -> tuple[TensorSpec, ...]:
        """Return the specs of the chunk's output from which a value comes (see `producer`), if the chunk works
        on `samples` samples. Nodes after the chunk, such as a pack or a gather, do not change these specs."""
        chunk, index = self._made_by(ref)
        return self.code_at(chunk.key, samples).outputs[index]

    def producer(self, ref: Ref) -> Chunk:
        """Return the chunk that made a value. If a node of another kind made the value, return the producer
        of the first input of this node."""
        return self._made_by(ref)[0]

    def _made_by(self, ref: Ref) -> tuple[Chunk, int]:
        node = self.nodes[ref[0]]
        while not isinstance(node, Chunk):
            ref = node.inputs[0]
            node = self.nodes[ref[0]]
        return node, ref[1]

    def in_order(self) -> list[int]:
        """Return the ids of the nodes, each after all nodes for which it waits. Nodes on a cycle, and nodes that
        wait for them, are missing."""
        after, missing = dict(self.graph.adjacency()), dict(self.graph.in_degree())
        order = [node for node, count in missing.items() if not count]
        for node in order:  # the loop reaches the nodes that it appends
            for user in after[node]:
                missing[user] -= 1
                if not missing[user]:
                    order.append(user)
        return order

    def of_type(self, kind: type[N]) -> Iterator[N]:
        return (node for node in self.nodes.values() if isinstance(node, kind))

    def users(self, node: Node) -> list[Node]:
        """Return the nodes that read a value of `node`, in the order of their ids."""
        return [
            self.nodes[i]
            for i in sorted(self.graph.successors(node.id))
            if self.graph.edges[node.id, i]["data"]
        ]

    def source(self, ref: Ref) -> Ref:
        """Return the output from which transfers (`Node.moves`) carry a value; `ref` itself if no transfer
        carries the value."""
        while self.nodes[ref[0]].moves:
            ref = self.nodes[ref[0]].inputs[0]
        return ref

    def readers(self, ref: Ref) -> list[Node]:
        return [user for user in self.users(self.nodes[ref[0]]) if ref in user.reads]

    def ordered_by(self, node: Node) -> int | None:
        """Return the index of a directive that ordered the node; None if no directive has ordered it."""
        if (by := self.graph.nodes[node.id]["order"]) is not None:
            return int(by)
        edges = [*self.graph.in_edges(node.id), *self.graph.out_edges(node.id)]
        return next((by for edge in edges if (by := self.graph.edges[edge]["order"]) is not None), None)

    def devices(self) -> tuple[int, ...]:
        groups = {id(node.devices): node.devices for node in self.nodes.values()}  # most nodes share a tuple
        return tuple(sorted(set().union(*groups.values())))

    def slices(self) -> dict[PassKey, tuple[Slice, ...]]:
        """Return each pass F and B of the step -> the slices of the global batch on which its chunks work, in
        ascending order.

        A second forward pass counts as F, and BI and BW count as B. A slice that occurs twice counts once. A
        pass without chunks has no slices.
        """
        found: dict[PassKey, set[Slice]] = {key: set() for key in self.code.interfaces}
        for chunk in self.of_type(Chunk):
            found[chunk.region, "B" if chunk.kind in SPLIT_BACKWARD else chunk.kind].add(chunk.slice)
        starts = [r * self.local_batch_size for r in range(self.replicas)]
        return {
            key: tuple(
                Slice(first + part.start, first + part.stop) for first in starts for part in sorted(parts)
            )
            for key, parts in found.items()
        }

    def microbatches(self) -> tuple[Slice, ...] | None:
        """Return the slices of the global batch that all passes work on; None if passes have different
        slices."""
        found = set(self.slices().values())
        return found.pop() if len(found) == 1 else None

    # Rewriting

    def add(self, node: N) -> N:
        """Add a new node. It gets an id and, unless it has one, the origin of the current directive.

        Raises:
            ValueError: The object is not a node or is already in this DAG, or a read is not a pair of a node
                id and an output index.
        """
        if not isinstance(node, Node) or self.nodes.get(node.id) is node:
            found = (
                f"%{node.id} {node.label} is in the DAG already"
                if isinstance(node, Node)
                else f"{shown(node)} is not a node"
            )
            raise ValueError(f"{found}. Add a new node")
        self._check_reads(node, {name: getattr(node, name) for name in READS if hasattr(node, name)})
        _set(node, id=self._next, origin=self.origin if node.origin is None else node.origin)
        self._next += 1
        self.nodes[node.id] = node
        self.graph.add_node(node.id, order=None)
        self._connect(node)
        self._count_change(node)
        return node

    def duplicate(self, chunk: Chunk) -> Chunk:
        """Add a copy of a chunk that makes the same bits, such as a second forward pass before the backward.

        The copy has the pass, slice, tags, devices and stream of the chunk, and reads the same inputs,
        buffers and parameters. If parameters are gathered for each use, the copy gets a gather of its own.

        The copy does not have the chunk's readers: no node reads it before `substitute` or `rewire`. It does
        not have the chunk's orders either: it runs as soon as its inputs exist, unless `order` makes it wait.
        Filters select it like the chunk until it gets different tags.
        """
        return self.add(
            dataclasses.replace(chunk, id=-1, origin=None, params=self.gathered_anew(chunk.params))
        )

    def gathered_anew(self, params: Iterable[Ref | None]) -> tuple[Ref | None, ...]:
        """Return `Chunk.params` for another use of the same parameters.

        Parameters that are gathered for each use get a new gather. All other entries stay, including None.
        """
        again: dict[Ref, Ref] = {}
        params = tuple(params)
        for ref in dict.fromkeys(ref for ref in params if ref is not None):
            gather = self.nodes[ref[0]]
            if self.nodes[gather.inputs[0][0]].per_use:
                again[ref] = (self.add(dataclasses.replace(gather, id=-1)).id, 0)
        return tuple(ref if ref is None else again.get(ref, ref) for ref in params)

    def remove(self, nodes: Iterable[Node]) -> None:
        """Remove nodes. The caller has to rewire the nodes that read the removed nodes.

        Raises:
            ValueError: A node is not in this DAG.
        """
        for node in nodes:
            self._check_here(node)
            self._count_change(node)
            del self.nodes[node.id]
            self.graph.remove_node(node.id)

    def rewire(self, node: Node, **reads: tuple[Ref | None, ...]) -> None:
        """Change what a node reads (`inputs`, `state`, `params`, `weights`). Temporal edges stay.

        Raises:
            ValueError: The node is not in this DAG, or a read is not a pair of a node id and an output index.
        """
        self._check_here(node)
        self._check_reads(node, reads)
        for source in {ref[0] for ref in node.reads}:
            if not self.graph.has_edge(source, node.id):
                continue  # a rewrite removed the source before it rewires this reader
            edge = self.graph.edges[source, node.id]
            if edge["order"] is None:
                self.graph.remove_edge(source, node.id)
                if source not in self.nodes and not self.graph.out_degree(source):
                    self.graph.remove_node(source)
            else:
                edge["data"] = False
        _set(node, **reads)
        self._connect(node)
        self.revision += 1

    def change(self, node: Node, **fields: object) -> None:
        """Change a node's devices, tags, outputs or other fields. `rewire` changes what it reads.

        Raises:
            ValueError: The node is not in this DAG, or does not have one of the fields. `fields` contains
                `id`, `inputs`, `state`, `params` or `weights`. The devices are not a tuple of integers. The
                step does not have the chunk's new pass, or this pass has a different number of outputs.
        """
        self._check_here(node)
        for name in ("id", *READS):
            if name in fields:
                raise ValueError(
                    f"%{node.id} {node.label}: change cannot set {name}. Use rewire to change what a node "
                    "reads"
                )
        devices = fields.get("devices", ())
        if not isinstance(devices, tuple) or not all(type(device) is int for device in devices):
            raise ValueError(
                f"%{node.id} {node.label}: devices={shown(devices)} is not usable. Give a tuple of integers"
            )
        if isinstance(node, Chunk) and not fields.keys().isdisjoint(("region", "kind")):
            asked = {name: fields[name] for name in ("region", "kind", "outputs") if name in fields}
            changed = dataclasses.replace(node, **asked)  # type: ignore[arg-type]
            self._check_pass(node, changed.key, len(changed.outputs))
        _set(node, **fields)
        self._count_change(node)

    def substitute(self, node: Node, old: Ref, new: Ref) -> None:
        """Make `node` read `new` wherever it reads `old`."""
        reads: dict[str, tuple[Ref | None, ...]] = {
            "inputs": tuple(new if ref == old else ref for ref in node.inputs)
        }
        if isinstance(node, Chunk):
            reads["state"] = tuple(new if ref == old else ref for ref in node.state)
            reads["params"] = tuple(new if ref == old else ref for ref in node.params)
        if (weights := getattr(node, "weights", None)) is not None:
            reads["weights"] = tuple(new if ref == old else ref for ref in weights)
        self.rewire(node, **reads)

    def order(self, before: Node, after: Node, origin: int | None) -> None:
        """Make `after` start only after `before` is done, because of directive `origin`. If a directive has
        already ordered the two nodes, the edge keeps the index of that directive.

        Raises:
            ValueError: One of the nodes is not in this DAG.
        """
        self._check_here(before)
        self._check_here(after)
        if not self.graph.has_edge(before.id, after.id):
            self.graph.add_edge(before.id, after.id, data=False, order=origin)
        elif self.graph.edges[before.id, after.id]["order"] is None:
            self.graph.edges[before.id, after.id]["order"] = origin

    def release(self, node: Node) -> None:
        """Remove the temporal edges into a node that were added by the directive that made the node. Data
        edges stay."""
        edges = self.graph.in_edges(node.id, data=True)
        self.graph.remove_edges_from(
            [(a, b) for a, b, edge in edges if not edge["data"] and edge["order"] == node.origin]
        )

    def name(self, chunk: Node, by: int | None) -> None:
        """Record that order `by` names a chunk, or a copy to or from the host. The first order counts."""
        if self.graph.nodes[chunk.id]["order"] is None:
            self.graph.nodes[chunk.id]["order"] = by

    def named_by(self, chunk: Chunk) -> int | None:
        """Return the index of the first order that named a chunk; None if no order has named it."""
        found: int | None = self.graph.nodes[chunk.id]["order"]
        return found

    def _check_here(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise ValueError(f"{shown(node)} is not a node. Give one of dag.nodes.values()")
        if self.nodes.get(node.id) is not node:
            raise ValueError(f"%{node.id} {node.label} is not in this DAG. Give one of dag.nodes.values()")

    def _check_reads(self, node: Node, reads: Mapping[str, object]) -> None:
        for name, refs in reads.items():
            for ref in refs if isinstance(refs, tuple) else (refs,):
                if ref is None and name != "inputs":
                    continue
                if not isinstance(ref, tuple) or [type(x) for x in ref] != [int, int]:
                    found = f"%{node.id} {node.label}: {name} would have {shown(ref)}"
                    raise ValueError(f"{found}. Give a tuple of pairs, (a node's id, which of its outputs)")

    def _check_pass(self, chunk: Chunk, key: PassKey, made: int) -> None:
        """Raise an error unless the step has pass `key`, with `made` outputs. Messages name `chunk`."""
        region, kind = key
        try:
            outputs = self.code.interface_of(key).outputs
        except KeyError:
            raise ValueError(
                f"%{chunk.id} {chunk.label}: the step has no pass {shown(kind)} of region {shown(region)}. Give a "
                "region and a kind that are together in dag.code.interfaces"
            ) from None
        if len(outputs) != made:
            found = (
                f"%{chunk.id} {chunk.label} would have {counted(made, 'output')}, but pass {kind} of region {region} has "
                f"{len(outputs)}"
            )
            raise ValueError(f"{found}. Give outputs= in the same call, one for each output of the pass")

    def _count_change(self, node: Node) -> None:
        if node.reads or node.outputs:
            self.revision += 1

    def _connect(self, node: Node) -> None:
        for source, _ in node.reads:
            if self.graph.has_edge(source, node.id):
                self.graph.edges[source, node.id]["data"] = True
            else:
                self.graph.add_edge(source, node.id, data=True, order=None)

    def copy(self) -> TrainingDAG:
        """Return a copy of the DAG that can be rewritten independently. The copy has the same `step`. Its
        `earlier_buckets` are None."""
        copy = TrainingDAG(self.step, self.size)
        copy.program = self.program.copy()
        copy.nodes = {i: dataclasses.replace(node) for i, node in self.nodes.items()}
        copy.graph = self.graph.copy()
        copy._next, copy.mesh, copy.overlaps = self._next, self.mesh, list(self.overlaps)
        copy.meshes, copy.divided, copy._degrees = dict(self.meshes), dict(self.divided), self._degrees
        copy.policies, copy.arranged = dict(self.policies), dict(self.arranged)
        copy.hosted = self.hosted
        copy.mean_of_replicas, copy.member_axes, copy.param_meshes = (
            self.mean_of_replicas,
            self.member_axes,
            dict(self.param_meshes),
        )
        return copy

    def __str__(self) -> str:
        from lightning_piper.ir.text import text_of

        return text_of(self)


def _set(node: Node, **fields: object) -> None:
    """Set fields of a node, which is frozen for all other code. Raise an error if the node lacks a field."""
    for name, value in fields.items():
        if name not in node.__dataclass_fields__:
            accepted = ", ".join(
                name
                for name in (field.name for field in dataclasses.fields(node))
                if name not in ("id", *READS)
            )
            raise ValueError(f"%{node.id} {node.label} has no field {name!r}. Give one of {accepted}")
        object.__setattr__(node, name, value)
