"""The static check: does a training DAG compute what one device computes? Decided without running anything, in linear time.

The capture says which output of which pass each input of a pass is. A DAG is right when every chunk gets exactly these
values, of exactly its own samples, through nodes that only move, cut, join or sum them; when every region runs once for
every sample; and when every gradient, metric and buffer is put together from all slices, each once, with weights n_i/N.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

import networkx as nx

from lightning_piper.errors import VerificationError
from lightning_piper.ir.build import metrics_value
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import (
    Accumulate,
    AllGather,
    AllReduce,
    AllToAll,
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
    Result,
    Send,
    Update,
)
from lightning_piper.ir.values import Partial, Replicate, Slice
from lightning_piper.verify import experts, results, sharding
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
        found = [*self._structure(), *experts.division(self)]
        if found:  # the rest needs a sound graph
            return found
        for node_id in nx.topological_sort(self.dag.graph):
            node = self.dag.nodes[node_id]
            found += self._devices(node)
            found += sharding.flat_values(self, node)
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
        for value, specs, made in zip(node.outputs, self.dag.code_of(node).outputs, interface.outputs, strict=True):
            if value.tensors != specs:
                says, makes = specs_of(value.tensors), specs_of(specs)
                yield f"{self.at(node)} names {value.label} {says}; of {node.slice} its code makes {makes}"
            # Each replica has the gradients of its own samples.
            held = Partial() if made.kind == "grad" and self.dag.replicas > 1 else Replicate()
            owned = self.dag.is_owned(node.key, interface.outputs.index(made))
            if (value.kind, value.names, value.placement, value.bucket, value.owned) != (made.kind, made.names, held, None, owned):
                yield f"{self.at(node)} names {value.label} {value.placement} what is {made.kind}:{names_of(made.names)} {held}"
        yield from self._state(node)
        yield from sharding.read_params(self, node)
        yield from experts.exchanged(self, node)

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

    # Nodes that move, cut, join and sum

    def _identity(self, node: Send | Recv) -> Iterable[str]:
        source = self.dag.nodes[node.inputs[0][0]]
        self.forward(node)
        if node.outputs[0] != self.dag.value(node.inputs[0]):
            yield f"{self.at(node)} hands on {self.named(node.inputs[0])} as something else than it is"
        if isinstance(node, Send):
            users = self.dag.users(node)
            if len(users) != 1 or not isinstance(users[0], Recv):
                yield f"{self.at(node)} has {len(users)} receives; it needs one"
        elif not isinstance(source, Send) or source.peers != node.devices or node.peers != source.devices:
            yield f"{self.at(node)} receives from {self.at(source)}, which does not send to it"

    def _cut(self, node: Cut) -> Iterable[str]:
        self.forward(node)
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
        self.forward(node)
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
        self.forward(node)
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
        if node.outputs[0] != value:
            yield f"{self.at(node)} hands out its sum as something else than its terms"

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
        if replace(node.outputs[0], placement=Replicate()) != metrics_value(self.dag):
            yield f"{self.at(node)} names {node.outputs[0].label} what has other places"
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
    Accumulate: _Checker._accumulate, Update: _Checker._update, Metrics: _Checker._metrics, AllReduce: sharding.all_reduce,
    Pack: sharding.pack, ReduceScatter: sharding.reduce_scatter, Parameters: sharding.parameters, AllGather: sharding.all_gather,
    AllToAll: experts.all_to_all,
    Result: results.result,
}  # fmt: skip
