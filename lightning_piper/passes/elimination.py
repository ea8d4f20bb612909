"""Elimination of communication that the order of a finished DAG makes redundant.

This concerns gathers of parameters and sums over replicas.
"""

from __future__ import annotations

from lightning_piper.directives.base import Contract
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.values import Sharded
from lightning_piper.ops.communication.bucket import Pack
from lightning_piper.ops.update import Accumulate
from lightning_piper.plan.order import order_without_gathers

Group = tuple[int, ...]


def eliminate(dag: TrainingDAG) -> Contract | None:
    """Remove communication from a finished DAG that its global order makes redundant.

    - A gather of a bucket is redundant if the previous chunk with gathered parameters on the same devices has
      read this bucket. The parameters are still in memory, as between a last layer's forward and backward
      pass.
    - A sum of a bucket's gradients over replicas is redundant if the next chunk of the same devices is the
      same pass of the same region. The gradients are added up first, as between the backward passes of a
      stage that does nothing in between.

    Neither elimination needs more memory than the communication would need.

    Returns:
        `reassociated` if sums over replicas were joined, because this changes the order of the terms;
        otherwise None.
    """
    held: dict[Group, dict[Bucket, Ref]] = {}  # as in `_reuse`
    runs: dict[Group, list[list[Chunk]]] = {}  # runs of consecutive chunks with the same key
    for chunk in [node for node in order_without_gathers(dag) if isinstance(node, Chunk)]:
        if any(ref is not None for ref in chunk.params):
            _reuse(dag, chunk, held)
        there = runs.setdefault(chunk.devices, [[]])
        if there[-1] and there[-1][-1].key == chunk.key:
            there[-1].append(chunk)
        else:
            there.append([chunk])
    regrouped = [_join(dag, run) for there in runs.values() for run in there if len(run) > 1]
    return "reassociated" if any(regrouped) else None


def _reuse(dag: TrainingDAG, chunk: Chunk, held: dict[Group, dict[Bucket, Ref]]) -> None:
    """Let a chunk reuse the buckets that the previous chunk of its devices with gathered parameters has read.

    Args:
        held: Devices -> the buckets that their previous chunk has read, each with its gathered value. Updated
            for the next chunk.
    """
    there = held.get(chunk.devices, {})
    now: dict[Bucket, Ref] = {}
    reused: dict[Ref | None, Ref] = {}  # value of a redundant gather -> the value to read instead
    for ref in dict.fromkeys(ref for ref in chunk.params if ref is not None):
        bucket = dag.value(ref).bucket
        assert bucket is not None
        now[bucket] = there.get(bucket, ref)
        if now[bucket] != ref:
            reused[ref] = now[bucket]
    held[chunk.devices] = now
    if reused:
        dag.rewire(chunk, params=tuple(reused.get(ref, ref) for ref in chunk.params))
        gathers = [dag.nodes[ref[0]] for ref in reused if ref is not None]
        dag.remove([gather for gather in gathers if not dag.users(gather)])


def _join(dag: TrainingDAG, run: list[Chunk]) -> bool:
    """Add up, bucket by bucket, the gradients of the chunks in `run` before replicas sum them.

    Return whether the function has joined any sums.
    """
    regrouped = False
    scatters = [scatter for chunk in run for scatter in _scatters(dag, chunk)]
    totals = {
        user.id: user for scatter in scatters for user in dag.users(scatter) if isinstance(user, Accumulate)
    }
    ours = {(scatter.id, 0): i for i, scatter in enumerate(scatters)}  # value of a scatter -> its index
    for total in totals.values():
        inputs: list[Ref] = []
        before: list[Node] = []  # the sums to join that the loop has found so far
        for ref in total.inputs:
            # A sum keeps the order of its terms, so only terms that are consecutive in the sum and in the run
            # are joined.
            if ref not in ours or (before and ours[ref] < ours[before[-1].id, 0]):
                inputs += _together(dag, before)
                before = []
            if ref in ours:
                before.append(scatters[ours[ref]])
            else:
                inputs.append(ref)
        inputs += _together(dag, before)
        if len(inputs) < len(total.inputs):
            joined = set(total.inputs) - set(inputs)
            dag.rewire(total, inputs=tuple(inputs))
            dag.remove(dag.nodes[node] for node, _ in sorted(joined))
            regrouped = True
    return regrouped


def _together(dag: TrainingDAG, scatters: list[Node]) -> list[Ref]:
    """Make the last of some sums over replicas sum the inputs of all of them. The caller removes the other
    sums.

    Return the value of the last sum in a list, which is empty if there are no sums.
    """
    if not scatters:
        return []
    last = scatters[-1]
    if len(scatters) > 1:
        terms = tuple(scatter.inputs[0] for scatter in scatters)
        source = dag.nodes[terms[0][0]]
        both = dag.add(
            Accumulate(
                inputs=terms,
                outputs=source.outputs,
                tags=last.tags,
                devices=source.devices,
                stream=source.stream,
                origin=last.origin,
                placed_by=last.placed_by,
            )
        )
        dag.rewire(last, inputs=((both.id, 0),))
    return [(last.id, 0)]


def _scatters(dag: TrainingDAG, chunk: Chunk) -> list[Node]:
    """Return the reduce-scatters of this chunk's gradients whose result exactly one node reads."""
    packs = (pack for pack in dag.users(chunk) if isinstance(pack, Pack))
    found = [
        user
        for pack in packs
        for user in dag.users(pack)
        if user.sums and isinstance(user.outputs[0].placement, Sharded)
    ]
    return [scatter for scatter in found if len(dag.users(scatter)) == 1]
