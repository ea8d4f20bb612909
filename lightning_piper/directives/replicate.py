"""`replicate`: data parallelism and ZeRO. Replicas of a part of the step divide the batch, and their gradients are summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import networkx as nx
import torch

from lightning_piper.directives.base import Contract, Directive, register
from lightning_piper.directives.sharding import Conflict, Level, gather_as_in_training, gather_parameters, reduce_gradients
from lightning_piper.directives.transfers import connect
from lightning_piper.ir.build import metrics_value
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import Filter
from lightning_piper.ir.nodes import AllReduce, Chunk, Concat, Cut, Metrics, Node
from lightning_piper.ir.values import Partial, Slice

MEBI = 2**20
REDUCE_DTYPES = ("float16", "bfloat16", "float32", "float64")


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicate(Directive):
    """Run the chunks that `filter` selects on a group of devices, each with its share of the batch.

        B 0:8 @0,1 -> accumulate -> update    --replicate {} over [0, 1]-->    B 0:4 @0,1 -> accumulate -> all-reduce -> update

    Attributes:
        filter: selects chunks; they are placed on the groups already.
        devices: one group, `[0, 1]`, or a list of groups, `[[0, 2], [1, 3]]`, as the stages are placed on them. The position
            in its group is the index of a device's replica: replica r of R has the r-th of R equal parts of the batch.
        reduce_stream: logical stream of the sums of gradients.
        gather_stream: logical stream of the gathers of sharded parameters.
        bucket_size: MB (2**20 bytes) of parameters, or gradients, that travel in one message.
        shard_optimizer: each replica updates a shard of the parameters, and has the optimizer's state of that shard alone; the
            parameters are gathered once a step (ZeRO-1).
        shard_grads: also, gradients are summed after each microbatch, and each replica keeps its shard of the sums (ZeRO-2).
        shard_params: also, parameters are gathered for each use, and freed after it (ZeRO-3). Each level implies those before.
        reduce_dtype: dtype in which gradients are summed over microbatches and replicas, such as "float32" for gradients in
            bfloat16; left out, their own.

    The shares are the same for all regions of a step, replicated by one directive or by several; what is sharded may differ.
    Gradients become sums over the replicas: equal up to re-association, provided that the loss is a mean over samples.
    """

    op: ClassVar[str] = "replicate"
    contract: ClassVar[Contract] = "reassociated"

    filter: Filter
    devices: Sequence[int] | Sequence[Sequence[int]]
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    bucket_size: float = 25.0
    shard_optimizer: bool = False
    shard_grads: bool = False
    shard_params: bool = False
    reduce_dtype: str | None = None

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)
        nested = isinstance(self.devices, list | tuple) and self.devices and isinstance(self.devices[0], list | tuple)
        for group in self.devices if nested else [self.devices]:
            self.check_device_list("devices", group)
        sizes = {len(group) for group in self.replica_groups()}
        if len(sizes) > 1 or min(sizes) < 2:
            self.refuse("devices", f"groups of {sorted(sizes)} devices", "give groups of one size, of at least two devices")
        replica: dict[int, int] = {}
        for group in self.replica_groups():
            for index, device in enumerate(group):
                if replica.setdefault(device, index) != index:
                    self.refuse("devices", f"device {device} is replica {replica[device]} and {index}", "give it one position")
        for field in ("reduce_stream", "gather_stream"):
            stream = getattr(self, field)
            if not isinstance(stream, str) or not stream:
                self.refuse(field, f"{stream!r} is not a stream", "give a non-empty name such as 'reduce'")
        if isinstance(self.bucket_size, bool) or not isinstance(self.bucket_size, int | float) or not self.bucket_size > 0:
            self.refuse("bucket_size", f"{self.bucket_size!r}", "give a number of MB above 0")
        for field in ("shard_optimizer", "shard_grads", "shard_params"):
            if not isinstance(getattr(self, field), bool):
                self.refuse(field, f"{getattr(self, field)!r}", "give true or false")
        if self.reduce_dtype is not None and self.reduce_dtype not in REDUCE_DTYPES:
            self.refuse("reduce_dtype", f"{self.reduce_dtype!r}", f"give one of {', '.join(REDUCE_DTYPES)}")

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """The shares are those of training, and so are the shards, from which parameters are gathered. Without a training step
        only `shard_params` shards them, for there is no optimizer."""
        if training is None:
            self.apply(dag)
            return
        whole = dataclasses.replace(self, shard_optimizer=False, shard_grads=False, shard_params=False)
        whole.apply(dag)
        gather_as_in_training(dag, training)

    def apply(self, dag: TrainingDAG) -> None:
        chunks = self.select(dag, "filter", self.filter)
        groups = self.replica_groups()
        for chunk in chunks:
            if chunk.devices not in groups:
                where = f"on {list(chunk.devices)}" if chunk.devices else "on no device yet"
                self.refuse("devices", f"{chunk.label} is {where}", f"place it first, on one of {[list(g) for g in groups]}")
        regions = {chunk.region for chunk in chunks}
        for chunk in dag.of_type(Chunk):
            if chunk.region in regions and chunk.devices not in groups:
                where = f"on {list(chunk.devices)}" if chunk.devices else "on no device yet"
                self.refuse(
                    "devices", f"{chunk.label}, of the same region, is {where}", "replicate a region at all of its homes at once"
                )
        self._divide(dag, len(groups[0]))
        level = self._level()
        try:
            touched = reduce_gradients(dag, regions, level)
            if level.optimizer:
                gather_parameters(dag, regions, level)
        except Conflict as conflict:
            self.refuse("filter", str(conflict), "replicate each region once, and regions that share parameters alike")
        connect(dag, touched)

    def replica_groups(self) -> list[tuple[int, ...]]:
        groups: Any = self.devices if isinstance(self.devices[0], list | tuple) else [self.devices]
        return [tuple(group) for group in groups]

    def _level(self) -> Level:
        return Level(
            optimizer=self.shard_optimizer or self.shard_grads or self.shard_params,
            gradients=self.shard_grads or self.shard_params,
            parameters=self.shard_params,
            reduce_stream=self.reduce_stream,
            gather_stream=self.gather_stream,
            bucket_bytes=int(self.bucket_size * MEBI),
            dtype=None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype),
        )

    def _divide(self, dag: TrainingDAG, replicas: int) -> None:
        """Give every replica its share; all regions at once, since each slice goes through all of them."""
        if dag.replicas == replicas:
            return
        if dag.replicas != 1:
            self.refuse("devices", f"{replicas} replicas, another directive has {dag.replicas}", "replicate all regions alike")
        for chunk in dag.of_type(Chunk):
            if dag.interface(chunk).state:
                changed = ", ".join(dag.interface(chunk).state[:3])
                self.refuse(
                    "filter",
                    f"{chunk.label} changes {changed}, and every replica would in another way",
                    "use a layer without running statistics, such as GroupNorm or LayerNorm",
                )
            if chunk.slice.start % replicas or chunk.slice.stop % replicas:
                self.refuse(
                    "devices",
                    f"{chunk.label} works on samples {chunk.slice}, which {replicas} replicas cannot divide evenly",
                    f"let batch and microbatches have a multiple of {replicas} samples",
                )
        dag.replicas = replicas
        for node_id in list(nx.topological_sort(dag.graph)):
            _shrink(dag, dag.nodes[node_id], replicas)


def _shrink(dag: TrainingDAG, node: Node, replicas: int) -> None:
    """What a node works on and makes, for one replica's share. Nodes come in an order in which inputs are shrunk before."""
    if isinstance(node, Chunk):
        node.slice = _part(node.slice, replicas)
        node.outputs = tuple(
            dataclasses.replace(value, tensors=tensors, placement=Partial() if value.kind == "grad" else value.placement)
            for value, tensors in zip(node.outputs, dag.code_of(node).outputs, strict=True)
        )
    elif isinstance(node, Metrics):
        node.slices = tuple(_part(part, replicas) for part in node.slices)
        node.outputs = (dataclasses.replace(metrics_value(dag), placement=Partial()),)
    elif isinstance(node, AllReduce):  # of the metrics: those of gradients come later
        node.outputs = (metrics_value(dag),)
    elif isinstance(node, Cut | Concat):
        if isinstance(node, Cut):
            node.start, node.stop = node.start // replicas, node.stop // replicas
            rows = node.stop - node.start
        else:
            rows = sum(dag.value(ref).tensors[0].shape[node.dim] for ref in node.inputs)
        per_sample = dag.specs_of(node.inputs[0], dag.share)[0].shape[node.dim] // dag.share
        node.outputs = (dataclasses.replace(node.outputs[0], tensors=dag.specs_of(node.inputs[0], rows // per_sample)),)
    elif node.outputs:  # transfers and sums hand on what they read
        placement = dag.value(node.inputs[0]).placement
        tensors = dag.value(node.inputs[0]).tensors
        node.outputs = tuple(dataclasses.replace(v, tensors=tensors, placement=placement) for v in node.outputs)


def _part(part: Slice, replicas: int) -> Slice:
    return Slice(part.start // replicas, part.stop // replicas)
