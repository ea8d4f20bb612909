"""The reference interpreter: runs any training DAG in one process, with all devices simulated.

It takes the nodes in topological order, one by one, and does with plain tensor arithmetic what their definitions say. It
knows no plan, no stream and no schedule; the executor must give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import networkx as nx
import torch

from lightning_piper.capture.eager import Outcome
from lightning_piper.errors import VerificationError
from lightning_piper.ir.buckets import Bucket, packed, packed_params
from lightning_piper.ir.build import metric_names, reductions
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import (
    Accumulate,
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Chunk,
    Concat,
    Cut,
    Metrics,
    Node,
    Pack,
    Parameters,
    Recv,
    ReduceScatter,
    Ref,
    Report,
    Result,
    Send,
    Update,
)
from lightning_piper.ir.seeds import chunk_seed
from lightning_piper.ir.values import Partial, Shard, TensorSpec
from lightning_piper.verify.exchange import exchange

Bundle = list[torch.Tensor]


def interpret(dag: TrainingDAG, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], seed: int = 0) -> Outcome:
    """Run one step.

    Args:
        dag: any training DAG, finished or not; nodes without a device run as well.
        tensors: parameters and buffers by canonical name; not changed.
        leaves: the tensors of the global batch.
        seed: of the step's random numbers.

    Raises:
        VerificationError: the DAG has a cycle, or devices disagree about a gradient.
    """
    if not nx.is_directed_acyclic_graph(dag.graph):
        raise VerificationError("the training DAG has a cycle")
    run = _Run(dag, tensors, leaves, seed)
    with torch.no_grad():
        for node_id in nx.lexicographical_topological_sort(dag.graph):
            run.step(dag.nodes[node_id])
    return Outcome(run.metrics, run.grads, run.buffers, run.results)


class _Run:
    """Values are kept by (ref, replica): what the devices of one replica hold of a value is the same."""

    def __init__(self, dag: TrainingDAG, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], seed: int) -> None:
        self.dag, self.tensors, self.leaves, self.seed = dag, tensors, leaves, seed
        self.values: dict[tuple[Ref, int], Bundle] = {}
        self.readers: dict[Ref, int] = {}
        for node in dag.nodes.values():
            for ref in node.reads:
                self.readers[ref] = self.readers.get(ref, 0) + 1
        self.metrics: dict[str, torch.Tensor] = {}
        self.grads: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.results: list[dict[str, torch.Tensor]] = [{} for _ in range(dag.replicas)]

    def step(self, node: Node) -> None:
        replicas = range(self.dag.replicas)
        if isinstance(node, AllReduce):
            made = [[self._sum_over(node, replicas)]] * len(replicas)
        elif isinstance(node, ReduceScatter):
            bucket = _bucket_of(node)
            made = [[[self._sum_over(node, bucket.sharers(r))[0].chunk(bucket.members)[bucket.member(r)]]] for r in replicas]
        elif isinstance(node, AllGather):
            bucket = _bucket_of(node)
            made = [[[torch.cat([self.values[node.inputs[0], s][0] for s in bucket.sharers(r)])]] for r in replicas]
        elif isinstance(node, AllToAll):
            held = [[self.values[ref, r][0] for ref in node.inputs] for r in replicas]
            made = [[[x]] for x in exchange(node, self.dag.code.experts[node.region].even, held)]
        elif isinstance(node, Update):
            self._update(node)
            made = [[] for _ in replicas]
        elif isinstance(node, Report):
            self._report(node)
            made = [[] for _ in replicas]
        elif isinstance(node, Result):
            for r in replicas:
                self.results[r] |= zip(self.dag.value(node.inputs[0]).names, self.values[node.inputs[0], r], strict=True)
            made = [[] for _ in replicas]
        else:
            made = [self._execute(node, r, [self.values[ref, r] for ref in node.inputs]) for r in replicas]
        for r in replicas:
            for i, bundle in enumerate(made[r]):
                if (node.id, i) in self.readers:
                    self.values[(node.id, i), r] = bundle
        for ref in node.reads:
            self.readers[ref] -= 1
            if not self.readers[ref]:
                for r in replicas:
                    del self.values[ref, r]

    def _execute(self, node: Node, replica: int, inputs: list[Bundle]) -> list[Bundle]:
        match node:
            case Chunk():
                return self._chunk(node, replica, inputs)
            case Send() | Recv():
                return inputs
            case Cut():
                rows = node.stop - node.start
                specs = node.outputs[0].tensors
                return [[_as(x.narrow(node.dim, node.start, rows), s) for x, s in zip(inputs[0], specs, strict=True)]]
            case Concat():
                joined = [torch.cat(parts, node.dim) for parts in zip(*inputs, strict=True)]
                return [[_as(x, s) for x, s in zip(joined, node.outputs[0].tensors, strict=True)]]
            case Accumulate():
                return [_fold(inputs)]
            case Metrics():
                return [[self._merge(node, replica, inputs)]]
            case Barrier():
                return []
            case Pack():
                bucket, by_name = _bucket_of(node), dict(zip(self.dag.value(node.inputs[0]).names, inputs[0], strict=True))
                return [[packed(bucket, by_name, inputs[0][0].device)]]
            case Parameters():
                bucket = _bucket_of(node)
                flat = packed_params(bucket, self.tensors, replica, self.tensors[bucket.names[0]].device)
                return [[flat.chunk(bucket.members)[bucket.member(replica)]]]
        raise VerificationError(f"{node.label} is a node type that the reference interpreter does not know")

    def _chunk(self, chunk: Chunk, replica: int, inputs: list[Bundle]) -> list[Bundle]:
        interface = self.dag.interface(chunk)
        args = [x for bundle in inputs for x in bundle]
        args += self._params(chunk, replica)
        args += [self.tensors[name] for name in interface.buffers]
        for name, ref in zip(interface.state, chunk.state, strict=True):
            old = self.tensors[name] if ref is None else self.values[ref, replica][self.dag.value(ref).names.index(name)]
            args.append(old)
        first, part = replica * self.dag.share, chunk.slice
        samples = slice(first + part.start, first + part.stop)
        args += [x[samples] if x.ndim else x for x in (self.leaves[i] for i in interface.batch)]
        if interface.seeds_gradient:
            args.append(torch.tensor(len(part) / self.dag.size, dtype=self._loss_dtype(), device=args[0].device))
        code = self.dag.code_of(chunk)
        if interface.random:
            with torch.random.fork_rng():
                torch.manual_seed(chunk_seed(self.seed, chunk, first))
                flat = iter(code.run(args))
        else:
            flat = iter(code.run(args))
        return [[next(flat) for _ in specs] for specs in code.outputs]

    def _params(self, chunk: Chunk, replica: int) -> Bundle:
        names = self.dag.interface(chunk).params
        found = []
        for name, ref in zip(names, chunk.params or (None,) * len(names), strict=True):
            if ref is None:
                found.append(self.tensors[name])  # of divided experts, all of them: they come from a gather, or not at all
            else:
                bucket = self.dag.value(ref).bucket
                assert bucket is not None
                found.append(bucket.views(self.values[ref, replica][0])[bucket.names.index(name)])
        return found

    def _loss_dtype(self) -> torch.dtype:
        return next(v.tensors[0].dtype for c in self.dag.of_type(Chunk) for v in c.outputs if v.kind == "loss")

    def _merge(self, node: Metrics, replica: int, inputs: list[Bundle]) -> torch.Tensor:
        names = reductions(self.dag.code)
        vector = torch.zeros(self.dag.replicas * len(names), dtype=torch.float64)
        for metric in dict.fromkeys(node.metrics):
            values = [b[0].double().cpu() for b, m in zip(inputs, node.metrics, strict=True) if m == metric]
            shares = [len(s) / self.dag.size for s, m in zip(node.slices, node.metrics, strict=True) if m == metric]
            if names[metric] == "mean":
                values = [v * w for v, w in zip(values, shares, strict=True)]
            vector[replica * len(names) + metric] = _reduced(names[metric], values)
        return vector

    def _sum_over(self, node: Node, replicas: Sequence[int]) -> Bundle:
        """The metrics of all regions, or the gradients of one region, from some replicas."""
        return _fold([self.values[ref, r] for r in replicas for ref in node.inputs])

    def _report(self, node: Report) -> None:
        if not node.inputs:  # nothing is logged
            return
        vector = _fold([self.values[ref, 0] for ref in node.inputs])[0]
        rows = vector.view(self.dag.replicas, -1)
        how = ("sum" if reduction == "mean" else reduction for reduction in reductions(self.dag.code))
        merged = [_reduced(reduction, list(column)) for reduction, column in zip(how, rows.unbind(1), strict=True)]
        self.metrics = dict(zip(metric_names(self.dag.code), merged, strict=True))

    def _update(self, node: Update) -> None:
        value = self.dag.value(node.inputs[0])
        replicas = range(self.dag.replicas)
        summands: list[list[Bundle]] = []  # of each input, by replica
        for ref in node.inputs:
            held = [self.values[ref, r] for r in replicas]
            placement = self.dag.value(ref).placement
            if isinstance(placement, Partial):  # not yet summed over the replicas: so it is in a program that is not finished
                groups = [replicas if value.bucket is None else value.bucket.sharers(r) for r in replicas]
                held = [_fold([held[s] for s in group]) for group in groups]
            elif isinstance(placement, Shard):
                assert value.bucket is not None
                held = [[torch.cat([held[s][0] for s in value.bucket.sharers(r)])] for r in replicas]
            summands.append(held)
        found = [_fold([held[r] for held in summands]) for r in replicas]
        if value.bucket is not None:  # the optimizer takes gradients in the parameters' own dtype
            specs = value.bucket.tensors
            found = [[x.to(s.dtype) for x, s in zip(value.bucket.views(flat[0]), specs, strict=True)] for flat in found]
            # Each group of owners has all parts together.
            found = [_joined([found[r] for r in group]) for group in value.bucket.owners] or found
        into = self.buffers if value.kind == "buffer" else self.grads
        for bundle in found:
            for name, tensor in zip(value.names, bundle, strict=True):
                if name in into and not torch.equal(into[name], tensor):
                    raise VerificationError(f"devices {node.devices} disagree about the {value.kind} of {name}")
                into[name] = tensor


def _joined(parts: list[Bundle]) -> Bundle:
    """Whole tensors from their parts along the first dimension."""
    return [torch.cat(xs) for xs in zip(*parts, strict=True)]


def _reduced(reduction: str, values: list[torch.Tensor]) -> torch.Tensor:
    """One number from several; means come with their weights applied."""
    if reduction in ("mean", "sum"):
        return _fold([[v] for v in values])[0]
    return torch.stack(values).max() if reduction == "max" else torch.stack(values).min()


def _fold(bundles: list[Bundle]) -> Bundle:
    """The sum, from the first to the last."""
    total = bundles[0]
    for bundle in bundles[1:]:
        total = [a + b for a, b in zip(total, bundle, strict=True)]
    return total


def _bucket_of(node: Node) -> Bucket:
    bucket = node.outputs[0].bucket
    assert bucket is not None
    return bucket


def _as(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The same numbers with the strides of `spec`: strides choose kernels, and so bits."""
    return x if x.stride() == spec.stride else torch.empty_strided(spec.shape, spec.stride, dtype=x.dtype, device=x.device).copy_(x)
