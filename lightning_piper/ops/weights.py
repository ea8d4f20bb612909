"""Compute the weights of the loss's terms from counts of the batch, before the first backward pass::

    counts 0:2, 2:4 -> own counts and their sum -> all-reduce of the sum -> weights d(own) / d(all)

Every device that needs weights counts the samples itself, because each device has the batch. Only the sum
over replicas is communicated. `ir.terms` defines the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.nodes import Chunk, IssuePriority, Node, Ref
from lightning_piper.ir.terms import Denominator, Term, Weighing
from lightning_piper.ir.values import Kind, Partial, Replicated, Slice, TensorSpec, Value
from lightning_piper.ops.base import Binding, Bound, Operation, Planning, about, register_operation
from lightning_piper.ops.communication.reduce import AllReduce, check_all_reduce, lower_all_reduce
from lightning_piper.ops.facts import Facts, slices_of
from lightning_piper.ops.instruction import Instruction
from lightning_piper.ops.reference import Bundle, Made, Reference


@dataclass(frozen=True, kw_only=True)
class Counts(Node):
    """A node that counts for the denominators of some terms, in each slice of the local batch and in total.

    Attributes:
        terms: Indices into `StepCode.terms`.
        slices: A partition of the local batch.
    """

    turn = IssuePriority.FIRST

    terms: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True)
class CountsSum(AllReduce):
    """A node that sums counts over the replicas.

    Attributes:
        mesh: The mesh along whose `DATA` axis the batch is divided.
    """

    sums = False

    mesh: Mesh

    def members(self, replica: int) -> tuple[int, ...]:
        return tuple(self.devices[group_rank] for group_rank in self.mesh.line(DATA, replica))

    @property
    def label(self) -> str:
        return "allreduce"


@dataclass(frozen=True, kw_only=True)
class Weights(Node):
    """A node that makes the weight of each slice in each term, from the slice's counts and the total.

    Outputs, for each term and each slice in turn: the weight, and the gradient of the loss with this weight.

    Attributes:
        terms, slices: As in the `Counts` that it reads.
        parts: The number by which the weights are divided: the number of replicas if the loss is the mean of
            the replicas' losses, otherwise 1.
    """

    turn = IssuePriority.AFTER_FORWARD  # the counts of other replicas arrive meanwhile

    terms: tuple[int, ...]
    slices: tuple[Slice, ...]
    parts: int = 1

    def index_of(self, term: int, part: Slice, seed: bool) -> int:
        """Return the index of the output with the weight (with `seed`, the gradient) of a slice in a term."""
        return 2 * (self.terms.index(term) * len(self.slices) + self.slices.index(part)) + seed


@dataclass(frozen=True, kw_only=True)
class CountInstruction(Instruction):
    """An instruction that counts for each slice and in total."""

    op: ClassVar[str] = "count"
    terms: tuple[int, ...]
    slices: tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True)
class WeighInstruction(Instruction):
    """An instruction that computes weights from the counts of each slice and the total counts."""

    op: ClassVar[str] = "weigh"
    terms: tuple[int, ...]
    parts: int


# Outputs of the nodes


def counted(dag: TrainingDAG, terms: tuple[int, ...], slices: tuple[Slice, ...]) -> tuple[Value, Value]:
    """Return the outputs of a `Counts`: the counts of each slice, and the total counts."""
    width = sum(_denominator(dag, term).width for term in terms)
    names = tuple(dag.code.terms[term].label for term in terms)
    shared = Partial() if dag.replicas > 1 else Replicated()
    own = Value(Kind.COUNT, names, (TensorSpec((len(slices), width), torch.float64, (width, 1)),), shared)
    return own, Value(Kind.COUNT, names, (TensorSpec((width,), torch.float64, (1,)),), shared)


def counted_buffers(dag: TrainingDAG, node: Counts) -> tuple[str, ...]:
    """Return the module's buffers that a `Counts` reads."""
    return tuple(name for term in node.terms for name in _denominator(dag, term).buffers)


def weighed(dag: TrainingDAG, terms: tuple[int, ...], slices: tuple[Slice, ...]) -> tuple[Value, ...]:
    """Return the outputs of a `Weights`."""
    specs = {Kind.WEIGHT: torch.float64, Kind.SEED: dag.code.loss_dtype}
    return tuple(
        Value(kind, (dag.code.terms[term].label,), (TensorSpec((), dtype, ()),))
        for term in terms
        for _ in slices
        for kind, dtype in specs.items()
    )


def share_of(dag: TrainingDAG, term: int, part: Slice) -> float | None:
    """Return the weight of a part of each local batch in a term; None if nodes must compute the weight from
    counts of the batch."""
    replicas = dag.replicas if dag.mean_of_replicas else 1
    known = dag.code.terms[term]
    if known.weighing == Weighing.SAMPLES:
        return len(part) / dag.size
    if known.weighing == Weighing.EACH or known.folds != "sum":  # a maximum has no weights
        return 1.0
    if known.denominator is not None:
        divided = len(part) * dag.replicas < dag.size or replicas < dag.replicas
        return None if divided or known.denominator.guarded else 1 / replicas
    return 1 / replicas


def _denominator(dag: TrainingDAG, term: int) -> Denominator:
    found = dag.code.terms[term].denominator
    assert found is not None
    return found


def weights_of(
    denominators: Sequence[Denominator], own: torch.Tensor, total: torch.Tensor, parts: int
) -> list[torch.Tensor]:
    """Return for each denominator the weights of all slices, a float64 tensor `[slices]`.

    Args:
        own: Counts of each slice, `[slices, width]`.
        total: Counts of all slices and replicas, `[width]`.
        parts: The number by which the weights are divided.
    """
    found, start = [], 0
    for denominator in denominators:
        stop = start + denominator.width
        of_all = denominator.of(total[start:stop].unbind(0))
        found.append(denominator.of(own[:, start:stop].unbind(1), part=True) / of_all / parts)
        start = stop
    return found


# Static rules


def check_counts(facts: Facts, node: Counts) -> Iterable[str]:
    """The node must count every sample of the local batch once. Its terms must be ratios."""
    dag = facts.dag
    if problem := facts.uncovered(facts.share, {part: facts.share(part) for part in node.slices}):
        yield f"{facts.at(node)}: {problem}"
    if len(set(node.slices)) < len(node.slices):
        yield (
            f"{facts.at(node)} counts samples "
            f"{slices_of(dict.fromkeys(node.slices, facts.share(node.slices[0])))} more than once"
        )
    if any(dag.code.terms[term].weighing != Weighing.RATIO for term in node.terms):
        yield f"{facts.at(node)} counts for a term that has no denominator"
    elif node.outputs != counted(dag, node.terms, node.slices):
        yield f"{facts.at(node)} describes its counts wrongly as {', '.join(v.label for v in node.outputs)}"


def check_counts_sum(facts: Facts, node: CountsSum) -> Iterable[str]:
    """The node must sum the counts of all replicas once."""
    yield from check_all_reduce(facts, node)
    if node.mesh != facts.dag.mesh:
        yield f"{facts.at(node)} sums counts over {node.mesh}, but the batch is divided over {facts.dag.mesh}"


def check_weights(facts: Facts, node: Weights) -> Iterable[str]:
    """The node must read its slices' counts and the total counts.

    The total counts are summed over the replicas, unless the loss is the mean of the replicas' losses.
    """
    dag = facts.dag
    own, total = ((dag.nodes[ref[0]], ref[1]) for ref in node.inputs)
    if (
        not isinstance(own[0], Counts)
        or own[1] != 0
        or (own[0].terms, own[0].slices) != (node.terms, node.slices)
    ):
        yield (
            f"{facts.at(node)} needs the counts of its slices as its first input, but reads "
            f"{facts.named(node.inputs[0])}"
        )
        return
    summed = isinstance(total[0], CountsSum)
    source = total[0].inputs[0] if summed else node.inputs[1]
    if source != (own[0].id, 1):
        yield (
            f"{facts.at(node)} needs the counts of the whole batch as its second input, but reads "
            f"{facts.named(node.inputs[1])}"
        )
    if summed != (dag.replicas > 1 and not dag.mean_of_replicas):
        one, all_ = "the counts of one replica", "the counts of all replicas"
        yield f"{facts.at(node)} divides by {all_ if summed else one}, but it must divide by {one if summed else all_}"
    if node.parts != (dag.replicas if dag.mean_of_replicas else 1):
        wanted = dag.replicas if dag.mean_of_replicas else 1
        yield f"{facts.at(node)} divides its weights by {node.parts}, but it must divide them by {wanted}"
    if node.outputs != weighed(dag, node.terms, node.slices):
        yield f"{facts.at(node)} describes its weights wrongly"


def check_reader(
    facts: Facts, node: Node, refs: Sequence[Ref | None], wanted: Sequence[tuple[int, Slice]], seed: bool
) -> Iterable[str]:
    """Each reader of a weight must read the weight of its own samples and term.

    Args:
        refs: The sources of the weights; None for a weight that no node makes.
        wanted: The term and samples of each weight.
        seed: Whether the node reads gradients of the loss with these weights, not the weights themselves.
    """
    if len(refs) not in (0, len(wanted)):
        yield f"{facts.at(node)} has {len(refs)} source{'s' * (len(refs) != 1)} of weights, but it needs {len(wanted)}"
        return
    for ref, (term, part) in zip(refs, wanted, strict=False):
        if ref is None:
            continue
        source, label = facts.dag.nodes[ref[0]], facts.dag.code.terms[term].label
        if not isinstance(source, Weights) or term not in source.terms or part not in source.slices:
            yield (
                f"{facts.at(node)} takes the weight of samples {part} in {label} from {facts.named(ref)}, which does not "
                "have this weight"
            )
        elif ref[1] != source.index_of(term, part, seed):
            yield (
                f"{facts.at(node)} needs the weight of samples {part} in {label}, but reads another weight of "
                f"{facts.at(source)}"
            )


def unweighed(facts: Facts) -> Iterable[str]:
    """If any node makes weights, nodes must make every weight that `share_of` does not give."""
    dag = facts.dag
    for node in dag.nodes.values() if any(dag.of_type(Weights)) else ():
        for (term, part), ref in wanted_by(dag, node):
            if ref is None and share_of(dag, term, part) is None:
                yield (
                    f"{facts.at(node)} weighs samples {part} in {dag.code.terms[term].label}, but no node "
                    "makes the weight"
                )


def wanted_by(dag: TrainingDAG, node: Node) -> list[tuple[tuple[int, Slice], Ref | None]]:
    """Return ((term, samples), source of the weight) for each value that a node weights.

    The source is None if no node makes the weight. The list is empty if the node weights nothing.
    """
    weighs = getattr(node, "weights", None)
    if weighs is None:
        return []
    if isinstance(node, Chunk):
        wanted = [(term, node.slice) for term in dag.interface(node).seeds]
    else:
        wanted = list(zip(node.terms, node.slices, strict=False))  # type: ignore[attr-defined]
    return list(zip(wanted, weighs or (None,) * len(wanted), strict=False))


# Reference semantics


def interpret_counts(run: Reference, node: Counts) -> Made:
    return [_count(run, node.terms, node.slices, replica) for replica in run.group_ranks]


def _count(run: Reference, terms: Sequence[int], slices: Sequence[Slice], replica: int) -> list[Bundle]:
    """Return the outputs of a `Counts` on one replica: the counts of each slice, and their sums over the
    slices."""
    rows = []
    for part in slices:
        here = run.samples_of(replica, part)
        found = [
            _code(run.dag.step.at(len(part)).terms[term]).counted(run.leaves, run.tensors, here)
            for term in terms
        ]
        rows.append(torch.cat(found))
    own = torch.stack(rows)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return [[own], [total]]


def _code(term: Term) -> Denominator:
    assert term.denominator is not None
    return term.denominator


def interpret_counts_sum(run: Reference, node: CountsSum) -> Made:
    return [[run.sum_over(node, node.mesh.line(DATA, group_rank))] for group_rank in run.group_ranks]


def interpret_weights(run: Reference, node: Weights) -> Made:
    made: Made = []
    for replica in run.group_ranks:
        (own,), (total,) = run.inputs(node, replica)
        found = weights_of([_denominator(run.dag, term) for term in node.terms], own, total, node.parts)
        made.append([[x] for row in found for w in row for x in (w, w.to(run.dag.code.loss_dtype))])
    return made


def implied(run: Reference, term: int, part: Slice, slices: Sequence[Slice], replica: int) -> torch.Tensor:
    """Return the weight of a slice for which no node makes a weight: the weight in the complete program.

    Args:
        slices: The partition of the local batch that the slice belongs to.
    """
    share = share_of(run.dag, term, part)
    if share is not None:
        return torch.tensor(share, dtype=torch.float64)
    key = ("weights", term, tuple(slices))
    if key not in run.kept:
        run.kept[key] = [_count(run, [term], slices, r) for r in run.group_ranks]
    counts = run.kept[key]
    # The total is over all replicas, or over this replica if the loss is the mean of the replicas' losses.
    total = counts[replica if run.dag.mean_of_replicas else run.dag.mesh.line(DATA, replica)[0]][1][0]
    for other in () if run.dag.mean_of_replicas else run.dag.mesh.line(DATA, replica)[1:]:
        total = total + counts[other][1][0]
    parts = run.dag.replicas if run.dag.mean_of_replicas else 1
    weights = weights_of([_denominator(run.dag, term)], counts[replica][0][0], total, parts)[0]
    return weights[list(slices).index(part)]


# Plans


def lower_counts(plan: Planning, node: Counts) -> None:
    writes = tuple(plan.new_slot((node.id, i), "sum", node.stream) for i in range(2))
    plan.emit(CountInstruction(**about(node), writes=writes, terms=node.terms, slices=node.slices))


def lower_weights(plan: Planning, node: Weights) -> None:
    reads = tuple(plan.read(ref, node) for ref in node.inputs)
    made = [(node.id, i) for i in range(len(node.outputs))]
    writes = tuple(plan.new_slot(ref, "sum", node.stream) if plan.is_read(ref) else None for ref in made)
    plan.emit(WeighInstruction(**about(node), reads=reads, writes=writes, terms=node.terms, parts=node.parts))


# Runtime


def bind_count(instruction: CountInstruction, on: Binding) -> Bound:
    """Return the function that counts each slice, and adds the counts from the first slice to the last."""
    slots, (own, total) = on.slots, (slot for slot in instruction.writes if slot is not None)
    count = on.chunks.bind_counts(instruction.terms, instruction.slices)

    def call() -> None:
        rows = count()
        first = rows[0]
        for row in rows[1:]:
            first = first + row
        slots[own], slots[total] = (torch.stack(rows),), (first,)

    return call


def bind_weigh(instruction: WeighInstruction, on: Binding) -> Bound:
    """Return the function that computes weights, and the gradients of the loss with these weights. Only the
    gradients have the loss scale."""
    slots, (own, total), writes = on.slots, instruction.reads, instruction.writes
    denominators, dtype = on.chunks.denominators(instruction.terms), on.chunks.loss_dtype

    def weigh() -> None:
        found = torch.cat(
            weights_of(denominators, slots[own.slot][0], slots[total.slot][0], instruction.parts)
        )
        for read in (own, total):
            if read.last:
                slots[read.slot] = None
        pairs = zip(found.unbind(0), (found * on.chunks.scale).to(dtype).unbind(0), strict=True)
        for slot, value in zip(writes, (x for pair in pairs for x in pair), strict=True):
            if slot is not None:
                slots[slot] = (value,)

    return weigh


register_operation(
    Operation(
        Counts, check_counts, interpret_counts, lower_counts, bind={CountInstruction: bind_count}, alike=True
    )
)
register_operation(Operation(CountsSum, check_counts_sum, interpret_counts_sum, lower_all_reduce, alike=True))
register_operation(
    Operation(
        Weights,
        check_weights,
        interpret_weights,
        lower_weights,
        bind={WeighInstruction: bind_weigh},
        alike=True,
    )
)
