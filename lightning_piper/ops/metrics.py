"""Loss and logged values: merged over slices, summed over devices, reported on every device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from lightning_piper.common.units import counted
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA
from lightning_piper.ir.nodes import IssuePriority, Node, Ref
from lightning_piper.ir.regions import LOSS, StepCode
from lightning_piper.ir.values import Kind, Partial, Replicated, Slice, TensorSpec, Value
from lightning_piper.ops.base import Binding, Bound, Operation, Planning, about, register_operation
from lightning_piper.ops.communication.reduce import (
    AllReduce,
    check_all_reduce,
    interpret_all_reduce,
    lower_all_reduce,
)
from lightning_piper.ops.facts import Contributions, Facts
from lightning_piper.ops.instruction import Instruction
from lightning_piper.ops.reference import Bundle, Made, Reference, sum_in_order
from lightning_piper.ops.weights import check_reader, implied, share_of


@dataclass(frozen=True, kw_only=True)
class Metrics(Node):
    """A node that merges one region's values over slices into a float64 vector of all metrics of the step.

    Attributes:
        metrics: The metric of each input, as an index into `metric_names`. A loss of several terms has an
            input for each term.
        terms: How each input is weighted, as an index into `StepCode.terms`.
        slices: The samples that each input comes from.
        weights: The source of each input's weight; None if the weight does not follow from the batch. Empty:
            no weight follows from the batch.
    """

    turn = IssuePriority.LOCAL_BOOKKEEPING

    metrics: tuple[int, ...]
    terms: tuple[int, ...]
    slices: tuple[Slice, ...]
    weights: tuple[Ref | None, ...] = ()

    @property
    def reads(self) -> tuple[Ref, ...]:
        return self.inputs + tuple(ref for ref in self.weights if ref is not None)


@dataclass(frozen=True, kw_only=True)
class MetricsSum(AllReduce):
    """A node that sums the metrics vectors of all devices.

    An element is 0 except on the devices that make its metric.
    """

    sums = False
    everywhere = True

    @property
    def label(self) -> str:
        return "allreduce"


@dataclass(frozen=True, kw_only=True)
class StepReport(Node):
    """A node that outputs the loss and logged values on every device: the sum of its inputs."""

    turn = IssuePriority.LAST
    everywhere = True

    @property
    def label(self) -> str:
        return "report"


@dataclass(frozen=True, kw_only=True)
class Merge(Instruction):
    """An instruction that merges values over slices into a float64 vector.

    Attributes:
        metrics: The metric of each value that the instruction reads, as an index into `metric_names`.
        weights: The weight of each value, or None if the weight is the next of the bundles read after the
            values.
        folds: How the values of each metric become one: `sum` of the weighted values, or `max` or `min` of the
            values without weights.
        widths: The number of elements of each metric.
        replica, replicas: The vector has elements for all metrics for each replica in turn. Only this
            replica's elements are not 0.
        counts: Whether the values count. If not, all elements are 0, because another device has the same
            samples.
    """

    op: ClassVar[str] = "merge"
    metrics: tuple[int, ...]
    weights: tuple[float | None, ...]
    folds: tuple[str, ...]
    widths: tuple[int, ...]
    replica: int = 0
    replicas: int = 1
    counts: bool = True


@dataclass(frozen=True, kw_only=True)
class ReportInstruction(Instruction):
    """An instruction that outputs the sum of metrics vectors, merged over the replicas by `folds`. The fields
    mean the same as in `Merge`."""

    op: ClassVar[str] = "report"
    folds: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    replicas: int = 1


def metrics_value(dag: TrainingDAG) -> Value:
    """Return the description of a metrics vector: the elements of all metrics, repeated for each replica in
    turn.

    A node sets only the elements of its own replica and metrics. The other elements are 0.
    """
    count = dag.replicas * sum(widths(dag.code))
    return Value(Kind.METRICS, metric_names(dag.code), (TensorSpec((count,), torch.float64, (1,)),))


def metric_names(code: StepCode) -> tuple[str, ...]:
    """Return the metrics' names in the order of the vector: the loss, if any, then the logged tensors."""
    return (*[LOSS][: first_log(code)], *(name for log in code.logs for name in log.outputs))


def first_log(code: StepCode) -> int:
    """Return the index of the first logged tensor.

    A lookup by name starts at this index, because users may log under the loss's name.
    """
    return 1 if code.makes_loss else 0


def folds(code: StepCode) -> tuple[str, ...]:
    """Return how the weighted values of each metric in the vector become one: `sum`, `max` or `min`."""
    outputs = [
        out for interface in code.interfaces.values() for out in interface.outputs if out.kind == Kind.LOG
    ]
    found = {out.names[0]: code.terms[out.term].folds for out in outputs if out.term is not None}
    return (*["sum"][: first_log(code)], *(found[name] for log in code.logs for name in log.outputs))


def widths(code: StepCode) -> tuple[int, ...]:
    """Return the number of elements of each metric.

    It is 1, or more for a tensor from which a logged value is computed.
    """
    found = {}
    for key, interface in code.interfaces.items():
        for output, specs in zip(interface.outputs, code.code[key].outputs, strict=True):
            if output.kind == Kind.LOG:
                found[output.names[0]] = math.prod(specs[0].shape)
    return (*[1][: first_log(code)], *(found[name] for log in code.logs for name in log.outputs))


def named(code: StepCode, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the metrics of the whole batch by name, from their vector.

    A logged value that is computed from several tensors replaces these tensors.
    """
    sizes = widths(code)
    parts = (x[0] if width == 1 else x for x, width in zip(vector.split(list(sizes)), sizes, strict=True))
    metrics = dict(zip(metric_names(code), parts, strict=True))
    of = {log.name: log.computed for log in code.logs if log.computed is not None}
    sources = {source for computed in of.values() for source in computed.names}
    own = {name: value for name, value in metrics.items() if name not in sources}
    return {**own, **{name: x.of([metrics[source] for source in x.names]).double() for name, x in of.items()}}


# Static rules


def check_metrics(facts: Facts, node: Metrics) -> Iterable[str]:
    """Each input must be the metric, term and samples that the node declares for it. For each term of a
    metric, the inputs must cover the local batch once."""
    names = node.outputs[0].names
    parts: dict[tuple[int, int], Contributions] = {}
    if replace(node.outputs[0], placement=Replicated()) != metrics_value(facts.dag):
        yield (
            f"{facts.at(node)} declares {node.outputs[0].label}, but the step has other metrics or another "
            "placement of them"
        )
    code = facts.dag.code
    for ref, metric, term, part in zip(node.inputs, node.metrics, node.terms, node.slices, strict=True):
        value = facts.dag.value(ref)
        if value.names != (names[metric],) or list(facts.parts.get(ref, {})) != [part]:
            yield (
                f"{facts.at(node)} declares its input {facts.named(ref)} as {names[metric]} of samples {part}, but this "
                "input is another metric or of other samples"
            )
        elif (made := facts.origins[ref]) and code.interfaces[made[0], made[1]].outputs[made[2]].term != term:
            yield (
                f"{facts.at(node)} weighs {facts.named(ref)} as {code.terms[term].label}, but it has "
                "another weight"
            )
        total = parts.setdefault((metric, term), {})
        total[part] = total.get(part, 0) + facts.share(part)
    yield from check_reader(
        facts, node, node.weights, list(zip(node.terms, node.slices, strict=True)), seed=False
    )
    for (metric, _), total in parts.items():
        if problem := facts.uncovered(facts.share, total):
            yield f"metric {names[metric]} ({facts.at(node)}): {problem}"


def check_report(facts: Facts, node: StepReport) -> Iterable[str]:
    return ()


def reported(facts: Facts) -> Iterable[str]:
    """Every metric must reach the report once, and the report must reach every device."""
    reports = list(facts.dag.of_type(StepReport))
    if len(reports) != 1:
        yield f"the step has {counted(len(reports), 'report')} of the loss, but it needs one"
        return
    refs, devices = reports[0].inputs, facts.dag.devices()
    if reports[0].devices != devices:
        yield f"{facts.at(reports[0])} does not reach all devices, {list(devices)}"
    for metrics in facts.dag.of_type(Metrics):
        if isinstance(metrics.outputs[0].placement, Partial) != (len(devices) > 1):
            yield (
                f"{facts.at(metrics)} makes a value with the placement {metrics.outputs[0].placement}, but the step has "
                f"{counted(len(devices), 'device')}"
            )
    for ref in refs:
        if isinstance(facts.dag.value(ref).placement, Partial):
            yield (
                f"{facts.at(reports[0])} reads {facts.named(ref)} of one device only: sum it over the devices first"
            )
    sums = [facts.dag.nodes[ref[0]] for ref in refs]
    if any(isinstance(s, MetricsSum) for s in sums):
        refs = tuple(ref for s in sums for ref in s.inputs)
    made = {(m.id, 0) for m in facts.dag.of_type(Metrics)}
    found = {
        (metric, term)
        for m in facts.dag.of_type(Metrics)
        for metric, term in zip(m.metrics, m.terms, strict=True)
    }
    if sorted(refs) != sorted(made) or len(refs) != len(set(refs)):
        yield f"{facts.at(reports[0])} does not take every region's metrics exactly once"
    if made and len(found) != len(_terms_of_metrics(facts.dag)):
        yield f"{facts.at(reports[0])}: some metrics are made by no region"


def _terms_of_metrics(dag: TrainingDAG) -> set[tuple[int, int]]:
    """Return the pairs (metric, term): a metric is the sum of its terms."""
    names = metric_names(dag.code)
    outputs = [
        out for interface in dag.code.interfaces.values() for out in interface.outputs if out.term is not None
    ]
    found = {
        (names.index(out.names[0], first_log(dag.code)), out.term) for out in outputs if out.kind == Kind.LOG
    }
    return {(metric, term) for metric, term in found if term is not None} | {
        (0, out.term) for out in outputs if out.kind == Kind.LOSS and out.term is not None
    }


def is_counted(dag: TrainingDAG, group_rank: int) -> bool:
    """Return whether a member's metrics count. Of all members with the same samples, one member counts."""
    return group_rank in dag.mesh.lines(DATA)[0]


# Reference semantics


def interpret_metrics(run: Reference, node: Metrics) -> Made:
    return [[[_merged(run, node, replica)]] for replica in run.group_ranks]


def _merged(run: Reference, node: Metrics, replica: int) -> torch.Tensor:
    """Return the metrics vector of a node on one replica."""
    how, inputs = folds(run.dag.code), run.inputs(node, replica)
    vector = torch.zeros(run.dag.replicas, sum(sizes := widths(run.dag.code)), dtype=torch.float64)
    refs = node.weights or (None,) * len(inputs)
    weighted: dict[int, list[torch.Tensor]] = {}
    for bundle, metric, term, part, ref in zip(
        inputs, node.metrics, node.terms, node.slices, refs, strict=True
    ):
        value = bundle[0].double().cpu().flatten()
        if ref is None:
            of_term = [
                s
                for s, t, m in zip(node.slices, node.terms, node.metrics, strict=True)
                if (t, m) == (term, metric)
            ]
            weight = implied(run, term, part, sorted(of_term), replica)
        else:
            weight = run.values[ref, replica][0]
        # A ratio with a denominator of 0 is not finite and has weight 0.
        weighted.setdefault(metric, []).append(
            torch.where(weight == 0, torch.zeros_like(value), value * weight.cpu())
        )
    if not is_counted(run.dag, replica):
        return vector.flatten()
    own = vector[run.dag.replica_of(replica)].split(list(sizes))
    for metric, values in weighted.items():
        own[metric].copy_(_reduced(how[metric], values))
    return vector.flatten()


def interpret_report(run: Reference, node: StepReport) -> Made:
    """Sum the vectors, merge the replicas' elements of each metric, and set `run.metrics`. Do not set it if
    the node has no inputs. Return no outputs for any group rank."""
    if node.inputs:  # the step has a loss or a logged value
        vector = sum_in_order([run.values[ref, 0] for ref in node.inputs])[0]
        columns = vector.view(run.dag.replicas, -1).split(list(widths(run.dag.code)), 1)
        merged = [
            _reduced(fold, list(column)) for fold, column in zip(folds(run.dag.code), columns, strict=True)
        ]
        run.metrics = named(run.dag.code, torch.cat(merged))
    return [[] for _ in run.group_ranks]


def _reduced(fold: str, values: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum, maximum or minimum (`fold`) of values, which are weighted already."""
    if fold == "sum":
        bundles: list[Bundle] = [[v] for v in values]
        return sum_in_order(bundles)[0]
    return torch.stack(values).amax(0) if fold == "max" else torch.stack(values).amin(0)


# Plans


def lower_metrics(plan: Planning, node: Metrics) -> None:
    """Emit the merge of the node's inputs. Raise an error if an input has no weight: neither a node nor
    `share_of` gives one."""
    refs = node.weights or (None,) * len(node.inputs)
    weights = tuple(
        share_of(plan.dag, term, part) if ref is None else None
        for term, part, ref in zip(node.terms, node.slices, refs, strict=True)
    )
    reads = tuple(plan.read(ref, node) for ref in (*node.inputs, *(ref for ref in refs if ref is not None)))
    if sum(weight is None for weight in weights) != len(reads) - len(node.inputs):
        raise VerificationError(
            f"%{node.id} {node.label} weighs a ratio, but no node makes the weight. If you wrote a "
            "directive, complete the DAG in `apply`. Otherwise, report this [PIPER-V002]"
        )
    slot = plan.new_slot((node.id, 0), "sum", node.stream)
    plan.emit(
        Merge(
            **about(node),
            reads=reads,
            writes=(slot,),
            metrics=node.metrics,
            weights=weights,
            folds=folds(plan.dag.code),
            widths=widths(plan.dag.code),
            replica=plan.replica,
            replicas=plan.dag.replicas,
            counts=is_counted(plan.dag, plan.group_rank),
        )
    )


def lower_report(plan: Planning, node: StepReport) -> None:
    """Emit the report of the inputs that this device makes. Raise an error if it makes none of them."""
    own = tuple(plan.read(ref, node) for ref in node.inputs if plan.has(ref))
    if node.inputs and not own:
        raise VerificationError(
            f"%{node.id} {node.label} has nothing to report on device {plan.device}. If you wrote a "
            "directive, give the node an input on each of its devices. Otherwise, report this [PIPER-V002]"
        )
    plan.emit(
        ReportInstruction(
            **about(node),
            reads=own,
            folds=folds(plan.dag.code),
            widths=widths(plan.dag.code),
            replicas=plan.dag.replicas,
        )
    )


# Runtime


def bind_merge(instruction: Merge, on: Binding) -> Bound:
    """Bind the merge of values into a vector. Sums are left folds in the order of the reads."""
    into, count, size = instruction.into, len(instruction.metrics), sum(instruction.widths)
    reads, weighing = instruction.reads[:count], instruction.reads[count:]
    replica, replicas, slots, device = instruction.replica, instruction.replicas, on.slots, on.device
    weight, made, factor_of = _weights(instruction, device)
    index, extremes = _folded(instruction, device)
    # Whether every element of the vector has one value, so that there is nothing to sum.
    each_once = index.tolist() == [list(range(len(weight) - 1))] and count > 0
    # `index` then does not name the appended zero
    weight, zero = (weight[:-1], []) if each_once else (weight, [weight.new_zeros(1)])

    def merge() -> None:
        values = [slots[read.slot][0] for read in reads]
        factors = [slots[read.slot][0] for read in weighing]
        for read in instruction.reads:
            if read.last:
                slots[read.slot] = None
        if len({(x.dtype, x.shape) for x in values}) == 1:
            flat = torch.stack(values).double().flatten()
            flat = torch.cat([flat, *zero]) if zero else flat
        else:
            flat = torch.cat([*(x.double().flatten() for x in values), *zero])
        if factors:
            by = weight.index_put((made,), torch.stack(factors)[factor_of])
            weighted = torch.where(by == 0, 0.0, flat * by)  # a ratio with a denominator of 0 is not finite
        else:
            weighted = flat * weight
        first, *rest = (weighted,) if each_once else weighted[index].unbind()
        for row in rest:
            first = first + row
        for at, where, extreme in extremes:
            first[at] = extreme(flat[where], 0)
        if not instruction.counts:
            first = torch.zeros(replicas * size, dtype=torch.float64, device=device)
        elif replicas > 1:
            padded = torch.zeros(replicas * size, dtype=torch.float64, device=device)
            padded[replica * size : (replica + 1) * size] = first
            first = padded
        slots[into] = (first,)

    return merge


def _weights(instruction: Merge, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weights of the numbers that a merge reads.

    Returns:
        The weight of each number, and 0 for the zero that is appended to them. The positions of the numbers
        whose weights are read. For each of these positions, the index of its weight among the weights read.
    """
    given = [
        (instruction.widths[m], w) for m, w in zip(instruction.metrics, instruction.weights, strict=True)
    ]
    weights = [w for width, w in given for _ in range(width)]
    read = [k for k, width in enumerate(width for width, w in given if w is None) for _ in range(width)]
    weight = torch.tensor(
        [*(1.0 if w is None else w for w in weights), 0.0], dtype=torch.float64, device=device
    )
    made = torch.tensor([i for i, w in enumerate(weights) if w is None], dtype=torch.int64, device=device)
    return weight, made, torch.tensor(read, dtype=torch.int64, device=device)


def _folded(
    instruction: Merge, device: torch.device
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor, Any]]]:
    """Return how a merge combines the numbers that it reads into the vector.

    Returns:
        Rows to be added up: each has the index of one number for each element of the vector. For each `max`
        or `min` metric: its positions in the vector, rows of indices, and the function that reduces them.
    """
    widths = instruction.widths
    sizes = [widths[metric] for metric in instruction.metrics]
    rows: dict[int, list[torch.Tensor]] = {}
    for metric, numbers in zip(instruction.metrics, torch.arange(sum(sizes)).split(sizes), strict=True):
        rows.setdefault(metric, []).append(numbers)
    added = {metric: row for metric, row in rows.items() if instruction.folds[metric] == "sum"}
    depth = max((len(row) for row in added.values()), default=1)
    index = torch.full((depth, sum(widths)), sum(sizes))  # `sum(sizes)` is the index of the appended zero
    positions = torch.arange(sum(widths)).split(list(widths))
    for metric, row in added.items():
        index[: len(row), positions[metric]] = torch.stack(row)
    extremes = [
        (
            positions[metric].to(device),
            torch.stack(row).to(device),
            getattr(torch, f"a{instruction.folds[metric]}"),
        )
        for metric, row in rows.items()
        if metric not in added
    ]
    return index.to(device), extremes


def bind_report(instruction: ReportInstruction, on: Binding) -> Bound:
    """Return the function that sums the vectors, merges the replicas' elements of each metric, and sets
    `StepOutputs.metrics`: an empty vector if the instruction reads nothing."""
    reads = instruction.reads
    replicas = instruction.replicas
    slots = on.slots
    step_outputs = on.step_outputs
    device = on.device
    positions = torch.arange(sum(instruction.widths), device=device).split(list(instruction.widths))
    extremes = [
        (at, getattr(torch, f"a{how}"))
        for at, how in zip(positions, instruction.folds, strict=True)
        if how != "sum"
    ]

    def report() -> None:
        if not reads:  # nothing is logged
            step_outputs.metrics = torch.zeros(0, dtype=torch.float64, device=device)
            return
        total = slots[reads[0].slot][0]
        for read in reads[1:]:
            total = total + slots[read.slot][0]
        for read in reads:
            if read.last:
                slots[read.slot] = None
        if replicas > 1:
            rows = total.view(replicas, -1)
            total = rows[0]
            for row in rows[1:]:  # the weights of means are applied already
                total = total + row
            for at, extreme in extremes:
                total[at] = extreme(rows[:, at], 0)
        step_outputs.metrics = total

    return report


register_operation(
    Operation(Metrics, check_metrics, interpret_metrics, lower_metrics, bind={Merge: bind_merge}, alike=True)
)
register_operation(
    Operation(MetricsSum, check_all_reduce, interpret_all_reduce, lower_all_reduce, alike=True)
)
register_operation(
    Operation(
        StepReport,
        check_report,
        interpret_report,
        lower_report,
        bind={ReportInstruction: bind_report},
        alike=True,
    )
)
