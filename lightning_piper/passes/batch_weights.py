"""Add nodes that compute from the batch the weights of loss terms and logged values."""

from __future__ import annotations

from dataclasses import replace

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.values import Replicated, Slice
from lightning_piper.ops.weights import Counts, CountsSum, Weights, counted, share_of, wanted_by, weighed

STREAM = "counts"
# (devices, the slices into which a pass of a region divides the local batch)
Group = tuple[tuple[int, ...], tuple[Slice, ...]]


def weigh(dag: TrainingDAG) -> None:
    """Let backward passes and metrics read their weights from nodes that compute them.

    A device that works on the whole batch needs no such nodes, unless a denominator is guarded.

    Each group of devices gets nodes of its own. They make weights for all slices of a region, also for the
    slices that run on another group.
    """
    slices = _slices(dag)
    groups: dict[Group, dict[int, None]] = {}
    readers: list[tuple[Node, Group]] = []
    for node in dag.nodes.values():
        dynamic = [term for (term, part), _ in wanted_by(dag, node) if share_of(dag, term, part) is None]
        if dynamic:
            group = (
                node.devices,
                slices[_region(dag, node), node.kind[0] if isinstance(node, Chunk) else "F"],
            )
            groups.setdefault(group, {}).update(dict.fromkeys(dynamic))
            readers.append((node, group))
    made = {group: _make(dag, group, tuple(sorted(terms))) for group, terms in groups.items()}
    for node, group in readers:
        source, seed = made[group], isinstance(node, Chunk)
        refs: list[Ref | None] = [
            None if share_of(dag, term, part) is not None else (source.id, source.index_of(term, part, seed))
            for (term, part), _ in wanted_by(dag, node)
        ]
        dag.rewire(node, weights=tuple(refs))


def _region(dag: TrainingDAG, node: Node) -> int:
    return node.region if isinstance(node, Chunk) else dag.producer(node.inputs[0]).region


def _slices(dag: TrainingDAG) -> dict[tuple[int, str], tuple[Slice, ...]]:
    """Return (region, "F" or "B") -> the slices into which the region's chunks divide the local batch."""
    found: dict[tuple[int, str], set[Slice]] = {}
    for chunk in dag.of_type(Chunk):
        found.setdefault((chunk.region, chunk.kind[0]), set()).add(chunk.slice)
    return {key: tuple(sorted(parts)) for key, parts in found.items()}


def _make(dag: TrainingDAG, group: Group, terms: tuple[int, ...]) -> Weights:
    """Add the nodes that count the denominators of `terms` on a device group, sum the counts over the
    replicas, and compute the weights. Return the last node."""
    devices, slices = group
    values = counted(dag, terms, slices)
    counts = dag.add(Counts(outputs=values, devices=devices, terms=terms, slices=slices))
    total: Node = counts
    if dag.replicas > 1 and not dag.mean_of_replicas:
        summed = replace(values[1], placement=Replicated())
        total = dag.add(
            CountsSum(
                inputs=((counts.id, 1),), outputs=(summed,), devices=devices, stream=STREAM, mesh=dag.mesh
            )
        )
    inputs = ((counts.id, 0), (total.id, 0 if total is not counts else 1))
    return dag.add(
        Weights(
            inputs=inputs,
            outputs=weighed(dag, terms, slices),
            devices=devices,
            terms=terms,
            slices=slices,
            parts=dag.replicas if dag.mean_of_replicas else 1,
        )
    )
