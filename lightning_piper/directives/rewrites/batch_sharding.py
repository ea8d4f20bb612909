"""The division of the batch over replicas. Each replica works on its local batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import networkx as nx

from lightning_piper.common.units import counted
from lightning_piper.directives.base import Directive, one_microbatch
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.values import Partial, Slice, Value
from lightning_piper.ops.chunk import held
from lightning_piper.ops.communication.gather_samples import GatherSamples, ScatterSamples, exchanged
from lightning_piper.ops.communication.total import Total
from lightning_piper.ops.metrics import Metrics, MetricsSum, metrics_value
from lightning_piper.ops.samples import Concat, Cut

ORDER = "order"  # the op of `Order`
RUNNING = ("running_mean", "running_var", "num_batches_tracked")  # the buffers of batch norms


def shard_batch(dag: TrainingDAG, mesh: Mesh, directive: Directive) -> None:
    """Give every replica its local batch. All regions change together, because each slice of the batch goes
    through all regions. Do nothing if the batch is already divided over this mesh.

    Args:
        dag: The DAG to rewrite.
        mesh: The mesh of the group ranks of every device group. Replicas are along `DATA`.
        directive: The directive to apply, which errors name.

    Raises:
        DirectiveError: The batch cannot be divided over the mesh.
    """
    if dag.mesh == mesh:
        return
    replicas = mesh.size(DATA)
    if len(dag.mesh.group_ranks) != 1:
        found = f"this directive makes {counted(replicas, 'replica')}, but an earlier one made {dag.replicas}"
        directive.refuse("devices", found, "use the same number of replicas for all regions [PIPER-D005]")
    undivided = dag.code.undivided
    if undivided is not None and undivided.batches != replicas:
        directive.refuse(
            "devices",
            f"the batch cannot be divided over {replicas} replicas, because {undivided.why}",
            "give the batch tensors whose first dimension is the samples [PIPER-D012]",
        )
    for chunk in dag.of_type(Chunk) if replicas > 1 else ():
        if local := [name for name in dag.interface(chunk).state if name in dag.code.local]:
            _refuse_statistics(dag, directive, local)
        if chunk.slice.start % replicas or chunk.slice.stop % replicas:
            _refuse_uneven(dag, replicas, directive, chunk)
    dag.mesh = mesh
    made: Outputs = {}
    for node_id in list(nx.topological_sort(dag.graph)):
        _shrink(dag, dag.nodes[node_id], replicas, made)


def _refuse_statistics(dag: TrainingDAG, directive: Directive, local: Sequence[str]) -> NoReturn:
    """Raise an error for buffers whose values would differ between the replicas."""
    own = [name for name in local if name.rsplit(".", 1)[-1] not in RUNNING]
    local = own or local
    found = (
        f"each replica would update {', '.join(local[:3])} from its own samples, so the values would differ between "
        "replicas"
    )
    if own:
        accepted = "compute the values from the samples of all replicas (piper.gather_samples)"
        directive.refuse("filter", found, f"{accepted} [PIPER-D011]")
    advice = "replace batch norms by nn.SyncBatchNorm (Trainer(sync_batchnorm=True))"
    if any(len(parts) > 1 for parts in dag.slices().values()) and ORDER in dag.program.ops:
        # An order of microbatches contradicts statistics of the whole batch.
        degrees = dag.program.degrees
        one = "use one microbatch" if degrees is None else one_microbatch(degrees)
        advice = f"{one} and nn.SyncBatchNorm (Trainer(sync_batchnorm=True)) instead of batch norms"
    directive.refuse("filter", found, f"{advice}, or use nn.GroupNorm or nn.LayerNorm [PIPER-D011]")


def _refuse_uneven(dag: TrainingDAG, replicas: int, directive: Directive, chunk: Chunk) -> NoReturn:
    """Raise an error for samples that cannot be divided evenly over the replicas."""
    evenly = f"which cannot be divided evenly over {replicas} replicas"
    if dag.size % replicas == 0:
        directive.refuse(
            "devices",
            f"{chunk.label} works on samples {chunk.slice}, {evenly}",
            f"give each microbatch a multiple of {replicas} samples [PIPER-D012]",
        )
    least = replicas * max(len(parts) for parts in dag.slices().values())
    advice = f"give a multiple of {replicas} samples"
    if dag.program.partial:
        advice = (
            f"the first batch had {dag.step.size} samples. Leave out a smaller last batch of an epoch with "
            f"DataLoader(drop_last=True), or {advice}"
        )
    elif dag.size < least > replicas:
        advice += f", at least {least}"
    directive.refuse(
        "devices", f"the batch has {counted(dag.size, 'sample')}, {evenly}", f"{advice} [PIPER-D012]"
    )


# `id` of a chunk's outputs -> (the outputs, the outputs for one replica). Microbatches share both tuples.
Outputs = dict[int, tuple[tuple[Value, ...], tuple[Value, ...]]]


def _shrink(dag: TrainingDAG, node: Node, replicas: int, made: Outputs) -> None:
    """Change a node to work on one replica's local batch. Call this function for a node after the nodes that
    it reads.
    """
    if isinstance(node, Chunk):
        dag.change(node, slice=_part(node.slice, replicas))
        if id(node.outputs) not in made:
            specs = dag.late_specs(node.key, node.slice)
            pairs = zip(node.outputs, dag.interface(node).outputs, specs, strict=True)
            changed = (replace(value, tensors=x, placement=held(dag, out)) for value, out, x in pairs)
            made[id(node.outputs)] = node.outputs, tuple(changed)
        outputs = made[id(node.outputs)][1]
    elif isinstance(node, Total):
        dag.change(node, mesh=dag.mesh)
        outputs = (replace(node.outputs[0], tensors=dag.value(node.inputs[0]).tensors),)
    elif isinstance(node, GatherSamples | ScatterSamples):
        dag.change(node, mesh=dag.mesh)
        outputs = (exchanged(dag, node),)
    elif isinstance(node, Metrics):
        dag.change(node, slices=tuple(_part(part, replicas) for part in node.slices))
        outputs = (replace(metrics_value(dag), placement=Partial()),)
    elif isinstance(node, MetricsSum):
        outputs = (metrics_value(dag),)
    elif isinstance(node, Cut | Concat):
        if isinstance(node, Cut):
            dag.change(node, start=node.start // replicas, stop=node.stop // replicas)
            rows = node.stop - node.start
        else:
            rows = sum(dag.value(ref).tensors[0].shape[node.dim] for ref in node.inputs)
        # number of rows along `dim` for each sample
        per_sample = (
            dag.specs_of(node.inputs[0], dag.local_batch_size)[0].shape[node.dim] // dag.local_batch_size
        )
        outputs = (replace(node.outputs[0], tensors=dag.specs_of(node.inputs[0], rows // per_sample)),)
    elif node.outputs:  # a transfer or a sum: its output has the specs and placement of its input
        placement = dag.value(node.inputs[0]).placement
        tensors = dag.value(node.inputs[0]).tensors
        outputs = tuple(replace(v, tensors=tensors, placement=placement) for v in node.outputs)
    else:
        return
    dag.change(node, outputs=outputs)


def _part(part: Slice, replicas: int) -> Slice:
    return Slice(part.start // replicas, part.stop // replicas)
