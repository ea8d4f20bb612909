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
    AllReduce,
    Chunk,
    Concat,
    Cut,
    Metrics,
    Node,
    Recv,
    Ref,
    Report,
    Send,
    Update,
)
from lightning_piper.ir.regions import PassKey
from lightning_piper.ir.seeds import chunk_seed
from lightning_piper.ir.values import Slice, TensorSpec

# What a value is: output `index` of a pass, and the samples that went into it with their weights. The weight of a forward
# value is 1 per slice; a gradient of the mean loss over N samples carries n_i/N for a slice of n_i samples.
Origin = tuple[int, str, int]
Contributions = dict[Slice, Fraction]


def check(dag: TrainingDAG) -> None:
    """Check a training DAG.

    Raises:
        VerificationError: lists what is wrong, where, and which directive brought it in.
    """
    problems = list(_Checker(dag).problems())
    if problems:
        shown = "\n  ".join(problems[:10]) + (f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise VerificationError(f"the training DAG does not compute what one device computes:\n  {shown}")


class _Checker:
    def __init__(self, dag: TrainingDAG) -> None:
        self.dag = dag
        self.origins: dict[Ref, Origin] = {}
        self.parts: dict[Ref, Contributions] = {}

    def problems(self) -> Iterable[str]:
        found = list(self._structure())
        if found:  # the rest needs a sound graph
            return found
        for node_id in nx.topological_sort(self.dag.graph):
            node = self.dag.nodes[node_id]
            found += self._devices(node)
            found += _CHECKS.get(type(node), _Checker._nothing)(self, node)
        found += self._complete()
        return found

    def _nothing(self, node: Node) -> Iterable[str]:
        return ()

    def _structure(self) -> Iterable[str]:
        dag = self.dag
        for node in dag.nodes.values():
            for source, index in node.reads:
                if source not in dag.nodes or index >= len(dag.nodes[source].outputs):
                    yield f"{_at(node)} reads %{source}.{index}, which does not exist"
                elif not dag.graph.has_edge(source, node.id):
                    yield f"{_at(node)} reads %{source}.{index}, but nothing makes it wait for it"
        if not nx.is_directed_acyclic_graph(dag.graph):
            steps = " -> ".join(_at(dag.nodes[a]) for a, _ in nx.find_cycle(dag.graph))
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
                    f"{_at(node)} reads {self.dag.value(ref).label} of {_at(source)}, which lies on device "
                    f"{','.join(map(str, source.devices))}; a transfer is missing"
                )

    def _whole(self, weight: Callable[[Slice], Fraction], parts: Contributions, whole: Slice | None = None) -> str | None:
        """Why the parts are not each sample of `whole` (the batch) exactly once with its weight; None if they are."""
        whole = whole or Slice(0, self.dag.size)
        edge = whole.start
        for part in sorted(parts):
            if part.start > edge:
                return f"samples {edge}:{part.start} are missing"
            if part.start < edge:
                return f"samples {part.start}:{min(edge, part.stop)} count more than once"
            if (times := parts[part] / weight(part)) > 1 and times.denominator == 1:
                return f"samples {part} count {times} times"
            if times != 1:
                return f"samples {part} enter with weight {parts[part]} instead of {weight(part)}"
            edge = part.stop
        return None if edge == whole.stop else f"samples {edge}:{whole.stop} are missing"

    def _share(self, part: Slice) -> Fraction:
        return Fraction(len(part), self.dag.size)

    # Chunks

    def _chunk(self, node: Chunk) -> Iterable[str]:
        interface = self.dag.interface(node)
        weight = Fraction(1) if node.kind == "F" else self._share(node.slice)
        for i in range(len(node.outputs)):
            self.origins[node.id, i] = (*node.key, i)
            self.parts[node.id, i] = {node.slice: weight}
        if len(node.inputs) != len(interface.inputs) or len(node.outputs) != len(interface.outputs):
            yield (
                f"{_at(node)} has {len(node.inputs)} inputs and {len(node.outputs)} outputs; its region has "
                f"{len(interface.inputs)} and {len(interface.outputs)}"
            )
            return
        for ref, wanted in zip(node.inputs, interface.inputs, strict=True):
            if self.origins.get(ref) != wanted:
                yield f"{_at(node)} reads {self._named(ref)} where its region reads {self._pass(wanted)}"
            elif list(self.parts[ref]) != [node.slice] and not self._enters_whole(ref, wanted, node.slice):
                yield f"{_at(node)} works on samples {node.slice} but reads {self._named(ref)} of samples {_join(self.parts[ref])}"
        for value, specs in zip(node.outputs, self.dag.code_of(node).outputs, strict=True):
            if value.tensors != specs:
                yield f"{_at(node)} names {value.label} {_specs(value.tensors)}; of {node.slice} its code makes {_specs(specs)}"
        yield from self._state(node)

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
                        f"{_at(node)} reads buffer {name} as it was before the step, not as the samples before "
                        f"{node.slice.start} left it"
                    )
            elif name not in self.dag.value(ref).names or max(self.parts[ref]).stop != node.slice.start:
                yield f"{_at(node)} reads buffer {name} from {self._named(ref)}, not from the slice that ends at {node.slice.start}"

    # Nodes that move, cut, join and sum

    def _identity(self, node: Send | Recv) -> Iterable[str]:
        source = self.dag.nodes[node.inputs[0][0]]
        self._forward(node)
        if isinstance(node, Send):
            users = self.dag.users(node)
            if len(users) != 1 or not isinstance(users[0], Recv):
                yield f"{_at(node)} has {len(users)} receives; it needs one"
        elif not isinstance(source, Send) or (source.peer,) != node.devices or (node.peer,) != source.devices:
            yield f"{_at(node)} receives from {_at(source)}, which does not send to it"

    def _forward(self, node: Node) -> None:
        ref = node.inputs[0]
        if ref in self.origins:
            self.origins[node.id, 0], self.parts[node.id, 0] = self.origins[ref], self.parts[ref]

    def _cut(self, node: Cut) -> Iterable[str]:
        self._forward(node)
        ref = node.inputs[0]
        if len(self.parts.get(ref, {})) != 1:
            yield f"{_at(node)} cuts {self._named(ref)}, which is not one slice"
            return
        ((whole, weight),) = self.parts[ref].items()
        rows, rest = divmod(self.dag.value(ref).tensors[0].shape[node.dim], len(whole))
        if rest or node.start % rows or node.stop % rows:
            yield f"{_at(node)} cuts {self._named(ref)} inside of a sample"
            return
        yield from self._shapes(node, [(x.shape, node.stop - node.start) for x in self.dag.value(ref).tensors])
        part = Slice(whole.start + node.start // rows, whole.start + node.stop // rows)
        self.parts[node.id, 0] = {part: weight if weight == 1 else self._share(part)}

    def _concat(self, node: Concat) -> Iterable[str]:
        self._forward(node)
        parts = [next(iter(self.parts.get(ref, {Slice(0, 0): Fraction(0)}))) for ref in node.inputs]
        if len({self.origins.get(ref) for ref in node.inputs}) != 1:
            yield f"{_at(node)} joins different values: {', '.join(self._named(ref) for ref in node.inputs)}"
        if any(a.stop != b.start for a, b in itertools.pairwise(parts)):
            yield f"{_at(node)} joins samples {', '.join(map(str, parts))}, which do not follow each other"
        pieces = zip(*(self.dag.value(ref).tensors for ref in node.inputs), strict=False)
        yield from self._shapes(node, [(xs[0].shape, sum(x.shape[node.dim] for x in xs)) for xs in pieces])
        whole = Slice(min(part.start for part in parts), max(part.stop for part in parts))
        forward = next(iter(self.parts[node.inputs[0]].values())) == 1
        self.parts[node.id, 0] = {whole: Fraction(1) if forward else self._share(whole)}

    def _shapes(self, node: Cut | Concat, made: list[tuple[tuple[int, ...], int]]) -> Iterable[str]:
        """What is cut or joined along `dim` has the shape that the node says: inputs' shapes, and the new size along `dim`."""
        for (shape, rows), spec in zip(made, node.outputs[0].tensors, strict=False):
            found = (*shape[: node.dim], rows, *shape[node.dim + 1 :])
            if found != spec.shape:
                yield f"{_at(node)} makes a tensor of shape {list(found)} along dimension {node.dim} and names it {spec}"

    def _accumulate(self, node: Accumulate) -> Iterable[str]:
        self._forward(node)
        total: Contributions = {}
        for ref in node.inputs:
            if self.origins.get(ref) != self.origins.get(node.inputs[0]):
                yield f"{_at(node)} adds {self._named(ref)} to {self._named(node.inputs[0])}"
            for part, weight in self.parts.get(ref, {}).items():
                total[part] = total.get(part, Fraction(0)) + weight
        # Gradients of parameters are of the whole batch; the gradient of a value that a split part read whole, of its samples.
        value = self.dag.value(node.inputs[0])
        whole = Slice(0, self.dag.size)
        if value.kind == "cotangent" and total:
            whole = Slice(min(total).start, max(total).stop)
        if problem := self._whole(self._share, total, whole):
            yield f"gradient of {_names(value.names)} ({_at(node)}): {problem}"
        self.parts[node.id, 0] = {whole: self._share(whole)}

    # Ends

    def _update(self, node: Update) -> Iterable[str]:
        value = self.dag.value(node.inputs[0])
        if value.kind == "buffer":
            if len(node.inputs) != 1:
                yield f"buffers {_names(value.names)}: {_at(node)} has {len(node.inputs)} values; it needs the last one alone"
            last = max(self.parts[node.inputs[0]]).stop
            if last != self.dag.size:
                yield f"buffers {_names(value.names)}: {_at(node)} keeps the value after sample {last}, not after {self.dag.size}"
            return
        for ref in node.inputs:
            if problem := self._whole(self._share, self.parts.get(ref, {})):
                yield f"gradient of {_names(value.names)} ({_at(node)}): of {self._named(ref)}, {problem}"
        wanted = sorted(
            (*key, i) for key, interface in self.dag.code.interfaces.items()
            for i, out in enumerate(interface.outputs) if out.kind == "grad" and out.names == value.names
        )  # fmt: skip
        found = sorted(self.origins[ref] for ref in node.inputs if ref in self.origins)
        if found != wanted:
            yield (
                f"gradient of {_names(value.names)} ({_at(node)}): sums {', '.join(map(self._pass, found))} where one device sums "
                f"{', '.join(map(self._pass, wanted))}"
            )

    def _metrics(self, node: Metrics) -> Iterable[str]:
        names = node.outputs[0].names
        parts: dict[int, Contributions] = {}
        for ref, metric, part in zip(node.inputs, node.metrics, node.slices, strict=True):
            value = self.dag.value(ref)
            if value.names != (names[metric],) or list(self.parts.get(ref, {})) != [part]:
                yield f"{_at(node)} takes {self._named(ref)} for {names[metric]} of samples {part}"
            total = parts.setdefault(metric, {})
            total[part] = total.get(part, Fraction(0)) + self._share(part)
        for metric, total in parts.items():
            if problem := self._whole(self._share, total):
                yield f"metric {names[metric]} ({_at(node)}): {problem}"

    def _complete(self) -> Iterable[str]:
        """Every pass runs for every sample, every gradient reaches an update on each of its devices, every metric the report."""
        dag = self.dag
        slices: dict[PassKey, Contributions] = {key: {} for key in dag.code.interfaces}
        homes: dict[str, set[tuple[int, ...]]] = {}
        for chunk in dag.of_type(Chunk):
            # A pass may run twice on the same samples (recomputation); what enters a sum twice is found where it is summed.
            slices[chunk.key][chunk.slice] = self._share(chunk.slice)
            for name in dag.interface(chunk).params + dag.interface(chunk).state:
                homes.setdefault(name, set()).add(chunk.devices)
        for (region, kind), total in slices.items():
            if problem := self._whole(self._share, total):
                yield f"{kind}[{dag.regions[region].label}]: {problem}"
        updated: dict[str, set[tuple[int, ...]]] = {}
        for update in dag.of_type(Update):
            for name in dag.value(update.inputs[0]).names:
                updated.setdefault(name, set()).add(update.devices)
        trained = {
            n for i in dag.code.interfaces.values() for out in i.outputs if out.kind in ("grad", "buffer") for n in out.names
        }
        for name in sorted(trained):
            if () in updated.get(name, set()):
                continue  # not yet placed, for one of its regions is not
            for home in sorted(homes.get(name, set()) - updated.get(name, set()) - {()}):
                yield f"{name} is used on device {','.join(map(str, home)) or '?'}, but no update reaches it there"
        yield from self._reported()
        yield from self._seeds()

    def _seeds(self) -> Iterable[str]:
        """Random numbers are drawn anew for every region and slice: no two share a seed."""
        drawn: dict[int, Chunk] = {}
        for chunk in self.dag.of_type(Chunk):
            if self.dag.interface(chunk).random:
                first = drawn.setdefault(chunk_seed(0, chunk), chunk)
                if (first.key, first.slice.start) != (chunk.key, chunk.slice.start):
                    yield f"{_at(chunk)} draws the random numbers that {_at(first)} draws"

    def _reported(self) -> Iterable[str]:
        reports = list(self.dag.of_type(Report))
        if len(reports) != 1:
            yield f"there are {len(reports)} reports of the loss; there must be one"
            return
        refs = reports[0].inputs
        sums = [self.dag.nodes[ref[0]] for ref in refs]
        if any(isinstance(s, AllReduce) for s in sums):
            refs = tuple(ref for s in sums for ref in s.inputs)
        made = {(m.id, 0) for m in self.dag.of_type(Metrics)}
        found = {metric for m in self.dag.of_type(Metrics) for metric in m.metrics}
        if sorted(refs) != sorted(made) or len(refs) != len(set(refs)):
            yield f"{_at(reports[0])} does not take every region's metrics exactly once"
        if made and len(found) != len(next(self.dag.of_type(Metrics)).outputs[0].names):
            yield f"{_at(reports[0])}: some metrics are made by no region"

    # Words

    def _named(self, ref: Ref) -> str:
        return (
            self._pass(self.origins[ref])
            if ref in self.origins
            else f"{self.dag.value(ref).label} of {_at(self.dag.nodes[ref[0]])}"
        )

    def _pass(self, origin: Origin) -> str:
        region, kind, index = origin
        output = self.dag.code.interfaces[region, kind].outputs[index]
        names = f" {_names(output.names)}" if output.names else ""
        return f"{output.kind}{names} of {kind}[{self.dag.regions[region].label}]"


def _at(node: Node) -> str:
    where = f" on device {','.join(map(str, node.devices))}" if node.devices else ""
    by = "" if node.origin is None else f" (directive {node.origin})"
    return f"{node.label} %{node.id}{where}{by}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _specs(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(map(str, specs))


def _join(parts: Contributions) -> str:
    return ", ".join(map(str, sorted(parts)))


_CHECKS: dict[type[Node], Callable[..., Iterable[str]]] = {
    Chunk: _Checker._chunk, Send: _Checker._identity, Recv: _Checker._identity, Cut: _Checker._cut, Concat: _Checker._concat,
    Accumulate: _Checker._accumulate, Update: _Checker._update, Metrics: _Checker._metrics,
}  # fmt: skip
