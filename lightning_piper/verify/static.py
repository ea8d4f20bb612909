"""The static check: does a training DAG compute what one device computes? Decided without running anything, in linear time.

The capture says which output of which pass each input of a pass is. A DAG is right when every chunk gets exactly these
values, of exactly its own samples, through nodes that only move, cut, join or sum them; when every region runs once for
every sample; and when every gradient, metric and buffer is put together from all slices, each once, with weights n_i/N.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from fractions import Fraction

import networkx as nx

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import (
    Accumulate,
    AllGather,
    AllReduce,
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
    Send,
    Update,
)
from lightning_piper.ir.values import Partial, Replicate, Shard, Slice
from lightning_piper.verify.completeness import incomplete
from lightning_piper.verify.facts import Contributions, Facts, Origin, names_of, slices_of, specs_of


def check(dag: TrainingDAG, final: bool = False) -> None:
    """Check a training DAG.

    Replicas do the same with their shares of the batch, so one share is checked: that its samples count once, and that what is
    summed over replicas was not, and is before it is used.

    Args:
        dag: the DAG.
        final: the program is complete; until then, gradients may wait for a directive that sums them over the replicas.

    Raises:
        VerificationError: lists what is wrong, where, and which directive brought it in.
    """
    problems = list(_Checker(dag).problems(final))
    if problems:
        shown = "\n  ".join(problems[:10]) + (f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise VerificationError(f"the training DAG does not compute what one device computes:\n  {shown}")


class _Checker(Facts):
    def problems(self, final: bool) -> Iterable[str]:
        found = list(self._structure())
        if found:  # the rest needs a sound graph
            return found
        for node_id in nx.topological_sort(self.dag.graph):
            node = self.dag.nodes[node_id]
            found += self._devices(node)
            found += _CHECKS.get(type(node), _Checker._nothing)(self, node)
        found += incomplete(self, final)
        return found

    def _nothing(self, node: Node) -> Iterable[str]:
        return ()

    def _structure(self) -> Iterable[str]:
        dag = self.dag
        for node in dag.nodes.values():
            for source, index in node.reads:
                if source not in dag.nodes or index >= len(dag.nodes[source].outputs):
                    yield f"{self.at(node)} reads %{source}.{index}, which does not exist"
                elif not dag.graph.has_edge(source, node.id):
                    yield f"{self.at(node)} reads %{source}.{index}, but nothing makes it wait for it: use TrainingDAG.rewire"
        if not nx.is_directed_acyclic_graph(dag.graph):
            steps = " -> ".join(self.at(dag.nodes[a]) for a, _ in nx.find_cycle(dag.graph))
            yield f"nodes wait for each other in a circle: {steps}"

    def _devices(self, node: Node) -> Iterable[str]:
        """Every value lies on the device that reads it."""
        if not node.devices:
            return
        for ref in node.reads:
            source = self.dag.nodes[ref[0]]
            if not source.devices or isinstance(node, Recv):
                continue
            if isinstance(node, AllReduce):
                good = set(source.devices) <= set(node.devices)
            else:
                good = set(node.devices) <= set(source.devices)
            if not good:
                yield (
                    f"{self.at(node)} reads {self.dag.value(ref).label} of {self.at(source)}, which lies on device "
                    f"{','.join(map(str, source.devices))}; a send and a receive between them are missing"
                )

    # Chunks

    def _chunk(self, node: Chunk) -> Iterable[str]:
        interface = self.dag.interface(node)
        weight = Fraction(1) if node.kind == "F" else self.share(node.slice)
        for i in range(len(node.outputs)):
            self.origins[node.id, i] = self.dag.code.whole(*node.key, i)
            self.parts[node.id, i] = {node.slice: weight}
        if len(node.inputs) != len(interface.inputs) or len(node.outputs) != len(interface.outputs):
            yield (
                f"{self.at(node)} has {len(node.inputs)} inputs and {len(node.outputs)} outputs; its region has "
                f"{len(interface.inputs)} and {len(interface.outputs)}"
            )
            return
        for ref, wanted in zip(node.inputs, interface.inputs, strict=True):
            if self.origins.get(ref) != wanted:
                yield f"{self.at(node)} reads {self.named(ref)} where its region reads {self.pass_of(wanted)}: let it read that"
            elif list(self.parts[ref]) != [node.slice] and not self._enters_whole(ref, wanted, node.slice):
                found = slices_of(self.parts[ref])
                yield f"{self.at(node)} works on samples {node.slice} but reads {self.named(ref)} of samples {found}"
        for value, specs in zip(node.outputs, self.dag.code_of(node).outputs, strict=True):
            if value.tensors != specs:
                says, makes = specs_of(value.tensors), specs_of(specs)
                yield f"{self.at(node)} names {value.label} {says}; of {node.slice} its code makes {makes}"
        yield from self._state(node)
        yield from self._params(node)

    def _enters_whole(self, ref: Ref, origin: Origin, part: Slice) -> bool:
        """A forward value whose shape does not follow the batch may be made from more samples than the part that reads it."""
        if origin[1] != "F" or not any(whole.start <= part.start and part.stop <= whole.stop for whole in self.parts[ref]):
            return False
        specs = self.dag.code.code[origin[0], origin[1]].outputs[origin[2]]
        other = self.dag.step.at(max(1, self.dag.size // 2)).code[origin[0], origin[1]].outputs[origin[2]]
        return [s.shape for s in specs] == [s.shape for s in other] and self.dag.size > 1

    def _state(self, node: Chunk) -> Iterable[str]:
        """Buffers pass from each slice to the next."""
        for name, ref in zip(self.dag.interface(node).state, node.state, strict=True):
            if ref is None:
                if node.slice.start:
                    yield (
                        f"{self.at(node)} reads buffer {name} as it was before the step, not as the samples before "
                        f"{node.slice.start} left it"
                    )
            elif name not in self.dag.value(ref).names or max(self.parts[ref]).stop != node.slice.start:
                where = f"the slice that ends at {node.slice.start}"
                yield f"{self.at(node)} reads buffer {name} from {self.named(ref)}, not from {where}"

    def _params(self, node: Chunk) -> Iterable[str]:
        """Parameters come whole, from a gather of the bucket that they lie in."""
        names = self.dag.interface(node).params
        if len(node.params) not in (0, len(names)):
            yield f"{self.at(node)} has {len(node.params)} sources of parameters; its region reads {len(names)}"
            return
        for name, ref in zip(names, node.params, strict=False):
            if ref is None:
                continue
            value = self.dag.value(ref)
            if value.kind != "param" or value.bucket is None or name not in value.names:
                yield f"{self.at(node)} reads parameter {name} from {self.named(ref)}, which does not hold it"
            elif not isinstance(value.placement, Replicate):
                yield f"{self.at(node)} reads parameter {name} from a shard: gather it first"

    # Nodes that move, cut, join and sum

    def _identity(self, node: Send | Recv) -> Iterable[str]:
        source = self.dag.nodes[node.inputs[0][0]]
        self._forward(node)
        if node.outputs[0] != self.dag.value(node.inputs[0]):
            yield f"{self.at(node)} hands on {self.named(node.inputs[0])} as something else than it is"
        if isinstance(node, Send):
            users = self.dag.users(node)
            if len(users) != 1 or not isinstance(users[0], Recv):
                yield f"{self.at(node)} has {len(users)} receives; it needs one"
        elif not isinstance(source, Send) or source.peers != node.devices or node.peers != source.devices:
            yield f"{self.at(node)} receives from {self.at(source)}, which does not send to it"

    def _forward(self, node: Node) -> None:
        ref = node.inputs[0]
        if ref in self.origins:
            self.origins[node.id, 0], self.parts[node.id, 0] = self.origins[ref], self.parts[ref]

    def _cut(self, node: Cut) -> Iterable[str]:
        self._forward(node)
        ref = node.inputs[0]
        if len(self.parts.get(ref, {})) != 1:
            yield f"{self.at(node)} cuts {self.named(ref)}, which is not one slice"
            return
        ((whole, weight),) = self.parts[ref].items()
        rows, rest = divmod(self.dag.value(ref).tensors[0].shape[node.dim], len(whole))
        if rest or node.start % rows or node.stop % rows:
            yield f"{self.at(node)} cuts {self.named(ref)} inside of a sample"
            return
        yield from self._shapes(node, [(x.shape, node.stop - node.start) for x in self.dag.value(ref).tensors])
        part = Slice(whole.start + node.start // rows, whole.start + node.stop // rows)
        self.parts[node.id, 0] = {part: weight if weight == 1 else self.share(part)}

    def _concat(self, node: Concat) -> Iterable[str]:
        self._forward(node)
        parts = [next(iter(self.parts.get(ref, {Slice(0, 0): Fraction(0)}))) for ref in node.inputs]
        if len({self.origins.get(ref) for ref in node.inputs}) != 1:
            yield f"{self.at(node)} joins different values: {', '.join(self.named(ref) for ref in node.inputs)}"
        if any(a.stop != b.start for a, b in itertools.pairwise(parts)):
            yield f"{self.at(node)} joins samples {', '.join(map(str, parts))}, which do not follow each other"
        pieces = zip(*(self.dag.value(ref).tensors for ref in node.inputs), strict=False)
        yield from self._shapes(node, [(xs[0].shape, sum(x.shape[node.dim] for x in xs)) for xs in pieces])
        whole = Slice(min(part.start for part in parts), max(part.stop for part in parts))
        forward = next(iter(self.parts[node.inputs[0]].values())) == 1
        self.parts[node.id, 0] = {whole: Fraction(1) if forward else self.share(whole)}

    def _shapes(self, node: Cut | Concat, made: list[tuple[tuple[int, ...], int]]) -> Iterable[str]:
        """What is cut or joined along `dim` has the shape that the node says: inputs' shapes, and the new size along `dim`."""
        for (shape, rows), spec in zip(made, node.outputs[0].tensors, strict=False):
            found = (*shape[: node.dim], rows, *shape[node.dim + 1 :])
            if found != spec.shape:
                yield f"{self.at(node)} makes a tensor of shape {list(found)} along dimension {node.dim} and names it {spec}"

    def _accumulate(self, node: Accumulate) -> Iterable[str]:
        self._forward(node)
        total: Contributions = {}
        for ref in node.inputs:
            if self.origins.get(ref) != self.origins.get(node.inputs[0]):
                yield f"{self.at(node)} adds {self.named(ref)} to {self.named(node.inputs[0])}"
            for part, weight in self.parts.get(ref, {}).items():
                total[part] = total.get(part, Fraction(0)) + weight
        # Gradients of parameters are of the whole batch, or of a part that is summed over replicas by itself; the gradient of a
        # value that a split part read whole is of its samples.
        value = self.dag.value(node.inputs[0])
        whole = Slice(0, self.dag.share)
        if value.kind == "cotangent" and total:
            whole = Slice(min(total).start, max(total).stop)
        # Another home of the region, or another sum over replicas, may add the rest: whether all is there shows at the update.
        if problem := self.uncovered(self.share, total, whole, some=value.kind == "grad"):
            yield f"gradient of {names_of(value.names)} ({self.at(node)}): {problem}"
        complete = self.uncovered(self.share, total, whole) is None
        self.parts[node.id, 0] = {whole: self.share(whole)} if complete else total
        for ref in node.inputs:
            other = self.dag.value(ref)
            if (other.bucket, other.placement) != (value.bucket, value.placement):
                yield f"{self.at(node)} adds {self.named(ref)} as {other.placement} to {value.placement}, or of another bucket"
        if (node.outputs[0].bucket, node.outputs[0].placement, node.outputs[0].tensors) != (
            value.bucket,
            value.placement,
            value.tensors,
        ):
            yield f"{self.at(node)} hands out its sum as something else than its terms"

    def _pack(self, node: Pack) -> Iterable[str]:
        """Lays the gradients of a bucket's parameters, which the bundle has, one after another."""
        self._forward(node)
        value, made = self.dag.value(node.inputs[0]), node.outputs[0]
        bucket = made.bucket
        if bucket is None or made.names != bucket.names or made.tensors != (bucket.whole,):
            yield f"{self.at(node)} makes no flat tensor of a bucket"
        elif value.bucket is not None or value.kind != made.kind or not set(bucket.names) <= set(value.names):
            yield f"{self.at(node)} packs {names_of(bucket.names)}, which {self.named(node.inputs[0])} does not hold"
        if made.placement != value.placement:
            yield f"{self.at(node)} hands on {value.placement} as {made.placement}"

    def _reduce_scatter(self, node: ReduceScatter) -> Iterable[str]:
        """Sums a bucket over the replicas, once, and leaves each with its shard."""
        yield from self._all_reduce_inputs(node)
        self._forward(node)
        value, made = self.dag.value(node.inputs[0]), node.outputs[0]
        bucket = value.bucket
        if bucket is None or made.bucket != bucket or made.tensors != (bucket.part,) or made.placement != Shard(0):
            yield f"{self.at(node)} makes no shard of the bucket that it sums"
        elif bucket.members != len(node.devices):
            yield f"{self.at(node)} has {len(node.devices)} members, the bucket {bucket.members} shards"

    def _parameters(self, node: Parameters) -> Iterable[str]:
        value = node.outputs[0]
        bucket = value.bucket
        if bucket is None or value.kind != "param" or value.placement != Shard(0) or value.tensors != (bucket.part,):
            yield f"{self.at(node)} makes no shard of a bucket of parameters"
        elif node.devices and bucket.members != len(node.devices):
            yield f"{self.at(node)} is on {len(node.devices)} devices, the bucket has {bucket.members} shards"
        elif any(name not in self.dag.step.params for name in bucket.names):
            yield f"{self.at(node)} holds {names_of(bucket.names)}, of which not all are parameters of the module"

    def _all_gather(self, node: AllGather) -> Iterable[str]:
        value, made = self.dag.value(node.inputs[0]), node.outputs[0]
        if value.placement != Shard(0) or made.placement != Replicate():
            yield f"{self.at(node)} gathers {value.label} as {made.placement} from {value.placement}: it makes R from S(0)"
        bucket = value.bucket
        if bucket is None or (made.kind, made.names, made.bucket, made.tensors) != (
            value.kind,
            value.names,
            bucket,
            (bucket.whole,),
        ):
            yield f"{self.at(node)} hands on {value.label} as something else than it is"
        elif bucket.members != len(node.devices) or node.devices != self.dag.nodes[node.inputs[0][0]].devices:
            yield f"{self.at(node)} gathers {bucket.members} shards from {len(node.devices)} members"

    def _all_reduce(self, node: AllReduce) -> Iterable[str]:
        """Sums over replicas (metrics: over all devices), once."""
        yield from self._all_reduce_inputs(node)
        value, made = self.dag.value(node.inputs[0]), node.outputs[0]
        if not isinstance(made.placement, Replicate):
            yield f"{self.at(node)} hands out {made.placement} after its sum"
        if (made.kind, made.names, made.bucket, made.tensors) != (value.kind, value.names, value.bucket, value.tensors):
            yield f"{self.at(node)} hands on {self.named(node.inputs[0])} as something else than it is"
        self._forward(node)

    def _all_reduce_inputs(self, node: AllReduce | ReduceScatter) -> Iterable[str]:
        for ref in node.inputs:
            value, source = self.dag.value(ref), self.dag.nodes[ref[0]]
            if not isinstance(value.placement, Partial):
                held = "a shard of it" if isinstance(value.placement, Shard) else "the whole of it"
                yield f"{self.at(node)} sums {self.named(ref)} over devices that all hold {held}"
            if value.kind != "metrics" and (len(node.inputs) != 1 or source.devices != node.devices):
                yield f"{self.at(node)} sums {self.named(ref)}, which lies on devices {list(source.devices)}"

    # Ends

    def _update(self, node: Update) -> Iterable[str]:
        value = self.dag.value(node.inputs[0])
        if value.kind == "buffer":
            if len(node.inputs) != 1:
                yield f"buffers {names_of(value.names)}: {self.at(node)} has {len(node.inputs)} values; it needs the last one alone"
            last = max(self.parts[node.inputs[0]]).stop
            if last != self.dag.share:
                what = f"the value after sample {last}, not after {self.dag.share}"
                yield f"buffers {names_of(value.names)}: {self.at(node)} keeps {what}"
            return
        together: dict[Origin, Contributions] = {}
        for ref in node.inputs:
            of_region = together.setdefault(self.origins[ref], {}) if ref in self.origins else {}
            for part, weight in self.parts.get(ref, {}).items():
                of_region[part] = of_region.get(part, Fraction(0)) + weight
        for origin, parts in together.items():
            if problem := self.uncovered(self.share, parts):
                yield f"gradient of {names_of(value.names)} ({self.at(node)}): of {self.pass_of(origin)}, {problem}"
        wanted = sorted(
            (*key, i) for key, interface in self.dag.code.interfaces.items()
            for i, out in enumerate(interface.outputs) if out.kind == "grad" and set(value.names) & set(out.names)
        )  # fmt: skip
        found = sorted(together)
        if found != wanted:
            takes, should = (", ".join(map(self.pass_of, origins)) for origins in (found, wanted))
            yield f"gradient of {names_of(value.names)} ({self.at(node)}): sums {takes} where one device sums {should}"
        for ref in node.inputs:
            other = self.dag.value(ref)
            if (other.names, other.bucket) != (value.names, value.bucket):
                yield f"gradient of {names_of(value.names)} ({self.at(node)}): adds {self.named(ref)} in another bucket"

    def _metrics(self, node: Metrics) -> Iterable[str]:
        names = node.outputs[0].names
        parts: dict[int, Contributions] = {}
        for ref, metric, part in zip(node.inputs, node.metrics, node.slices, strict=True):
            value = self.dag.value(ref)
            if value.names != (names[metric],) or list(self.parts.get(ref, {})) != [part]:
                yield f"{self.at(node)} takes {self.named(ref)} for {names[metric]} of samples {part}"
            total = parts.setdefault(metric, {})
            total[part] = total.get(part, Fraction(0)) + self.share(part)
        for metric, total in parts.items():
            if problem := self.uncovered(self.share, total):
                yield f"metric {names[metric]} ({self.at(node)}): {problem}"


_CHECKS: dict[type[Node], Callable[..., Iterable[str]]] = {
    Chunk: _Checker._chunk, Send: _Checker._identity, Recv: _Checker._identity, Cut: _Checker._cut, Concat: _Checker._concat,
    Accumulate: _Checker._accumulate, AllReduce: _Checker._all_reduce, Update: _Checker._update, Metrics: _Checker._metrics,
    Pack: _Checker._pack, ReduceScatter: _Checker._reduce_scatter, Parameters: _Checker._parameters,
    AllGather: _Checker._all_gather,
}  # fmt: skip
