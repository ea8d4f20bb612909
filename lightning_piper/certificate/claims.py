"""The type of each value on each device, from the facts of the static check."""

from __future__ import annotations

from typing import Any

import networkx as nx

from lightning_piper.certificate.program import held_of, output_name
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA, GROUPS
from lightning_piper.ir.nodes import Ref
from lightning_piper.ir.sharded_values import is_summed
from lightning_piper.ir.values import Kind, Partial, Sharded, Slice
from lightning_piper.ops.base import problems_with
from lightning_piper.ops.communication.all_to_all import AllToAll
from lightning_piper.ops.communication.gather_samples import GatherSamples, ScatterSamples
from lightning_piper.ops.communication.total import Total
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.metrics import Metrics, MetricsSum
from lightning_piper.ops.samples import Cut
from lightning_piper.ops.weights import Counts, CountsSum, Weights

Share = list[Any]  # [value of the program, coordinates, first sample, sample after the last one]


class Claims:
    """The types of a finished DAG's values, as a device holds them.

    Args:
        dag: A DAG that the static check has accepted.
        buckets: Bucket -> its index in the certificate.
    """

    def __init__(self, dag: TrainingDAG, buckets: dict[Bucket, int]) -> None:
        self._dag, self._buckets, self._facts = dag, buckets, Facts(dag)
        for node in nx.topological_sort(dag.graph):
            problems_with(self._facts, dag.nodes[node])

    def type_of(self, ref: Ref, rank: int) -> dict[str, Any]:
        """Return the type of a value on a device of group rank `rank`."""
        value = self._dag.value(ref)
        bucket = value.bucket
        shard = None
        if bucket is not None and isinstance(value.placement, Sharded):
            shard = [bucket.member(rank), bucket.members]
        shares = self._shares(ref, rank)
        each = isinstance(self._dag.nodes[ref[0]], Counts) and ref[1] == 0
        rounded = {} if value.rounded is None else {"rounded": str(value.rounded)}
        return rounded | {
            "kind": "counts" if each else str(value.kind),
            "names": list(value.names),
            "shares": shares if each else merged(shares),
            "held": held_of((axis, held) for axis, held in value.others if axis != GROUPS),
            "batch": self._batch(ref),
            "tensors": list(map(str, value.tensors)),
            "bucket": None if bucket is None else self._buckets[bucket],
            "shard": shard,
        }

    def _batch(self, ref: Ref) -> str:
        """Return what happened to a value over the whole batch: "sum", "gather", "scatter" or ""."""
        node = self._dag.nodes[self._dag.source(ref)[0]]
        while isinstance(node, Cut):
            node = self._dag.nodes[self._dag.source(node.inputs[0])[0]]
        kinds: dict[type[Any], str] = {Total: "sum", GatherSamples: "gather", ScatterSamples: "scatter"}
        return kinds.get(type(node), "")

    def _shares(self, ref: Ref, rank: int) -> list[Share]:
        """Return the shares of the batch that a value contains."""
        node = self._dag.nodes[ref[0]]
        match node:
            case Counts():
                parts = node.slices if ref[1] == 0 else (Slice(0, self._dag.local_batch_size),)
                return [self._share(f"term.{term}", part, rank) for term in node.terms for part in parts]
            case CountsSum():
                return [
                    share for r in node.mesh.line(DATA, rank) for share in self._shares(node.inputs[0], r)
                ]
            case Weights():
                term, part = divmod(ref[1] // 2, len(node.slices))
                return [self._share(f"term.{node.terms[term]}", node.slices[part], rank)]
            case Metrics():
                if rank not in self._dag.mesh.lines(DATA)[0]:
                    return []
                return [share for each in node.inputs for share in self._shares(each, rank)]
            case MetricsSum():
                ranks = self._dag.mesh.group_ranks
                return [share for each in node.inputs for r in ranks for share in self._shares(each, r)]
        if ref not in self._facts.origins:
            return []
        origin = self._facts.origins[ref]
        output = self._dag.code.interface_of(origin[:2]).outputs[origin[2]]
        terms = [(axis, self._dag.mesh) for axis, held in output.held if isinstance(held, Partial)]
        if not is_summed(self._dag, output):
            terms = []
        mesh = self._dag.meshes.get(origin[0])
        if mesh is not None and output.kind == Kind.GRAD and output.names[0] not in self._dag.divided:
            terms += [(axis, mesh) for axis in self._dag.routed_axes(mesh)]
        found = []
        for r in self._ranks(ref, rank):
            at = ",".join(f"{axis}={mesh.line(axis, r).index(r)}" for axis, mesh in terms)
            found += [
                self._share(output_name(origin), part, q, at)
                for part in self._facts.parts[ref]
                for q in self._ranks_of_rows(ref, origin[0], r)
            ]
        return found

    def _share(self, origin: str, part: Slice, rank: int, at: str = "") -> Share:
        first = self._dag.replica_of(rank) * self._dag.local_batch_size
        return [origin, at, first + part.start, first + part.stop]

    def _ranks(self, ref: Ref, rank: int) -> set[int]:
        """Return the group ranks whose terms a value contains."""
        value = self._dag.value(ref)
        if self._batch(ref) in ("sum", "gather"):
            return set(self._dag.mesh.line(DATA, rank))
        if value.kind != Kind.GRAD or value.bucket is None or isinstance(value.placement, Partial):
            return {rank}
        ranks = set(value.bucket.shard_group(rank))
        if (GROUPS, Partial()) not in value.others and value.bucket.groups > 1:
            ranks = {r for other in ranks for r in value.bucket.same_shard(other)}
        return ranks

    def _ranks_of_rows(self, ref: Ref, region: int, rank: int) -> list[int]:
        """Return the group ranks on whose samples a rank works: with divided experts, all ranks that send it rows."""
        dag, value = self._dag, self._dag.value(ref)
        source = dag.nodes[dag.source(ref)[0]]
        mesh = source.mesh if isinstance(source, AllToAll) else dag.meshes.get(region)
        if mesh is None:
            return [rank]
        axes = dag.routed_axes(mesh)
        if value.kind != Kind.GRAD:
            axes = tuple(axis for axis, _ in value.others if axis in axes)
        (block,) = (block for block in mesh.blocks(axes) if rank in block)
        return list({dag.replica_of(r): r for r in block}.values())


def merged(shares: list[Share]) -> list[Share]:
    """Return shares in order. Adjacent samples of one value are one share. A share that occurs twice stays twice."""
    found: list[Share] = []
    for share in sorted(shares):
        if found and found[-1][:2] == share[:2] and found[-1][3] == share[2]:
            found[-1] = [*found[-1][:3], share[3]]
        else:
            found.append(share)
    return found
