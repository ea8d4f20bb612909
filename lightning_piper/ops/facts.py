"""Facts that the static check collects about a training DAG's values, and the wording of its findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ir.regions import PassKey
from lightning_piper.ir.values import Kind, Slice, TensorSpec, Value

# An `Origin` says which output of which pass a value is: (region, pass, output index). `Contributions` are
# the samples that went into the value, with their weights. A forward value has weight 1 for each slice. A
# gradient of the mean loss over N samples has weight n_i/N for a slice of n_i samples.
Origin = tuple[int, str, int]
Contributions = dict[Slice, Fraction]


class Facts:
    """A collection of facts about the values of a DAG. Static rules read it and add to it.

    Attributes:
        origins: The pass and output that each value comes from.
        parts: The samples that went into each value.
        buckets: Bucket -> why it does not fit the step, or None if it fits.
        outputs: Pass and number of samples -> outputs of chunks that fit this pass.
        flat: `id` of the values whose buckets are right (`verify.sharding`).
    """

    def __init__(self, dag: TrainingDAG) -> None:
        self.dag = dag
        self.origins: dict[Ref, Origin] = {}
        self.parts: dict[Ref, Contributions] = {}
        self.buckets: dict[Bucket, str | None] = {}
        self.outputs: dict[tuple[PassKey, int], list[tuple[Value, ...]]] = {}
        self.flat: set[int] = set()
        # `id` of two tuples of devices -> the answer of `within`
        self._within: dict[tuple[int, int], bool] = {}
        self._shares: dict[int, Fraction] = {}  # number of samples -> their share of the batch

    @cached_property
    def gradients(self) -> Mapping[str, Sequence[Origin]]:
        """Parameter -> the outputs of passes that have a gradient of it."""
        found: dict[str, list[Origin]] = {}
        for key, interface in self.dag.code.interfaces.items():
            for i, out in enumerate(interface.outputs):
                for name in out.names if out.kind == Kind.GRAD else ():
                    found.setdefault(name, []).append((*key, i))
        return found

    def forward(self, node: Node) -> None:
        """Note that a node's output has the origin and the samples of its first input."""
        ref = node.inputs[0]
        if ref in self.origins:
            self.origins[node.id, 0], self.parts[node.id, 0] = self.origins[ref], self.parts[ref]

    def uncovered(
        self,
        weight: Callable[[Slice], Fraction],
        parts: Contributions,
        whole: Slice | None = None,
        some: bool = False,
    ) -> str | None:
        """Return why the parts do not cover each sample of `whole` once with its weight, or None if they do.

        Args:
            weight: Returns the weight that a slice must have.
            parts: The slices, with the weights that they have.
            whole: The samples to cover (default: the local batch).
            some: Whether the parts may leave samples out.
        """
        whole = whole or Slice(0, self.dag.local_batch_size)
        edge = whole.start
        for part in sorted(parts):
            if part.start > edge and not some:
                return f"samples {edge}:{part.start} are missing: add what the chunk of these samples makes"
            if part.start < edge:
                return (
                    f"samples {part.start}:{min(edge, part.stop)} count more than once: take each sample once"
                )
            if (times := parts[part] / weight(part)) > 1 and times.denominator == 1:
                return f"samples {part} count {times} times: take each sample once"
            if times != 1:
                return (
                    f"samples {part} enter with weight {parts[part]} instead of their share of the batch, "
                    f"{weight(part)}"
                )
            edge = part.stop
        return None if edge == whole.stop or some else f"samples {edge}:{whole.stop} are missing"

    def share(self, part: Slice) -> Fraction:
        if (samples := len(part)) not in self._shares:
            self._shares[samples] = Fraction(samples, self.dag.size)
        return self._shares[samples]

    def within(self, some: tuple[int, ...], devices: tuple[int, ...]) -> bool:
        """Return whether `devices` has all devices in `some`. Both are tuples of the DAG, which most nodes share and
        which may be long."""
        key = id(some), id(devices)
        if key not in self._within:
            self._within[key] = set(some) <= set(devices)
        return self._within[key]

    def named(self, ref: Ref) -> str:
        return (
            self.pass_of(self.origins[ref])
            if ref in self.origins
            else f"{self.dag.value(ref).label} of {self.at(self.dag.nodes[ref[0]])}"
        )

    def pass_of(self, origin: Origin) -> str:
        region, kind, index = origin
        output = self.dag.code.interface_of((region, kind)).outputs[index]
        names = f" {names_of(output.names)}" if output.names else ""
        return f"{output.kind}{names} of {kind}[{self.dag.regions[region].label}]"

    def at(self, node: Node) -> str:
        where = f" on device {','.join(map(str, node.devices))}" if node.devices else ""
        by = (
            ""
            if node.origin is None
            else f" (directive {', '.join([str(node.origin), *self.dag.program.ops[node.origin :][:1]])})"
        )
        return f"{node.label} %{node.id}{where}{by}"


def names_of(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def specs_of(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(map(str, specs))


def slices_of(parts: Contributions) -> str:
    return ", ".join(map(str, sorted(parts)))


def carries(value: Value) -> tuple[object, ...]:
    """Return what a new placement along `DATA` does not change: kind, names, bucket and `others`."""
    return value.kind, value.names, value.bucket, value.others
